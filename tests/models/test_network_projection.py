"""The projection of whole networks, against Transformers that runs the merge on each example alone."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from isthmus.checkpoints import open_checkpoint
from isthmus.errors import CalibrationError, MethodError, NonFiniteError
from isthmus.models import network_projection
from isthmus.models.network_projection import project_network
from isthmus.projection.constraints import FREE, NON_NEGATIVE, SIMPLEX, box

from .networks import NAMES, build, images, padded, saved, sequences

LENGTHS = ((3, 9, 5), (7, 1, 4, 4), (8,))
"""Of the examples of three experts."""


@pytest.fixture
def opened():
    checkpoints = []

    def open_them(*folders):
        checkpoints.extend(open_checkpoint(str(folder)) for folder in folders)
        return checkpoints[-len(folders) :]

    yield open_them
    for checkpoint in checkpoints:
        checkpoint.close()


def moved(folder, start, seed, size=0.1):
    """A fine-tuned model: the start, with all its weights moved a little."""
    state = load_file(start / "model.safetensors")
    draw = torch.Generator().manual_seed(seed)
    state = {
        name: value + size * torch.randn(value.shape, generator=draw)
        for name, value in state.items()
    }
    return written(folder, start, state)


def written(folder, start, state):
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((start / "config.json").read_text())
    return folder


def family(tmp_path, name, count=2, **changes):
    shallow = {"n_layer" if name == "gpt2" else "num_hidden_layers": 2}
    base = saved(tmp_path / "base", name, **shallow | changes)
    return base, [moved(tmp_path / f"expert-{k}", base, k + 1) for k in range(count)]


def examples(name, number):
    """Batches with padding, and each example alone."""
    if name == "vit":
        rows = images(2 + number)
        return [{"pixel_values": part} for part in rows.split(2)], [
            {"pixel_values": row[None]} for row in rows
        ]
    rows = sequences(number, LENGTHS[number])
    return padded(rows), [{"input_ids": row[None]} for row in rows]


def batches(name, count=2):
    return [examples(name, number)[0] for number in range(count)]


def hidden(folder, alone):
    """The last hidden states, [tokens, width]; each example by itself."""
    network = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        return torch.cat([network(**one).last_hidden_state[0] for one in alone]).double()


def merge(folder, base, experts, coefficients):
    """base + Σ d τ, where there are coefficients."""
    state = load_file(base / "model.safetensors")
    others = [load_file(expert / "model.safetensors") for expert in experts]
    for name, d in coefficients.items():
        own = state[name].double()
        for share, other in zip(d, others, strict=True):
            own = own + share * (other[name].double() - state[name].double())
        state[name] = own.float()
    return written(folder, base, state)


def distance(merged, experts, name, weights):
    total = 0.0
    for number, (expert, weight) in enumerate(zip(experts, weights, strict=True)):
        alone = examples(name, number)[1]
        errors = hidden(merged, alone) - hidden(expert, alone)
        total += weight * float(errors.square().sum()) / len(errors)
    return total


@pytest.mark.parametrize(
    ("name", "basis"), list(zip(NAMES, itertools.cycle(["blocks", "modules"]), strict=False))
)
def test_the_error_is_that_of_the_merged_model(tmp_path, opened, name, basis):
    base, experts = family(tmp_path, name)
    weights = (1.0, 2.5)
    found = project_network(
        *opened(base), opened(*experts), batches(name), basis=basis, weights=weights, sweeps=1
    )
    merged = merge(tmp_path / "merged", base, experts, found.coefficients)
    assert found.initial == pytest.approx(distance(base, experts, name, weights), rel=1e-4)
    assert found.values[-1] == pytest.approx(distance(merged, experts, name, weights), rel=1e-4)
    assert found.captured == pytest.approx(1 - found.values[-1] / found.initial)
    assert found.captured > 0.3


@pytest.mark.parametrize("name", NAMES)
def test_coefficients_of_what_the_outputs_depend_on(tmp_path, opened, name):
    base, experts = family(tmp_path, name)
    found = project_network(*opened(base), opened(*experts), batches(name), sweeps=1)
    stored = load_file(base / "model.safetensors")
    unseen = {key for key in stored if key.startswith(("pooler", "classifier", "cls.", "lm_head"))}
    unseen |= {key for key in stored if ".pooler." in key}
    assert set(found.coefficients) == set(stored) - unseen
    assert all(d.shape == (2,) and d.dtype == torch.float64 for d in found.coefficients.values())
    assert len({tuple(d.tolist()) for d in found.coefficients.values()}) == 1


@pytest.mark.parametrize("basis", ["scalar", "blocks", "modules"])
def test_a_lone_expert_comes_back(tmp_path, opened, basis):
    base, experts = family(tmp_path, "bert", 1)
    found = project_network(*opened(base), opened(*experts), batches("bert", 1), basis=basis)
    assert found.converged
    assert found.captured > 1 - 1e-9
    for d in found.coefficients.values():
        assert float(d) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("basis", ["scalar", "blocks"])
def test_the_order_of_experts_does_not_matter(tmp_path, opened, basis):
    base, experts = family(tmp_path, "bert", 3, num_hidden_layers=1)
    order = [2, 0, 1]
    data = batches("bert", 3)
    first, second = (
        project_network(
            *opened(base),
            opened(*[experts[k] for k in those]),
            [data[k] for k in those],
            basis=basis,
            weights=[1 + k for k in those],
            ridge=1e-3,
            sweeps=2,
        )
        for those in ([0, 1, 2], order)
    )
    assert first.values == pytest.approx(second.values, rel=1e-5)
    for name, d in first.coefficients.items():
        assert torch.allclose(d[order], second.coefficients[name], atol=1e-3)


@pytest.mark.parametrize(
    ("constraint", "basis"),
    [
        (box(0, 0.55), "modules"),
        (box(-0.2, 0.52), "blocks"),
        (NON_NEGATIVE, "blocks"),
        (SIMPLEX, "scalar"),
    ],
)
def test_constraints_hold_and_the_error_never_rises(tmp_path, opened, constraint, basis):
    base, experts = family(tmp_path, "bert", num_hidden_layers=1)
    found = project_network(
        *opened(base), opened(*experts), batches("bert"), basis=basis, constraint=constraint
    )
    for d in found.coefficients.values():
        assert constraint.contains(d.unsqueeze(0))
    assert len(found.values) > 1
    assert all(after < before for before, after in itertools.pairwise(found.values))


def test_more_coefficients_capture_more(tmp_path, opened):
    base, experts = family(tmp_path, "gpt2")
    models = (*opened(base), opened(*experts), batches("gpt2"))
    captured = [
        project_network(*models, basis=basis, sweeps=2).captured
        for basis in ("scalar", "blocks", "modules")
    ]
    assert captured == sorted(captured)
    assert captured[0] < captured[-1] - 0.01


def test_an_expert_that_equals_the_base(tmp_path, opened):
    base, experts = family(tmp_path, "bert", 1)
    same = written(tmp_path / "other", base, load_file(base / "model.safetensors"))
    found = project_network(
        *opened(base), opened(*experts, same), batches("bert"), basis="blocks", sweeps=2
    )
    for d in found.coefficients.values():
        assert d.isfinite().all()
        assert abs(d[1]) < 1e-12
    assert [note for note in found.notes if f"{same} equals the base" in note]
    assert found.captured > 0


def test_all_experts_equal_the_base(tmp_path, opened):
    base = saved(tmp_path / "base", "bert")
    found = project_network(*opened(base), opened(base, base), batches("bert"))
    assert found.initial == 0
    assert found.captured == 1
    assert found.converged
    assert all((d == 0).all() for d in found.coefficients.values())


@pytest.mark.parametrize("constraint", [FREE, box()])
def test_identical_experts_share(tmp_path, opened, constraint):
    base, experts = family(tmp_path, "bert", 1)
    twin = written(tmp_path / "twin", base, load_file(experts[0] / "model.safetensors"))
    found = project_network(
        *opened(base), opened(*experts, twin), batches("bert"), constraint=constraint, sweeps=4
    )
    for d in found.coefficients.values():
        assert torch.allclose(d, torch.tensor([0.5, 0.5], dtype=torch.float64), atol=1e-2)
    (note,) = [note for note in found.notes if "does not determine" in note]
    assert str(experts[0]) in note
    assert str(twin) in note


@pytest.mark.parametrize("tied", [True, False])
def test_the_metric_of_the_head_compares_logits(tmp_path, opened, tied):
    base, experts = family(tmp_path, "llama", tie_word_embeddings=tied)
    found = project_network(
        *opened(base), opened(*experts), batches("llama"), sweeps=1, logits=True
    )
    head = transformers.AutoModelForCausalLM.from_pretrained(base).lm_head.weight.detach().double()
    merged = merge(tmp_path / "merged", base, experts, found.coefficients)
    for model, value in ((base, found.initial), (merged, found.values[-1])):
        expected = 0.0
        for number, expert in enumerate(experts):
            alone = examples("llama", number)[1]
            errors = (hidden(model, alone) - hidden(expert, alone)) @ head.mT
            expected += float(errors.square().sum()) / len(errors)
        assert value == pytest.approx(expected, rel=1e-4)


def test_heads_may_differ(tmp_path, opened):
    base = saved(tmp_path / "base", "bert")
    state = load_file(base / "model.safetensors")
    other = build("bert_masked")
    inside = {k: v + 0.1 for k, v in state.items() if k in other.state_dict()}
    other.load_state_dict(inside, strict=False)
    other.save_pretrained(tmp_path / "masked")
    found = project_network(*opened(base), opened(tmp_path / "masked"), batches("bert", 1))
    assert found.captured > 1 - 1e-9


def test_a_network_without_a_head(tmp_path, opened):
    base, experts = family(tmp_path, "bert")
    transformers.AutoModel.from_pretrained(base).save_pretrained(tmp_path / "body")
    headless = [
        written(
            tmp_path / f"body-{k}",
            tmp_path / "body",
            {
                name.removeprefix("bert."): value
                for name, value in load_file(expert / "model.safetensors").items()
                if name.startswith("bert.")
            },
        )
        for k, expert in enumerate(experts)
    ]
    whole = project_network(*opened(base), opened(*experts), batches("bert"), sweeps=1)
    body = project_network(*opened(tmp_path / "body"), opened(*headless), batches("bert"), sweeps=1)
    assert body.values == whole.values
    assert {f"bert.{name}" for name in body.coefficients} == set(whole.coefficients)


def test_progress(tmp_path, opened):
    base, experts = family(tmp_path, "bert")
    told = []
    project_network(
        *opened(base),
        opened(*experts),
        batches("bert"),
        sweeps=2,
        report=lambda done, total: told.append((done, total)),
    )
    total = 2 * 2 * sum(map(len, batches("bert")))
    assert {one for _, one in told} == {total}
    assert [done for done, _ in told] == list(range(1, len(told) + 1))


def refused(opened, base, experts, data, error=CalibrationError, **settings):
    with pytest.raises(error) as caught:
        project_network(*opened(base), opened(*experts), data, **settings)
    return str(caught.value)


def test_nan_among_the_weights(tmp_path, opened):
    base, experts = family(tmp_path, "bert")
    state = load_file(experts[1] / "model.safetensors")
    name = "bert.encoder.layer.1.output.dense.bias"
    state[name][3] = float("nan")
    broken = written(tmp_path / "broken", base, state)
    for models in ((base, [experts[0], broken]), (broken, experts)):
        message = refused(opened, *models, batches("bert"), NonFiniteError)
        assert f"{broken}: tensor {name} holds NaN" in message


def test_weights_that_overflow(tmp_path, opened):
    base, experts = family(tmp_path, "bert", 1)
    state = load_file(experts[0] / "model.safetensors")
    state["bert.encoder.layer.0.output.dense.weight"] *= 1e38
    huge = written(tmp_path / "huge", base, state)
    message = refused(opened, base, [huge], batches("bert", 1))
    assert f"{huge} gives NaN or infinity" in message
    message = refused(opened, huge, experts, batches("bert", 1))
    assert f"{huge} gives NaN or infinity" in message


def test_too_little_memory(tmp_path, opened, monkeypatch):
    base, experts = family(tmp_path, "bert")
    available = network_projection._available_memory()
    assert available is None or available > 2**20
    monkeypatch.setattr(network_projection, "_available_memory", lambda: 1000)
    message = refused(opened, base, experts, batches("bert"))
    assert "5 copies" in message
    assert "layer by layer" in message
    numbers = sum(value.numel() for value in load_file(base / "model.safetensors").values())
    monkeypatch.setattr(network_projection, "_available_memory", lambda: 5 * 4 * numbers)
    long = [[{"input_ids": torch.ones(64, 24, dtype=torch.long)}]] * 2
    assert "6 derivatives" in refused(opened, base, experts, long, basis="blocks")


def test_logits_without_a_linear_head(tmp_path, opened):
    base, experts = family(tmp_path, "bert_masked", 1)
    message = refused(opened, base, experts, batches("bert", 1), logits=True)
    assert "no linear head directly above" in message


def test_models_of_other_shapes(tmp_path, opened):
    base = saved(tmp_path / "base", "bert")
    wide = saved(tmp_path / "wide", "bert", num_hidden_layers=2, intermediate_size=32)
    message = refused(opened, base, [wide], batches("bert", 1))
    assert str(wide) in message
    assert "intermediate.dense.weight" in message
    flat = saved(tmp_path / "flat", "bert", num_hidden_layers=1)
    assert "has no encoder.layer.1" in refused(opened, base, [flat], batches("bert", 1))


def test_an_encoder_decoder(tmp_path, opened):
    config = transformers.T5Config(
        d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=20
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    message = refused(opened, tmp_path / "t5", [tmp_path / "t5"], batches("bert", 1))
    assert "encoder-decoder" in message


def test_examples_of_another_model(tmp_path, opened):
    base, experts = family(tmp_path, "bert", 1)
    data = [[{"input_ids": torch.full((1, 3), 99)}]]
    assert "does not run on the calibration examples" in refused(opened, base, experts, data)


def test_a_simplex_in_many_places(tmp_path, opened):
    base, experts = family(tmp_path, "bert")
    message = refused(opened, base, experts, batches("bert"), basis="blocks", constraint=SIMPLEX)
    assert "sum to 1" in message


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"sweeps": 0}, "0 sweeps"),
        ({"weights": [1.0]}, "do not weigh 2 experts"),
        ({"weights": [1.0, -1.0]}, "at least 0"),
        ({"weights": [0.0, 0.0]}, "not all 0"),
        ({"basis": "heads"}, "scalar, blocks, modules"),
    ],
)
def test_settings_without_sense(tmp_path, opened, settings, problem):
    base, experts = family(tmp_path, "bert")
    assert problem in refused(opened, base, experts, batches("bert"), **settings)


def test_a_negative_ridge(tmp_path, opened):
    base, experts = family(tmp_path, "bert")
    assert "ridge" in refused(opened, base, experts, batches("bert"), MethodError, ridge=-1.0)


@pytest.mark.parametrize("data", [[], [[], []], [[{}]]])
def test_no_examples(tmp_path, opened, data):
    base, experts = family(tmp_path, "bert")
    assert "examples for every expert" in refused(opened, base, experts, data)
