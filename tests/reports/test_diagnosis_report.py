"""The report of a diagnosis: everything is in it, and nothing is fetched."""

from __future__ import annotations

import pytest
import torch
from markupsafe import escape
from test_html import EVIL, read

from isthmus.projection.diagnosis import diagnose_layer
from isthmus.projection.recommendation import recommend
from isthmus.projection.statistics import InputMoments
from isthmus.reports.diagnosis import captured_figure, diagnosis_report


def layer(seed: int = 0, size: float = 1.0):
    draw = torch.Generator().manual_seed(seed)
    moments = []
    for _ in range(2):
        moments.append(InputMoments.empty(8))
        moments[-1].add(torch.randn(100, 8, generator=draw))
    tau = size * torch.randn(2, 6, 8, generator=draw)
    return diagnose_layer(tau, moments, seeds=(1, 2))


def page(name: str = "second.weight", left_out=(), **layers):
    found = {"first.weight": layer(), name: layer(1), **layers}
    labels = ["base", "news", "movies & more"]
    return diagnosis_report(labels, found, dict(left_out), recommend(found))


def test_nothing_is_fetched_and_names_are_escaped():
    found = {EVIL: layer()}
    shown = diagnosis_report([EVIL, "a", EVIL], found, {EVIL: EVIL}, recommend(found))
    assert all(reference.startswith("#") for reference in read(shown).fetched)
    assert "script" not in read(shown).tags
    assert EVIL not in shown


def test_tables_scroll():
    assert read(page()).stray == []


@pytest.mark.parametrize(
    "shown",
    [
        "expert 2: movies &amp; more",
        "<td>second.weight</td>",
        "merge_method: ",
        "pooler is not judged: no example reaches it.",
        "left on new inputs",
        '<th class="n">bound</th>',
        "<svg",
    ],
)
def test_the_report_shows(shown):
    assert shown in page(left_out={"pooler": "no example reaches it"})


def test_every_share_is_there():
    found = {"first.weight": layer()}
    advice = recommend(found)
    shown = diagnosis_report(["base", "a", "b"], found, {}, advice)
    for choice in advice.choices:
        assert f'<td class="n">{100 * choice.left:.1f}</td>' in shown
    for sentence in advice.sentences:
        assert escape(sentence) in shown


def test_the_figure_is_the_same_for_the_same_numbers():
    found = {"a": layer(), "b": layer(1)}
    first, second = (captured_figure(found, recommend(found)) for _ in range(2))
    assert first == second
    assert "captured energy, %" in first


def test_nothing_to_merge_is_a_report_too():
    idle = layer(size=0.0)
    shown = diagnosis_report(["base", "a", "b"], {"w": idle}, {}, recommend({"w": idle}))
    assert "there is nothing to merge" in shown
    assert "nan" not in shown.partition("<svg")[0]
