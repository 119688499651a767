"""Merges on calibration data that cannot be made, and what is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import isthmus
from isthmus.checkpoints import open_checkpoint
from isthmus.errors import CalibrationError, MethodError, NonFiniteError, PlanError
from isthmus.models.store import store_moments
from tests.models.networks import WIDTH, add_tokenizer

from .models import WORDS, near, recipe, state, texts


def test_a_model_without_examples_file(family, tmp_path):
    made = recipe(family)
    made["models"][1]["calibration"] = str(tmp_path / "nothing.jsonl")
    with pytest.raises(CalibrationError, match=r"nothing\.jsonl"):
        isthmus.merge(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_stored_statistics_do_not_go_with_a_sequence(family, tmp_path):
    from isthmus.models.data import calibration_batches

    with open_checkpoint(str(family / "bert" / "one")) as checkpoint:
        batches = calibration_batches(checkpoint, family / "one.jsonl", tokens=16)
        store_moments(checkpoint, batches, tmp_path / "stats")
    made = recipe(family)
    made["models"][0]["calibration"] = str(tmp_path / "stats")
    with pytest.raises(PlanError, match="sequential: false"):
        isthmus.merge(made, tmp_path / "out")
    # and not with another model
    made = recipe(family, sequential=False)
    made["models"][1]["calibration"] = str(tmp_path / "stats")
    with pytest.raises(CalibrationError, match="another model"):
        isthmus.merge(made, tmp_path / "out")


def test_nan_in_an_expert(family, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(family / "bert" / "two", broken)
    tensors = state(broken)
    tensors["bert.encoder.layer.1.output.dense.weight"][3, 4] = torch.nan
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    for sequential in (False, True):
        made = recipe(family, sequential=sequential)
        made["models"][1]["model"] = str(broken)
        with pytest.raises(NonFiniteError, match=r"broken: tensor .*layer\.1\.output.* NaN"):
            isthmus.merge(made, tmp_path / f"out-{sequential}")


def test_nan_in_an_embedding(family, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(family / "bert" / "two", broken)
    tensors = state(broken)
    tensors["bert.embeddings.word_embeddings.weight"][30, 0] = torch.nan
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    for sequential in (False, True):
        made = recipe(family, sequential=sequential)
        made["models"][1]["model"] = str(broken)
        with pytest.raises(NonFiniteError, match=r"broken: tensor .*word_embeddings.* NaN"):
            isthmus.merge(made, tmp_path / f"out-{sequential}")


def test_activations_that_overflow_name_the_expert(family, tmp_path):
    huge = tmp_path / "huge"
    shutil.copytree(family / "bert" / "two", huge)
    tensors = state(huge)
    tensors["bert.encoder.layer.0.output.LayerNorm.weight"][:] = 3e38
    save_file(tensors, huge / "model.safetensors", {"format": "pt"})
    made = recipe(family, sequential=False)
    made["models"][1]["model"] = str(huge)
    with pytest.raises(
        CalibrationError, match=r"huge: .*layer\.1\.attention\.self\.\w+\.weight.*NaN"
    ):
        isthmus.merge(made, tmp_path / "out")


def test_errors_in_examples_name_the_file_and_the_model(family, tmp_path):
    made = recipe(family)
    made["calibration"] = {"tokens": 90}
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"text": " ".join(WORDS * 3)}))
    made["models"][1]["calibration"] = str(long)
    with pytest.raises(
        CalibrationError, match=r"long\.jsonl for .*two: .* 78 tokens.*\n.*tokens: 24"
    ):
        isthmus.merge(made, tmp_path / "out")


def test_statistics_of_layers_of_another_size(family, tmp_path):
    from isthmus.models.data import calibration_batches

    made = recipe(family, sequential=False)
    for number, name in enumerate(("one", "two")):
        with open_checkpoint(str(family / "bert" / name)) as checkpoint:
            batches = calibration_batches(checkpoint, family / f"{name}.jsonl", tokens=16)
            store_moments(checkpoint, batches, tmp_path / name)
        made["models"][number]["calibration"] = str(tmp_path / name)
    described = json.loads((tmp_path / "two" / "calibration.json").read_text())
    places = described["weights"]
    layer = "bert.encoder.layer.0"
    places[f"{layer}.attention.self.query.weight"] = places[f"{layer}.output.dense.weight"]
    (tmp_path / "two" / "calibration.json").write_text(json.dumps(described))
    with pytest.raises(MethodError, match=r"layer\.0\.attention\.self\.query.*inputs of size 24"):
        isthmus.merge(made, tmp_path / "out")


def test_all_weights_zero(family, tmp_path):
    with pytest.raises(PlanError, match=r"all models are 0\n.*a weight above 0"):
        isthmus.merge(recipe(family, weight=0), tmp_path / "out")


def test_a_simplex_by_the_networks_output(family, tmp_path):
    made = recipe(family, objective="network", basis="blocks", constraint="simplex")
    with pytest.raises(PlanError, match="simplex"):
        isthmus.merge(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_activations_that_wait_for_nothing(family, tmp_path):
    made = recipe(family, objective="network", basis="scalar")
    made["calibration"] = {**made.get("calibration", {}), "activations": "disk"}
    with pytest.raises(PlanError, match="nothing waits between blocks"):
        isthmus.merge(made, tmp_path / "out")


def test_a_disk_that_holds_the_model_but_not_its_layers(family, tmp_path, monkeypatch):
    """Layers wait in float32 beside the output; both must fit."""
    size = (family / "bert" / "base" / "model.safetensors").stat().st_size
    with isthmus.plan(recipe(family)) as plan:
        layers = plan.stage.bytes_kept
        needed = plan.bytes_to_write + plan.small_files
    assert layers > 0.5 * size
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - layers // 2))
    with pytest.raises(PlanError, match="the disk of"):
        isthmus.merge(recipe(family), tmp_path / "out")


def others(kind: str, root: Path) -> dict:
    """A recipe for tiny networks of another kind."""
    import transformers as t

    for name, seed in (("base", None), ("one", 1), ("two", 2)):
        torch.manual_seed(0)
        if kind == "mamba":
            shape = {"hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 4}
            made = t.MambaForCausalLM(t.MambaConfig(vocab_size=40, **shape))
        else:
            shape = {"d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
            made = t.T5ForConditionalGeneration(t.T5Config(vocab_size=40, **shape))
        (made if seed is None else near(made, seed)).save_pretrained(root / kind / name)
        add_tokenizer(root / kind / name, WORDS)
    for seed, name in enumerate(("one", "two")):
        lines = [json.dumps({"text": text}) for text in texts(seed)]
        (root / f"{name}.jsonl").write_text("\n".join(lines))
    return recipe(root, kind)


@pytest.mark.parametrize("sequential", [True, False])
def test_a_layer_that_is_never_called_does_not_hide_those_after_it(sequential, tmp_path):
    """Mamba multiplies by the weight of dt_proj itself, in the middle of each block."""
    made = others("mamba", tmp_path)
    made["parameters"] = {"sequential": sequential}
    isthmus.merge(made, tmp_path / "out")
    layers = json.loads((tmp_path / "out" / "projection.json").read_text())["layers"]
    assert len(layers) == 8
    for name, found in layers.items():
        assert ("initial" in found) == ("dt_proj" not in name), name


@pytest.mark.parametrize("sequential", [True, False])
def test_an_encoder_decoder(sequential, tmp_path):
    made = others("t5", tmp_path)
    made["parameters"] = {"sequential": sequential}
    with pytest.raises(CalibrationError, match="T5ForConditionalGeneration is an encoder-decoder"):
        isthmus.merge(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_network_that_fails_on_its_examples(family, tmp_path, monkeypatch):
    from transformers.models.bert.modeling_bert import BertEmbeddings

    def fail(*_, **__):
        raise ValueError("no such position")

    monkeypatch.setattr(BertEmbeddings, "forward", fail)
    with pytest.raises(CalibrationError, match="cannot be run on the examples: no such position"):
        isthmus.merge(recipe(family), tmp_path / "out")


def test_a_basis_for_no_layer(family, tmp_path):
    with pytest.raises(PlanError, match="no linear layer"):
        isthmus.merge(recipe(family, basis="none"), tmp_path / "out")


def test_settings_that_exclude_each_other(family, tmp_path):
    with pytest.raises(PlanError, match=r"query\.weight: a simplex"):
        isthmus.merge(recipe(family, basis="columns", constraint="simplex"), tmp_path / "out")


def test_a_half_group(family, tmp_path):
    with pytest.raises(PlanError, match="group must be a whole number"):
        isthmus.merge(recipe(family, group=1.5), tmp_path / "out")


def test_sequences_by_filter(family, tmp_path):
    sequential = [{"filter": "layer.0", "value": False}, {"value": True}]
    with pytest.raises(PlanError, match="without a filter"):
        isthmus.merge(recipe(family, sequential=sequential), tmp_path / "out")


def test_state_dicts_are_no_networks():
    weights = {"w": torch.ones(WIDTH, WIDTH)}
    with pytest.raises(MethodError, match="merge the folders"):
        isthmus.merge_state_dicts({"one": weights}, base=weights, method="projection")
