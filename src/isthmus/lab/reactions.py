"""A large real case: two public fine-tunes of one chemistry model, merged onto their base.

rxnfp ships a BERT that was pretrained on chemical reactions and two fine-tunes of it. They come
as torch files, name the same tensors with and without a ``bert.`` prefix, and have different
heads: what merging looks like in the wild.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForPreTraining
from transformers.utils import logging

from isthmus.errors import IsthmusError
from isthmus.lab.packaged import rxnfp

logging.disable_progress_bar()

BASE = "bert_pretrained"
FINE_TUNES = ("bert_ft", "bert_ft_10k_25s")

REACTIONS = (
    "CCO.CC(=O)O>>CC(=O)OCC.O",
    "OB(O)c1ccccc1.Brc1ccc(C)cc1>>Cc1ccc(-c2ccccc2)cc1",
    "CC(=O)Cl.Nc1ccccc1>>CC(=O)Nc1ccccc1",
)
"""An esterification, a Suzuki coupling and an acylation, as reaction SMILES."""

_SYMBOL = re.compile(r"\[[^\]]*\]|Br|Cl|%\d\d|>>|.")
_FLOOR = 1e-12


@dataclass(frozen=True)
class ReactionResults:
    """What came out of the merge.

    Attributes:
        recipe: The recipe.
        common_tensors: Number of tensors that all three models have with the same shape.
        common_parameters: Number of their entries.
        distances: By fine-tune: norm of its task vector over the norm of the base.
        cosine: Of the angle between the two task vectors.
        merged_distance: The merged model's relative distance to the base.
        merge_seconds: Time of the merge.
        masked_symbols: How many symbols of `REACTIONS` were masked, one at a time.
        recovered: How many of them each model guessed right, by model.
    """

    recipe: dict[str, Any]
    common_tensors: int
    common_parameters: int
    distances: dict[str, float]
    cosine: float
    merged_distance: float
    merge_seconds: float
    masked_symbols: int
    recovered: dict[str, int]


def merge_reactions(output: Path, merge: Callable[..., Any]) -> ReactionResults:
    """Merge both fine-tunes by TIES, load the result in transformers and run it.

    Args:
        output: Folder of the merged model; replaced if it is there.
        merge: ``merge(recipe, output, overwrite=True)``.

    Raises:
        IsthmusError: The package is missing, or the merged model does not work.
    """
    base = rxnfp(BASE)
    recipe: dict[str, Any] = {
        "name": "rxnfp's fine-tunes by ties",
        "merge_method": "ties",
        "base_model": str(base),
        "models": [
            {"model": str(rxnfp(name)), "parameters": {"weight": 1.0, "density": 0.2}}
            for name in FINE_TUNES
        ],
        "parameters": {"lambda": 1.0},
        "tensors": "common",
    }
    start = time.perf_counter()
    merge(recipe, output, overwrite=True)
    seconds = time.perf_counter() - start

    weights = {name: _encoder_tensors(_torch_weights(rxnfp(name))) for name in (BASE, *FINE_TUNES)}
    common = [
        name
        for name, tensor in weights[BASE].items()
        if all(_shape(weights[tune].get(name)) == tensor.shape for tune in FINE_TUNES)
    ]
    base_vector = _vector(weights[BASE], common)
    tasks = {tune: _vector(weights[tune], common) - base_vector for tune in FINE_TUNES}
    first, second = tasks.values()

    models = {"base": _load(base, base), "merged": _load(output, base)}
    merged = _encoder_tensors(models["merged"].state_dict())
    masked = [_mask_each(reaction, base) for reaction in REACTIONS]
    return ReactionResults(
        recipe=recipe,
        common_tensors=len(common),
        common_parameters=base_vector.numel(),
        distances={
            tune: float(vector.norm() / base_vector.norm()) for tune, vector in tasks.items()
        },
        cosine=float(first @ second / (first.norm() * second.norm()).clamp_min(_FLOOR)),
        merged_distance=float((_vector(merged, common) - base_vector).norm() / base_vector.norm()),
        merge_seconds=seconds,
        masked_symbols=sum(len(truth) for _, truth in masked),
        recovered={
            name: sum(_recovered(model, *example) for example in masked)
            for name, model in models.items()
        },
    )


def smiles_symbols(reaction: str) -> list[str]:
    """Cut a reaction SMILES into atoms, bonds, ring marks and arrows.

    An atom in brackets is one symbol, as are chlorine, bromine, ``%12`` and ``>>``.
    """
    return _SYMBOL.findall(reaction)


def _torch_weights(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = torch.load(
        folder / "pytorch_model.bin", map_location="cpu", weights_only=True
    )
    return weights


def _encoder_tensors(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without the prefix that depends on which head a model was saved with."""
    return {name.removeprefix("bert."): tensor for name, tensor in weights.items()}


def _shape(tensor: Tensor | None) -> torch.Size | None:
    return None if tensor is None else tensor.shape


def _vector(weights: dict[str, Tensor], names: list[str]) -> Tensor:
    """The named tensors as one vector, in float64."""
    return torch.cat([weights[name].flatten().double() for name in names])


def _load(folder: Path, base: Path) -> BertForPreTraining:
    """Load with the pretraining heads; the configuration does not name its architecture."""
    config = BertConfig.from_json_file(base / "config.json")
    model, info = BertForPreTraining.from_pretrained(
        folder, config=config, local_files_only=True, output_loading_info=True
    )
    # The decoder's bias is tied to `cls.predictions.bias`, so old files hold it once.
    missing = set(info["missing_keys"]) - {"cls.predictions.decoder.bias"}
    if missing:
        raise IsthmusError(
            f"The model in {folder} lacks {len(missing)} tensors, {min(missing)} among them.",
            "Merge again into an empty folder.",
        )
    return model.eval()


def _mask_each(reaction: str, base: Path) -> tuple[Tensor, Tensor]:
    """One copy of the reaction per symbol, with that symbol masked.

    Returns:
        Token numbers ``[S, S + 2]``, and the masked symbols' true numbers ``[S]``.
    """
    vocabulary = {
        symbol: number
        for number, symbol in enumerate((base / "vocab.txt").read_text("utf-8").splitlines())
    }
    truth = torch.tensor([vocabulary[symbol] for symbol in smiles_symbols(reaction)])
    row = torch.cat(
        [torch.tensor([vocabulary["[CLS]"]]), truth, torch.tensor([vocabulary["[SEP]"]])]
    )
    tokens = row.repeat(len(truth), 1)
    tokens.diagonal(offset=1).fill_(vocabulary["[MASK]"])
    return tokens, truth


def _recovered(model: BertForPreTraining, tokens: Tensor, truth: Tensor) -> int:
    """How many masked symbols the model's first guess names."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=tokens).prediction_logits
    if not bool(torch.isfinite(logits).all()):
        raise IsthmusError(
            "The merged reaction model computes NaN or infinity.", "Check the recipe's parameters."
        )
    guesses = logits[torch.arange(len(truth)), torch.arange(1, len(truth) + 1)].argmax(dim=1)
    return int((guesses == truth).sum())
