"""Model cards say in good English what was merged."""

from __future__ import annotations

import pytest

from isthmus.methods.registry import METHODS
from isthmus.reports.card import model_card


@pytest.mark.parametrize(
    ("method", "models", "base", "sentence"),
    [
        ("passthrough", ["a"], None, "Made from one model by `passthrough` with Isthmus 1:"),
        (
            "slerp",
            ["a"],
            "b",
            "A merge of one model with its base by `slerp` (Shoemake 1985, Animating rotation with "
            "quaternion curves, section 3.3), made with Isthmus 1:",
        ),
        (
            "ties",
            ["a", "b"],
            "c",
            "A merge of 2 models by `ties` (Yadav et al. 2023, arXiv 2306.01708, section 4), made "
            "with Isthmus 1:",
        ),
    ],
)
def test_the_first_sentence(method, models, base, sentence):
    card = model_card(
        title="t",
        method=method,
        reference=METHODS[method].reference,
        models=models,
        base_model=base,
        recipe="",
        dtypes={"float32": 1},
        notes=[],
        version="1",
    )
    assert f"\n# t\n\n{sentence}\n\n" in card
