"""The noise of models on disk, against gradients that transformers' own loading gives, in float64."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from isthmus.checkpoints import open_checkpoint
from isthmus.errors import CalibrationError, NonFiniteError, TrainingError
from isthmus.models.network import empty_network
from isthmus.models.noise import measured_noise
from isthmus.models.noise_data import NoiseData, micro_batches
from isthmus.models.noise_report import noise_report, with_training
from isthmus.models.training_settings import TrainingSettings

from .networks import add_tokenizer, saved

WORDS = ("one", "two", "three", "four", "plus", "minus", "is", "not")


def sentences(count, seed=0):
    chance = np.random.default_rng(seed)
    return [" ".join(chance.choice(WORDS, chance.integers(2, 9))) for _ in range(count)]


def rows_file(path, count, seed=0):
    rows = [{"text": text, "label": index % 2} for index, text in enumerate(sentences(count, seed))]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def data(tmp_path):
    return rows_file(tmp_path / "data.jsonl", 48)


@pytest.fixture
def llama(tmp_path):
    return add_tokenizer(saved(tmp_path / "llama", "llama"), WORDS)


@pytest.fixture
def bert(tmp_path):
    return add_tokenizer(saved(tmp_path / "bert", "bert"), WORDS)


@pytest.fixture
def vit(tmp_path):
    return saved(tmp_path / "vit", "vit")


def measured(folder, given, **options):
    with open_checkpoint(str(folder)) as checkpoint:
        return noise_report(checkpoint, given, **options)


def batches_of(folder, given):
    with open_checkpoint(str(folder)) as checkpoint:
        return list(micro_batches(checkpoint, empty_network(checkpoint), given))


def pictures(count=40):
    chance = np.random.default_rng(3)
    return [(chance.random((8, 8, 1), np.float32), index % 2) for index in range(count)]


def language_loss(network, batch):
    logits = network(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    counts = batch["attention_mask"][:, 1:] == 1
    return nn.functional.cross_entropy(logits[:, :-1][counts], batch["input_ids"][:, 1:][counts])


def text_loss(network, batch):
    logits = network(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return nn.functional.cross_entropy(logits, batch["labels"])


def picture_loss(network, batch):
    return nn.functional.cross_entropy(network(batch["pixel_values"]).logits, batch["labels"])


def reference(network, batches, loss, size, block):
    """The pair of McCandlish et al. as their appendix A.1 writes it, averaged over blocks."""
    network = network.double().eval()
    gradients = []
    for batch in batches:
        inputs = {n: x.double() if x.is_floating_point() else x for n, x in batch.items()}
        value = loss(network, inputs)
        found = torch.autograd.grad(value, list(network.parameters()), materialize_grads=True)
        gradients.append(torch.cat([each.flatten() for each in found]))
    pairs = []
    for start in range(0, len(gradients) // block * block, block):
        part = torch.stack(gradients[start : start + block])
        small, big = part.square().sum(1).mean(), part.mean(0).square().sum()
        few, many = size, size * block
        squared_norm = (many * big - few * small) / (many - few)
        trace = (small - big) / (1 / few - 1 / many)
        pairs.append((float(trace), float(squared_norm)))
    return np.mean(pairs, axis=0)


@pytest.mark.parametrize("kind", ["language", "text", "image"])
def test_estimates_are_those_of_the_model_that_transformers_loads(kind, llama, bert, vit, data):
    import transformers as t

    folder, auto, loss = {
        "language": (llama, t.AutoModelForCausalLM, language_loss),
        "text": (bert, t.AutoModelForSequenceClassification, text_loss),
        "image": (vit, t.AutoModelForImageClassification, picture_loss),
    }[kind]
    given = NoiseData(data, batch=2, examples=40)
    if kind == "image":
        given = replace(given, pictures=pictures())
    found = measured(folder, given)
    trace, squared_norm = reference(
        auto.from_pretrained(folder), batches_of(folder, given), loss, 2, found.block
    )
    assert found.examples == 40
    assert found.total.trace == pytest.approx(trace, rel=1e-4)
    assert found.total.squared_norm == pytest.approx(squared_norm, rel=1e-3)
    assert found.kind == ("image" if kind == "image" else "text")


def test_blocks_of_the_network_add_up(llama, data):
    found = measured(llama, NoiseData(data, batch=1, examples=30))
    assert list(found.groups) == ["before", *(f"model.layers.{k}" for k in range(3)), "after"]
    for name in ("trace", "squared_norm"):
        parts = [getattr(group, name) for group in found.groups.values()]
        assert math.fsum(parts) == pytest.approx(getattr(found.total, name), rel=1e-9)


def test_sign_and_spectral_with_fused_matrices(tmp_path, data):
    folder = add_tokenizer(saved(tmp_path / "gpt2", "gpt2"), WORDS)
    found = measured(
        folder, NoiseData(data, batch=2, examples=40), sign_version=True, spectral_version=True
    )
    assert found.sign.scale[0] < found.sign.scale[1]
    assert found.spectral.noise > 0
    total = math.fsum(group.trace for group in found.groups.values())
    assert total == pytest.approx(found.total.trace, rel=1e-9)
    plain = measured(folder, NoiseData(data, batch=2, examples=40))
    assert plain.total.trace == pytest.approx(found.total.trace, rel=1e-6)
    assert plain.sign is None
    assert plain.spectral is None


def test_the_memory_that_the_pages_state():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    parameters = sum(p.numel() for p in network.parameters())
    batches = [(torch.randn(2, 6), torch.randint(3, (2,))) for _ in range(4)]

    def loss(module, batch):
        return nn.functional.cross_entropy(module(batch[0]), batch[1])

    def held(**options):
        noise = measured_noise(network, batches, loss, **options)
        found = []
        for sums in noise._sums.values():
            halves = sums.halves
            found += [sums.mean]
            if halves is not None:
                found += [*halves.means, halves.squares, halves.rows]
        return sum(each.nbytes for each in found if each is not None)

    # The last layer is taken for one more matrix: a Sequential names no head.
    matrices, rows = 6 * 5 + 5 * 3, 5**2 + 3**2
    assert held() == 4 * parameters
    assert held(sign_version=True) == 16 * parameters
    assert held(spectral_version=True) == 4 * parameters + 8 * matrices + 4 * rows


def test_progress_is_told_for_every_micro_batch(llama, data):
    told = []
    measured(llama, NoiseData(data, batch=4), report=lambda *numbers: told.append(numbers))
    assert told == [(number, 12) for number in range(1, 13)]


def test_micro_batches_are_of_one_size_and_in_an_order_of_the_seed(bert, data):
    given = NoiseData(data, batch=5, examples=48)
    batches = batches_of(bert, given)
    assert [len(batch["labels"]) for batch in batches] == [5] * 9
    labels = torch.cat([batch["labels"] for batch in batches]).tolist()
    again = torch.cat([batch["labels"] for batch in batches_of(bert, given)]).tolist()
    other = torch.cat([batch["labels"] for batch in batches_of(bert, replace(given, seed=1))])
    assert labels == again
    assert labels != other.tolist()
    assert labels != sorted(labels)


def test_every_text_keeps_its_class(bert, tmp_path):
    """Texts of the class 1 have the word "not", so that their tokens tell it."""
    rows = [
        {"text": f"{text} {'not' if index % 2 else 'is'}", "label": index % 2}
        for index, text in enumerate(s.replace("not", "one") for s in sentences(30))
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    token = 3 + WORDS.index("not")
    for batch in batches_of(bert, NoiseData(path, batch=3)):
        assert ((batch["input_ids"] == token).any(1).long() == batch["labels"]).all()


def test_equal_texts_do_not_stay_side_by_side(llama, tmp_path):
    """Copies draw equal lots. Beside each other they would fill micro-batches of their own."""
    path = tmp_path / "copies.txt"
    path.write_text("one two three\n" * 20 + "minus plus four\n" * 20)
    batches = batches_of(llama, NoiseData(path, batch=10))
    assert all(len(batch["input_ids"].unique(dim=0)) == 2 for batch in batches)


def test_labels_of_a_language_model_leave_out_padding(llama, data):
    for batch in batches_of(llama, NoiseData(data, batch=6)):
        padding = batch["attention_mask"] == 0
        assert (batch["labels"][padding] == -100).all()
        assert torch.equal(batch["labels"][~padding], batch["input_ids"][~padding])


def found_noise(llama, data, **changes):
    found = measured(llama, NoiseData(data, batch=2, examples=40))
    return replace(found, total=replace(found.total, **changes))


def test_the_reading(llama, data):
    plain = found_noise(llama, data, scale=640.2, scale_interval=(500.0, 900.0))
    assert "A batch of about 640 texts is where noise equals the mean gradient" in plain.reading
    small = found_noise(llama, data, scale=0.2, scale_interval=(0.1, 0.3))
    assert "about 1 text is" in small.reading
    open_ended = found_noise(llama, data, scale=640.2, scale_interval=(120.0, math.inf))
    assert "Noise hides the mean gradient" in open_ended.reading
    assert "above 120.0" in open_ended.reading
    nothing = found_noise(llama, data, scale=math.inf, scale_interval=(0.0, math.inf))
    assert "Give more examples" in nothing.reading
    assert "above" not in nothing.reading


def test_with_the_settings_of_a_training(llama, data):
    found = found_noise(llama, data, trace=3.0, scale=640.0, scale_interval=(500.0, math.inf))
    sgd = TrainingSettings(lr=0.1, batch_size=32, momentum=0.9, optimizer="sgd")
    trained = with_training(found, sgd)
    assert trained.effective == pytest.approx(0.1 / (32 * 0.1))
    assert trained.diffusion == pytest.approx(3 * 0.1 / (32 * 0.1))
    assert trained.ratio == 20
    assert trained.ratio_interval == (500 / 32, math.inf)
    adam = with_training(found, replace(sgd, optimizer="adamw_torch"))
    assert adam.effective == pytest.approx(0.1 / math.sqrt(32))
    assert adam.diffusion is None
    unknown = with_training(found, TrainingSettings(lr=0.1, source="state.json"))
    assert unknown.effective is None
    assert unknown.ratio is None
    assert "state.json does not tell the batch size" in unknown.missing


def refused(kind, folder, given):
    with pytest.raises(kind) as caught:
        measured(folder, given)
    return str(caught.value)


def test_a_classifier_without_labels(bert, tmp_path):
    path = tmp_path / "plain.txt"
    path.write_text("\n".join(sentences(40)))
    assert "has no label in the column 'label'" in refused(CalibrationError, bert, NoiseData(path))


def test_one_example(llama, tmp_path):
    path = rows_file(tmp_path / "one.jsonl", 1)
    assert "1 text of" in refused(TrainingError, llama, NoiseData(path, batch=1))


def test_a_batch_larger_than_the_data(llama, data):
    shown = refused(TrainingError, llama, NoiseData(data, batch=64))
    assert "a micro-batch of 64 is larger than the data: 48 texts" in shown
    assert "Lower --batch" in shown


def test_too_few_micro_batches(llama, data):
    assert "make 3 of them" in refused(TrainingError, llama, NoiseData(data, batch=16))
    assert "at least 1" in refused(TrainingError, llama, NoiseData(data, batch=0))


def test_a_loss_that_is_no_number(tmp_path, data):
    """Weights that are finite, with activations that overflow."""
    import transformers

    folder = add_tokenizer(saved(tmp_path / "wild", "gpt2"), WORDS)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        network.transformer.ln_f.weight.fill_(3e38)
    network.save_pretrained(folder)
    assert "loss of micro-batch 0 is [nan]" in refused(TrainingError, folder, NoiseData(data))


def test_weights_that_are_not_finite(tmp_path, data):
    import transformers

    folder = add_tokenizer(saved(tmp_path / "broken", "gpt2"), WORDS)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        network.transformer.ln_f.weight[0] = math.nan
    network.save_pretrained(folder)
    assert "holds NaN or infinity" in refused(NonFiniteError, folder, NoiseData(data))


def test_models_without_a_known_loss(tmp_path, data):
    folder = add_tokenizer(saved(tmp_path / "masked", "bert_masked"), WORDS)
    assert "is a BertForMaskedLM, for which no loss is known" in refused(
        TrainingError, folder, NoiseData(data)
    )
    folder = add_tokenizer(saved(tmp_path / "numbers", "bert", num_labels=1), WORDS)
    assert "gives numbers or several classes" in refused(TrainingError, folder, NoiseData(data))
    folder = add_tokenizer(saved(tmp_path / "endless", "bert", pad_token_id=None), WORDS)
    assert "no pad_token_id" in refused(TrainingError, folder, NoiseData(data))


def test_pictures_that_the_model_has_no_class_for(vit, data):
    given = replace(NoiseData(data), pictures=[(np.zeros((8, 8, 1), np.float32), 5)] * 20)
    assert "has the label 5; the model has 2 classes" in refused(CalibrationError, vit, given)


def test_labelled_rows_of_the_hub(bert, monkeypatch):
    """No hub is reached: the library's door is replaced."""
    rows = [{"text": text, "label": index % 2} for index, text in enumerate(sentences(12))]
    module = ModuleType("datasets")
    module.load_dataset = lambda *_args, **_options: iter(rows)
    monkeypatch.setitem(sys.modules, "datasets", module)
    batches = batches_of(bert, NoiseData(Path("org/name"), batch=3))
    assert len(batches) == 4
    assert sum(int(batch["labels"].sum()) for batch in batches) == 6
