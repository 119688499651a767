"""Saturation of the optimizer's constraint."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isthmus.errors import TrainingError
from isthmus.optim.lion_k import LionK
from isthmus.optim.saturation import optimizer_saturations, saturation, saturations

WEIGHT = torch.diag(torch.tensor([3.0, -4.0]))


def test_known_matrix():
    found = saturations({"w": WEIGHT, "b": torch.tensor([3.0, 4.0])}, 0.5)
    assert (found["w"].max_norm, found["w"].operator, found["w"].frobenius) == (2, 2, 2.5)
    assert (found["b"].max_norm, found["b"].operator, found["b"].frobenius) == (2, None, 2.5)


def test_norms_are_ordered():
    weight = torch.randn(6, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    found = saturations({"w": weight}, 0.1)["w"]
    assert found.max_norm < found.operator < found.frobenius
    expected = 0.1 * torch.linalg.svdvals(weight.flatten(1))[0]
    assert found.operator == pytest.approx(float(expected))


def test_scale_transposition_and_split():
    tall = torch.cat([torch.eye(4), 3 * torch.eye(4)])
    assert saturation(tall, 1.0, "nuclear") == pytest.approx(10**0.5)
    assert saturation(tall, 1.0, "nuclear", adjust="original") == pytest.approx(5**0.5)
    assert saturation(tall.mT, 1.0, "nuclear", adjust="original") == pytest.approx(10**0.5)
    turned = saturation(tall.mT, 1.0, "nuclear", adjust="original", transposed=True)
    assert turned == pytest.approx(5**0.5)
    assert saturation(tall, 1.0, "nuclear", split=(4, 4)) == pytest.approx(3)


def test_every_group_has_its_own_norm_and_decay():
    matrix, vector = nn.Parameter(WEIGHT.clone()), nn.Parameter(torch.tensor([2.0, -5.0]))
    groups = [{"params": [matrix], "norm": "frobenius"}, {"params": [vector], "weight_decay": 0.1}]
    assert optimizer_saturations(LionK(groups, weight_decay=1.0)) == [[5.0], [0.5]]


def test_bad_input():
    with pytest.raises(TrainingError, match="norm is max"):
        saturation(WEIGHT, 0.1, "max")
    with pytest.raises(TrainingError, match="weight_decay is -1"):
        saturation(WEIGHT, -1, "l1")
    with pytest.raises(TrainingError, match="NaN or infinity"):
        saturation(WEIGHT / 0, 0.1, "nuclear")
    with pytest.raises(TrainingError, match="is no matrix"):
        saturation(torch.ones(3), 0.1, "nuclear")
