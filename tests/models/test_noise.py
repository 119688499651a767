"""Gradient noise of networks on data."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from isthmus.errors import TrainingError
from isthmus.models.noise import measured_noise, model_loss

from .networks import build, padded, sequences


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def data(count=40):
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 4, generator=draw, dtype=torch.float64)
    return inputs, torch.randint(3, (count,), generator=draw)


def loss(module, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(module(inputs), targets)


def per_example(module, inputs, targets):
    """The gradient of every example, shape [N, P], one at a time."""
    rows = []
    for x, y in zip(inputs, targets, strict=True):
        value = loss(module, (x.unsqueeze(0), y.unsqueeze(0)))
        found = torch.autograd.grad(value, list(module.parameters()))
        rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows)


def drawn(inputs, targets, size, count, seed):
    draw = torch.Generator().manual_seed(seed)
    for _ in range(count):
        chosen = torch.randint(len(inputs), (size,), generator=draw)
        yield inputs[chosen], targets[chosen]


def test_unbiased_against_per_example_gradients_of_the_whole_population():
    module, (inputs, targets) = network(), data()
    gradients = per_example(module, inputs, targets)
    mean = gradients.mean(0)
    trace = float((gradients - mean).square().sum(1).mean())
    squared = float(mean.square().sum())
    trials = [
        measured_noise(module, drawn(inputs, targets, 4, 24, seed), loss).estimate()
        for seed in range(40)
    ]
    for name, truth in (("trace", trace), ("squared_norm", squared)):
        values = torch.tensor([getattr(trial, name) for trial in trials])
        error = float(values.std()) / math.sqrt(len(trials))
        assert abs(float(values.mean()) - truth) < 3.5 * error < 0.5 * truth
    covered = sum(t.scale_interval[0] < trace / squared < t.scale_interval[1] for t in trials)
    assert covered >= 34  # of 40, at 95%


def test_parameters_and_their_gradients_are_left_alone():
    module, (inputs, targets) = network(), data()
    loss(module, (inputs, targets)).backward()
    before = [(p.detach().clone(), p.grad.clone()) for p in module.parameters()]
    measured_noise(module, drawn(inputs, targets, 4, 8, 0), loss)
    for parameter, (value, gradient) in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert torch.equal(parameter.grad, gradient)


def test_frozen_and_unused_parameters():
    module, (inputs, targets) = network(), data()
    module[0].requires_grad_(False)
    module.register_parameter("unused", nn.Parameter(torch.zeros(2)))
    noise = measured_noise(module, drawn(inputs, targets, 4, 8, 0), loss)
    assert noise.estimate(["unused"]).trace == 0
    assert noise.estimate(["2.weight"]).trace > 0
    with pytest.raises(TrainingError, match=r"no gradient of 0\.weight"):
        noise.estimate(["0.weight"])


def test_a_smaller_last_micro_batch_is_left_out():
    module, (inputs, targets) = network(), data()
    batches = list(zip(inputs.split(3), targets.split(3), strict=True))  # 13 of 3, one of 1
    noise = measured_noise(module, batches, loss)
    assert noise.count == 13


def language_batches(count=8):
    lengths = [5, 7] * count
    return padded(sequences(lengths=lengths))


def test_a_language_model_predicts_its_own_input_without_padding():
    module = build("gpt2").requires_grad_()
    batch = language_batches()[0]
    found = model_loss(module, batch)
    logits = module(**batch).logits[:, :-1].log_softmax(-1)
    targets, real = batch["input_ids"][:, 1:], batch["attention_mask"][:, 1:] == 1
    expected = -logits.gather(2, targets.unsqueeze(2)).squeeze(2)[real].mean()
    assert torch.isclose(found, expected)


def test_fused_weights_are_measured_in_parts():
    module = build("gpt2").requires_grad_()
    batches = language_batches()
    whole = measured_noise(module, batches, sign_version=True)
    noise = measured_noise(module, batches, spectral_version=True)
    name = "transformer.h.0.attn.c_attn.weight"
    parts = [f"{name}[{number}]" for number in range(3)]
    assert noise.estimate(parts).trace == pytest.approx(whole.estimate([name]).trace, rel=1e-5)
    assert noise.estimate().trace == pytest.approx(whole.estimate().trace, rel=1e-5)
    assert noise.spectral(parts).noise > 0
    # Conv1D holds inputs first: C has the size of the outputs, 4 · 16.
    wide = noise._sums["transformer.h.0.mlp.c_fc.weight"].halves.rows
    assert wide.shape == (64, 64)
    assert whole.sign().scale[0] > 0


def test_batch_normalisation():
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    inputs, targets = data()
    with pytest.raises(TrainingError, match="1 normalises by its batch"):
        measured_noise(module, drawn(inputs, targets, 4, 8, 0), loss)
    assert measured_noise(module.eval(), drawn(inputs, targets, 4, 8, 0), loss).count == 8


def test_bad_input():
    module, (inputs, targets) = network(), data()
    with pytest.raises(TrainingError, match="no micro-batches"):
        measured_noise(module, [], loss)
    with pytest.raises(TrainingError, match="micro-batch 1 has 5 examples"):
        measured_noise(module, [(inputs[:4], targets[:4]), (inputs[:5], targets[:5])], loss)
    short, full = (inputs[:3], targets[:3]), (inputs[:4], targets[:4])
    with pytest.raises(TrainingError, match="micro-batch 2 has 4 examples"):
        measured_noise(module, [full, short, full], loss)
    with pytest.raises(TrainingError, match=r"tensors of \[3, 4\] examples"):
        measured_noise(module, [(inputs[:4], targets[:3])], loss)
    with pytest.raises(TrainingError, match="loss of micro-batch 0 is \\[nan\\]"):
        measured_noise(module, [(inputs[:4] * math.nan, targets[:4])], loss)
    with pytest.raises(TrainingError, match="one finite number"):
        measured_noise(module, [(inputs[:4], targets[:4])], lambda m, b: m(b[0]).sum(1))
    with pytest.raises(TrainingError, match="has no loss of its own"):
        measured_noise(module, [(inputs[:4], targets[:4])])
    with pytest.raises(TrainingError, match="1 micro-batches make 0 blocks"):
        measured_noise(module, [(inputs[:4], targets[:4])], loss).estimate()
    with pytest.raises(TrainingError, match="no parameter that needs a gradient"):
        measured_noise(module.requires_grad_(False), [(inputs[:4], targets[:4])], loss)


def test_a_model_without_labels_or_loss():
    batch = language_batches()[0]
    with pytest.raises(TrainingError, match="BertForSequenceClassification needs labels"):
        measured_noise(build("bert").requires_grad_(), [batch])
    labelled = batch | {"labels": torch.tensor([0, 1])}
    assert model_loss(build("bert"), labelled).isfinite()
    with pytest.raises(TrainingError, match="returns no loss"):
        model_loss(Silent(), labelled)


class Silent(nn.Module):
    def forward(self, **batch):
        return batch["labels"]
