"""Where every byte of an output goes: the Hub's layout, planned before anything is written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isthmus.checkpoints.base import TensorInfo
from isthmus.checkpoints.index import SAFETENSORS_INDEX
from isthmus.checkpoints.safetensors_header import LENGTH_BYTES
from isthmus.errors import PlanError

# Every tensor then begins at a multiple of its own element's size, as fast loading needs.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Shard:
    """One output file.

    Attributes:
        file: Its name.
        header: Its first bytes: the length of the header, and the header.
        tensors: What it holds, in the order of the bytes.
        positions: Where each tensor begins, in bytes from the beginning of the file.
        size: Its length in bytes.
    """

    file: str
    header: bytes
    tensors: Mapping[str, TensorInfo]
    positions: Mapping[str, int]
    size: int


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The output files of a model.

    Attributes:
        shards: The files in order; never empty.
        tied: Names without bytes of their own, and the tensor whose numbers they share.
    """

    shards: tuple[Shard, ...]
    tied: Mapping[str, str]

    @classmethod
    def plan(
        cls,
        tensors: Sequence[TensorInfo],
        max_shard_size: int,
        *,
        tied: Mapping[str, str] | None = None,
        stem: str = "model",
    ) -> ShardLayout:
        """Distribute tensors over files, in the order given.

        All of them go into `model.safetensors` when they fit, otherwise into
        `model-00001-of-00003.safetensors` and so on. A tensor that is larger than a shard may be
        has a shard of its own. The same arguments give the same bytes.

        Args:
            tensors: What is written, by distinct names.
            max_shard_size: The most bytes of numbers in one file.
            tied: Names to record as sharing another tensor's numbers, as
                `safetensors.torch.save_model` records them; a checkpoint's `tied_by_file`.
            stem: The beginning of the files' names.

        Raises:
            PlanError: if two tensors have the same name, or a name cannot stand in the format.
        """
        _check_names(tensors)
        tied = dict(tied or {})
        groups = _group(tensors, max_shard_size)
        count = len(groups)
        shards = tuple(
            _shard(
                f"{stem}.safetensors"
                if count == 1
                else f"{stem}-{i:05d}-of-{count:05d}.safetensors",
                group,
                tied,
            )
            for i, group in enumerate(groups, start=1)
        )
        return cls(shards, tied)

    @property
    def size(self) -> int:
        """The bytes of all shards together."""
        return sum(shard.size for shard in self.shards)

    def index(self) -> tuple[str, str] | None:
        """File name and text of the index that a model of several shards needs; else None."""
        if len(self.shards) == 1:
            return None
        total = sum(info.nbytes for shard in self.shards for info in shard.tensors.values())
        weight_map = {name: shard.file for shard in self.shards for name in shard.tensors}
        content = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(weight_map.items())),
        }
        return SAFETENSORS_INDEX, json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _check_names(tensors: Sequence[TensorInfo]) -> None:
    seen: set[str] = set()
    for info in tensors:
        if info.name in seen:
            raise PlanError(f"two output tensors are named {info.name!r}")
        if info.name == "__metadata__":
            raise PlanError("no tensor can be named '__metadata__': safetensors reserves the name")
        try:
            info.name.encode("utf-8")
        except UnicodeEncodeError as error:
            raise PlanError(f"the name {info.name!r} is not valid Unicode") from error
        seen.add(info.name)


def _group(tensors: Sequence[TensorInfo], limit: int) -> list[list[TensorInfo]]:
    groups: list[list[TensorInfo]] = [[]]
    filled = 0
    for info in tensors:
        if groups[-1] and filled + info.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(info)
        filled += info.nbytes
    return groups


def _shard(file: str, group: Sequence[TensorInfo], tied: Mapping[str, str]) -> Shard:
    # Widest elements first: then no tensor disturbs the alignment of the next.
    ordered = sorted(group, key=lambda info: -info.dtype.itemsize)
    tensors = {info.name: info for info in ordered}
    # The Hub's libraries load files whose metadata names pt, torch's layout, and refuse others.
    names = {name: kept for name, kept in tied.items() if kept in tensors and name != "format"}
    fields: dict[str, object] = {"__metadata__": {"format": "pt", **names}}
    offsets: dict[str, int] = {}
    end = 0
    for info in ordered:
        offsets[info.name] = end
        fields[info.name] = {
            "dtype": info.dtype.value,
            "shape": list(info.shape),
            "data_offsets": [end, end + info.nbytes],
        }
        end += info.nbytes
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-(LENGTH_BYTES + len(text)) % _ALIGNMENT)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    positions = {name: len(header) + offset for name, offset in offsets.items()}
    return Shard(file, header, tensors, positions, len(header) + end)
