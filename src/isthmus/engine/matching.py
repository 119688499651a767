"""Which tensors of several models belong together, and why others do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from isthmus.checkpoints import Checkpoint, TensorInfo, align_names
from isthmus.checkpoints.ties import config_ties, is_output_embedding

RECOMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".position_ids")
"""Endings of buffers that architectures compute by themselves and old checkpoints still store."""


class Reason(Enum):
    """Why a tensor is carried from the donor instead of merged."""

    NOT_FLOAT = "not a floating-point tensor"
    BUFFER = "a buffer that the architecture computes"
    MISSING = "not in every model"
    SHAPE = "of another shape in another model"


@dataclass(frozen=True, slots=True)
class Matched:
    """A tensor that every model has.

    Attributes:
        info: Its name, format and shape in the donor.
        names: Its stored name in each model.
    """

    info: TensorInfo
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Carried:
    """A tensor that goes from the donor to the output unchanged.

    Attributes:
        info: Its name, format and shape in the donor.
        reason: Why it is not merged.
        others: Its stored name in those models that have it with the same shape, by model index.
    """

    info: TensorInfo
    reason: Reason
    others: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Matching:
    """How the tensors of several models correspond; the first model is the donor.

    Attributes:
        matched: Tensors to merge, in the donor's order.
        carried: Tensors to take from the donor.
        dropped: For each other model, tensors that have no place in the output.
        missing: (tensor, label of the model that lacks it), for floating-point tensors.
        misshapen: (tensor, label, shape there, shape in the donor).
        tied: Of the dropped names those that the donor ties, and to what.
    """

    matched: tuple[Matched, ...]
    carried: tuple[Carried, ...]
    dropped: Mapping[str, tuple[str, ...]]
    missing: tuple[tuple[str, str], ...]
    misshapen: tuple[tuple[str, str, tuple[int, ...], tuple[int, ...]], ...]
    tied: Mapping[str, str]

    @property
    def is_complete(self) -> bool:
        """Whether every floating-point tensor of every model is merged."""
        return not (self.missing or self.misshapen or self.dropped)


@dataclass
class _Findings:
    matched: list[Matched] = field(default_factory=list)
    carried: list[Carried] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    misshapen: list[tuple[str, str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)


def match(models: Sequence[Checkpoint]) -> Matching:
    """Compare names and shapes; nothing is read.

    Names may differ by a prefix (`model.`, `bert.`); tied names stand for the tensor that they
    share. Tensors that are not floating-point, and buffers that the architecture computes, come
    from the donor.

    Args:
        models: At least one; the first decides names, order and formats.
    """
    donor, *others = models
    stored = [_stored_names(donor, other) for other in others]
    found = _Findings()
    for info in donor.tensors.values():
        _sort(info, others, stored, found)
    used = [set(names.values()) for names in stored]
    dropped = {
        other.label: tuple(
            name
            for name, info in other.tensors.items()
            if name not in names and info.dtype.is_float and not _is_buffer(name)
        )
        for other, names in zip(others, used, strict=True)
    }
    return Matching(
        matched=tuple(found.matched),
        carried=tuple(found.carried),
        dropped={label: names for label, names in dropped.items() if names},
        missing=tuple(found.missing),
        misshapen=tuple(found.misshapen),
        tied=_tied_in(donor, dropped),
    )


def _tied_in(donor: Checkpoint, dropped: Mapping[str, Sequence[str]]) -> dict[str, str]:
    ties_head = config_ties(donor.config)
    return {
        name: donor.tied.get(name, "the input embedding")
        for names in dropped.values()
        for name in names
        if name in donor.tied or (ties_head and is_output_embedding(name))
    }


def _sort(
    info: TensorInfo,
    others: Sequence[Checkpoint],
    stored: Sequence[Mapping[str, str]],
    found: _Findings,
) -> None:
    """Decide about one tensor of the donor."""
    same: dict[int, str] = {}
    reason: Reason | None = None
    for index, (other, names) in enumerate(zip(others, stored, strict=True), start=1):
        name = names.get(info.name)
        if name is None:
            reason = Reason.MISSING
        elif other.tensors[name].shape != info.shape:
            reason = Reason.SHAPE
        else:
            same[index] = name
    if not info.dtype.is_float:
        found.carried.append(Carried(info, Reason.NOT_FLOAT, same))
    elif _is_buffer(info.name):
        found.carried.append(Carried(info, Reason.BUFFER, same))
    elif reason is None:
        found.matched.append(Matched(info, (info.name, *same.values())))
    else:
        found.carried.append(Carried(info, reason, same))
        for index, (other, names) in enumerate(zip(others, stored, strict=True), start=1):
            name = names.get(info.name)
            if name is None:
                found.missing.append((info.name, other.label))
            elif index not in same:
                shape = other.tensors[name].shape
                found.misshapen.append((info.name, other.label, shape, info.shape))


def _stored_names(donor: Checkpoint, other: Checkpoint) -> dict[str, str]:
    """From the donor's stored names to the other's, ties of the other resolved."""
    aligned = align_names(donor.tensors.keys(), [*other.tensors, *other.tied])
    return {name: other.tied.get(alias, alias) for name, alias in aligned.items()}


def _is_buffer(name: str) -> bool:
    return name.endswith(RECOMPUTED)
