from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import save_file

from isthmus.lab.packaged import rxnfp
from isthmus.lab.reactions import merge_reactions, smiles_symbols


def keep_base(recipe, out, *, overwrite):
    """A stand-in for `isthmus.merge` that returns the base."""
    assert overwrite
    assert recipe["tensors"] == "common"
    out.mkdir()
    weights = torch.load(f"{recipe['base_model']}/pytorch_model.bin", weights_only=True)
    save_file(
        {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in weights.items()
        },
        out / "model.safetensors",
    )
    shutil.copy(rxnfp("bert_pretrained") / "config.json", out)


def test_two_public_fine_tunes_are_measured_and_the_result_runs(tmp_path):
    found = merge_reactions(tmp_path / "merged", keep_base)
    assert found.common_tensors == 199
    assert found.distances["bert_ft"] == pytest.approx(0.216, abs=1e-3)
    assert found.distances["bert_ft_10k_25s"] == pytest.approx(0.092, abs=1e-3)
    assert found.cosine == pytest.approx(0.092, abs=1e-3)
    assert found.merged_distance == 0
    assert found.recovered["merged"] == found.recovered["base"] > found.masked_symbols / 2


def test_reactions_are_cut_into_symbols():
    assert smiles_symbols("Cl[Na+]%12Br>>CN") == ["Cl", "[Na+]", "%12", "Br", ">>", "C", "N"]
