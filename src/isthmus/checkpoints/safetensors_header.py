"""The header of a safetensors file: parsing it, and checking every promise of the format."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from isthmus.checkpoints.base import TensorInfo
from isthmus.checkpoints.dtypes import Dtype
from isthmus.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""The format's limit on the length of a header."""

LENGTH_BYTES = 8
"""A file begins with the length of its header, as a little-endian integer of this many bytes."""

# Shapes are kept within what a signed 64-bit count of bytes and a numpy array can express.
_MAX_BYTES = 2**63 - 1
_MAX_AXES = 64

_DAMAGED = "The file is damaged or was not written by a safetensors library; download it again."


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """What a header says.

    Attributes:
        tensors: Every tensor by name, in the order of their bytes.
        offsets: Where each tensor begins, in bytes after the header.
        metadata: The free text entries under `__metadata__`.
    """

    tensors: Mapping[str, TensorInfo]
    offsets: Mapping[str, int]
    metadata: Mapping[str, str]


def parse_header(text: bytes, data_bytes: int, file: str) -> SafetensorsHeader:
    """Parse and check a header.

    Args:
        text: The header's bytes, without the length before them.
        data_bytes: How many bytes follow the header in the file.
        file: The file's name, for errors.

    Raises:
        CheckpointError: if anything contradicts the format or the file's size.
    """
    fields = _parse_json(text, file)
    metadata = _metadata(fields.pop("__metadata__", None), file)
    spans = sorted(
        (_entry(name, entry, file) for name, entry in fields.items()),
        key=lambda span: (span.begin, span.end),
    )
    _check_layout(spans, data_bytes, file)
    return SafetensorsHeader(
        tensors={span.info.name: span.info for span in spans},
        offsets={span.info.name: span.begin for span in spans},
        metadata=metadata,
    )


@dataclass(frozen=True, slots=True)
class _Span:
    info: TensorInfo
    begin: int
    end: int


def _parse_json(text: bytes, file: str) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise CheckpointError(f"{file}: the header does not begin with '{{'", _DAMAGED)
    try:
        # RecursionError: json recurses once for each bracket, and a hostile header has millions.
        fields = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the header is not valid JSON: {error}", _DAMAGED) from error
    assert isinstance(fields, dict)  # it begins with a brace
    return fields


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = counts.most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} occurs twice")
    return fields


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _metadata(value: Any, file: str) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        try:
            "".join([*value, *value.values()]).encode("utf-8")
        except UnicodeEncodeError as error:
            raise CheckpointError(f"{file}: __metadata__ is not valid Unicode", _DAMAGED) from error
        return value
    raise CheckpointError(f"{file}: __metadata__ must map text to text", _DAMAGED)


def _entry(name: str, entry: Any, file: str) -> _Span:
    where = f"{file}: tensor {name!r}"
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{where} has a name that is not valid Unicode", _DAMAGED) from error
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} needs dtype, shape and data_offsets alone", _DAMAGED)
    dtype = _dtype(entry["dtype"], where)
    shape = _whole_numbers(entry["shape"])
    offsets = _whole_numbers(entry["data_offsets"])
    if shape is None:
        raise CheckpointError(f"{where} has the shape {entry['shape']!r:.80}", _DAMAGED)
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has offsets {entry['data_offsets']!r:.80}", _DAMAGED)
    # The axes of length zero are left out, so that they cannot hide axes of absurd length.
    extent = math.prod(filter(None, shape)) * dtype.itemsize
    if len(shape) > _MAX_AXES or extent > _MAX_BYTES:
        raise CheckpointError(f"{where} has the impossible shape {shape!r:.80}", _DAMAGED)
    info = TensorInfo(name, dtype, shape)
    begin, end = offsets
    if end - begin != info.nbytes:
        raise CheckpointError(
            f"{where} of shape {list(shape)} in {dtype.value} takes {info.nbytes} bytes, "
            f"but its offsets {begin} to {end} span {end - begin}",
            _DAMAGED,
        )
    return _Span(info, begin, end)


def _dtype(value: Any, where: str) -> Dtype:
    try:
        return Dtype(value)
    except ValueError as error:
        known = ", ".join(dtype.value for dtype in Dtype)
        raise CheckpointError(
            f"{where} has the number format {value!r:.80}, which Isthmus does not know",
            f"It reads {known}. Convert the model to one of these first.",
        ) from error


def _whole_numbers(value: Any) -> tuple[int, ...] | None:
    # bool is an int to Python, and true is no length.
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    return None


def _check_layout(spans: list[_Span], data_bytes: int, file: str) -> None:
    """The tensors must fill the data without overlaps and without holes."""
    if spans and spans[0].begin != 0:
        raise CheckpointError(
            f"{file}: the first tensor, {spans[0].info.name!r}, begins at byte {spans[0].begin} "
            "of the data instead of 0",
            _DAMAGED,
        )
    for left, right in pairwise(spans):
        if right.begin != left.end:
            what = "overlap" if right.begin < left.end else "have a hole between them"
            raise CheckpointError(
                f"{file}: tensors {left.info.name!r} and {right.info.name!r} {what}", _DAMAGED
            )
    expected = spans[-1].end if spans else 0
    if expected > data_bytes:
        raise CheckpointError(
            f"{file} is truncated: {expected} bytes of data expected, {data_bytes} found",
            "Download it again.",
        )
    if expected < data_bytes:
        raise CheckpointError(
            f"{file}: {data_bytes - expected} bytes at the end belong to no tensor", _DAMAGED
        )
