"""Models whose MLPs differ in width, aligned and merged."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

import isthmus
from isthmus.checkpoints import open_checkpoint
from isthmus.engine.verify import verify
from isthmus.errors import SymmetryError
from isthmus.models.widened_view import WidenedView, at_width_of

from .test_align import apart, model, tensors

WIDTHS = {
    "llama": {"intermediate_size": 32},
    "qwen3": {"intermediate_size": 32},
    "gpt2": {"n_inner": 80},
    "bert": {"intermediate_size": 32},
    "vit": {"intermediate_size": 32},
    "gpt_neox": {"intermediate_size": 32},
    "phi3": {"intermediate_size": 32},
}
"""Wider than the families' tests have it."""


def logits(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    network = kind.from_pretrained(folder, dtype=torch.float64).eval()
    if hasattr(config, "vocab_size"):
        generator = torch.Generator().manual_seed(0)
        inputs = {"input_ids": torch.randint(3, config.vocab_size, (2, 12), generator=generator)}
    else:
        size = (2, config.num_channels, config.image_size, config.image_size)
        inputs = {"pixel_values": torch.randn(size, dtype=torch.float64)}
    with torch.no_grad():
        return network(**inputs).logits, inputs, network


@pytest.mark.parametrize("name", list(WIDTHS))
def test_the_narrower_model_lives_at_the_greater_width(name, tmp_path):
    narrow = model(tmp_path / "b", name, seed=1)
    wide = model(tmp_path / "a", name, seed=2, **WIDTHS[name])
    outcome = isthmus.align(wide, narrow, tmp_path / "out")
    found = tensors(tmp_path / "out")
    assert {n: x.shape for n, x in found.items()} == {n: x.shape for n, x in tensors(wide).items()}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    key, value = next(iter(WIDTHS[name].items()))
    assert config[key] == value
    before, inputs, _ = logits(narrow)
    _, _, network = logits(tmp_path / "out")
    with torch.no_grad():
        after = network(**inputs).logits
    # Stored in float32, what permuting and scaling gives is rounded.
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    assert verify(tmp_path / "out").problems == ()
    assert any("grew to the width of" in note for note in outcome.notes)
    merged = {
        "merge_method": "linear",
        "models": [{"model": str(wide)}, {"model": str(tmp_path / "out")}],
        "parameters": {"weight": 0.5},
    }
    isthmus.merge(merged, tmp_path / "merged")
    assert logits(tmp_path / "merged")[0].isfinite().all()


def test_units_that_were_taken_away_are_found_again(tmp_path):
    """A model next to itself without some of its units: what is left lies where it was."""
    wide = model(tmp_path / "a", "llama", seed=3, intermediate_size=32)
    kept = [torch.randperm(32, generator=torch.Generator().manual_seed(n))[:24] for n in range(2)]
    state = tensors(wide)
    for number, rows in enumerate(kept):
        down = state[f"model.layers.{number}.mlp.down_proj.weight"]
        gone = torch.ones(32, dtype=torch.bool)
        gone[rows] = False
        down[:, gone] = 0
    save_file(state, wide / "model.safetensors", metadata={"format": "pt"})
    narrow = model(tmp_path / "b", "llama", seed=3)
    less = dict(state)
    for number, rows in enumerate(kept):
        at = f"model.layers.{number}.mlp"
        for part in ("gate_proj", "up_proj"):
            less[f"{at}.{part}.weight"] = state[f"{at}.{part}.weight"][rows].contiguous()
        less[f"{at}.down_proj.weight"] = state[f"{at}.down_proj.weight"][:, rows].contiguous()
    save_file(less, narrow / "model.safetensors", metadata={"format": "pt"})
    isthmus.align(wide, narrow, tmp_path / "out")
    found = tensors(tmp_path / "out")
    for number, rows in enumerate(kept):
        at = f"model.layers.{number}.mlp"
        for part in ("gate_proj", "up_proj"):
            name = f"{at}.{part}.weight"
            torch.testing.assert_close(found[name][rows], state[name][rows])
        name = f"{at}.down_proj.weight"
        torch.testing.assert_close(found[name], state[name])


def test_in_a_recipe(tmp_path):
    wide = model(tmp_path / "a", seed=2, intermediate_size=32)
    narrow = model(tmp_path / "b", seed=1)
    given = {
        "merge_method": "linear",
        "models": [{"model": str(wide)}, {"model": str(narrow)}],
        "parameters": {"weight": 0.5},
        "align": "weights",
        "name": "m",
    }
    isthmus.merge(given, tmp_path / "merged")
    isthmus.align(wide, narrow, tmp_path / "aligned")
    both = {**given, "models": [{"model": str(wide)}, {"model": str(tmp_path / "aligned")}]}
    isthmus.merge({key: both[key] for key in both if key != "align"}, tmp_path / "apart")
    assert apart(tensors(tmp_path / "merged"), tensors(tmp_path / "apart")) < 1e-6


def test_the_narrower_first_and_the_reference_named(tmp_path):
    """The configuration is the first model's, and must be of the greater width all the same."""
    wide = model(tmp_path / "a", seed=2, intermediate_size=32)
    narrow = model(tmp_path / "b", seed=1)
    given = {
        "merge_method": "linear",
        "models": [{"model": str(narrow)}, {"model": str(wide)}],
        "parameters": {"weight": 0.5},
        "align": {"to": str(wide)},
        "dtype": "bfloat16",
    }
    isthmus.merge(given, tmp_path / "merged")
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["intermediate_size"] == 32
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    assert logits(tmp_path / "merged")[0].isfinite().all()


def test_equal_widths_are_left_alone(tmp_path):
    a, b = (model(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 2)))
    with open_checkpoint(str(a)) as one, open_checkpoint(str(b)) as other:
        assert at_width_of(other, one, "auto") is other


