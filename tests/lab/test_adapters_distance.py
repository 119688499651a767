from __future__ import annotations

import json
from itertools import combinations

import pytest
import torch
from safetensors.torch import save_file

from isthmus.lab.adapters_distance import likeness

MODULES = ("layer.0", "layer.1")


def write(folder, factors, rank):
    """An adapter of two modules with alpha equal to the rank."""
    folder.mkdir()
    tensors = {}
    for module, (b, a) in zip(MODULES, factors, strict=True):
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.clone()
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.clone()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def chance():
    return torch.Generator().manual_seed(0)


def test_the_same_update_in_other_factors_is_the_same(tmp_path, chance):
    factors = [(torch.randn(9, 3, generator=chance), torch.randn(3, 7, generator=chance))] * 2
    gauge = torch.randn(3, 3, generator=chance)
    other = [(b @ gauge, torch.linalg.inv(gauge) @ a) for b, a in factors]
    found = likeness([write(tmp_path / "a", factors, 3), write(tmp_path / "b", other, 3)])
    assert found.overlap == pytest.approx(1, abs=1e-5)
    assert found.cosine == pytest.approx(1, abs=1e-5)
    assert 1 <= found.effective_rank <= 3


def test_orthogonal_updates_of_equal_values_share_nothing_and_have_full_rank(tmp_path):
    eye = torch.eye(8)
    one = [(eye[:, :3], eye[:3])] * 2
    other = [(eye[:, 3:6], eye[:3])] * 2
    found = likeness([write(tmp_path / "a", one, 3), write(tmp_path / "b", other, 3)])
    assert found.overlap == pytest.approx(0, abs=1e-12)
    assert found.cosine == pytest.approx(0, abs=1e-12)
    assert found.effective_rank == pytest.approx(3)


def test_random_updates_agree_with_dense_matrices(tmp_path, chance):
    made = [
        [(torch.randn(9, 2, generator=chance), torch.randn(2, 7, generator=chance)) for _ in "ab"]
        for _ in range(3)
    ]
    found = likeness([write(tmp_path / str(i), factors, 2) for i, factors in enumerate(made)])
    dense = [[(b.double() @ a.double()) for b, a in factors] for factors in made]
    cosines, overlaps, ranks = [], [], []
    for module in range(2):
        for matrices in dense:
            values = torch.linalg.svdvals(matrices[module])[:2] ** 2
            shares = values / values.sum()
            ranks.append(torch.exp(-(shares * shares.log()).sum()))
        for one, other in combinations(dense, 2):
            x, y = one[module], other[module]
            cosines.append((x * y).sum() / (x.norm() * y.norm()))
            u, v = (torch.linalg.svd(matrix)[0][:, :2] for matrix in (x, y))
            overlaps.append(((u.T @ v) ** 2).sum() / 2)
    assert found.cosine == pytest.approx(float(sum(cosines) / len(cosines)))
    assert found.overlap == pytest.approx(float(sum(overlaps) / len(overlaps)))
    assert found.effective_rank == pytest.approx(float(sum(ranks) / len(ranks)))