def test_the_check_sees_what_a_wrong_growth_does(tmp_path, monkeypatch):
    a = model(tmp_path / "a", seed=1, intermediate_size=32)
    b = model(tmp_path / "b", seed=2)
    with open_checkpoint(str(a)) as wide, open_checkpoint(str(b)) as narrow:
        view = WidenedView(narrow, wide, "auto")
        assert view.check() < 1e-12
        plain = view._grown
        monkeypatch.setattr(view, "_grown", lambda *given: plain(*given) + 0.01)
        with pytest.raises(SymmetryError, match="computes something else"):
            view.check()


@pytest.mark.parametrize(
    ("changes", "others", "words"),
    [
        ({"intermediate_size": 16}, {}, "Swap"),
        ({"hidden_size": 32}, {}, "norm .* runs over it"),
        ({"num_key_value_heads": 4}, {"num_key_value_heads": 2}, "attention heads"),
        ({"vocab_size": 60}, {}, "not because of units"),
        ({"num_hidden_layers": 3}, {}, "has no tensor"),
    ],
    ids=str,
)
def test_what_cannot_grow(changes, others, words, tmp_path):
    a = model(tmp_path / "a", seed=1, **changes)
    b = model(tmp_path / "b", seed=2, **others)
    with pytest.raises(SymmetryError, match=words):
        isthmus.align(a, b, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_reading_in_pieces_is_reading_at_once(tmp_path):
    a = model(tmp_path / "a", seed=1, intermediate_size=32)
    b = model(tmp_path / "b", seed=2)
    with open_checkpoint(str(a)) as wide, open_checkpoint(str(b)) as narrow:
        view = WidenedView(narrow, wide, "auto")
        for name, info in view.tensors.items():
            whole = np.empty(info.numel, np.float32)
            view.read(name, 0, whole)
            half = info.numel // 3
            parts = [np.empty(n, np.float32) for n in (half, info.numel - half)]
            view.read(name, 0, parts[0])
            view.read(name, half, parts[1])
            assert np.array_equal(np.concatenate(parts), whole)
            assert np.array_equal(view.read_stored(name, 0, info.numel), whole)
