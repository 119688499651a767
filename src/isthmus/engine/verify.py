"""Checking an output folder against its manifest, byte by byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from isthmus.engine.hashing import hash_range
from isthmus.engine.manifest import FileRecord, read_manifest


@dataclass(frozen=True, slots=True)
class Verification:
    """What a check found.

    Attributes:
        files: How many files the manifest lists.
        tensors: How many tensors.
        bytes: How many bytes.
        problems: One sentence each; none when all is as it was written.
    """

    files: int
    tensors: int
    bytes: int
    problems: tuple[str, ...]


def verify(folder: Path) -> Verification:
    """Compare every byte that a merge wrote with its manifest.

    Raises:
        OutputError: if the folder has no readable manifest.
    """
    manifest = read_manifest(folder)
    problems = [
        problem
        for name, record in manifest.files.items()
        for problem in _problems(folder, name, record)
    ]
    strangers = {path.name for path in folder.glob("*.safetensors")} - manifest.files.keys()
    problems += [f"{name} is not in the manifest" for name in sorted(strangers)]
    return Verification(
        files=len(manifest.files),
        tensors=sum(len(record.tensors or ()) for record in manifest.files.values()),
        bytes=sum(record.size for record in manifest.files.values()),
        problems=tuple(problems),
    )


def _problems(folder: Path, name: str, record: FileRecord) -> Iterator[str]:
    path = folder / name
    if not path.is_file():
        yield f"{name} is missing"
    elif path.stat().st_size != record.size:
        yield f"{name} has {path.stat().st_size:,} bytes instead of {record.size:,}"
    elif record.tensors is None:
        if hash_range(path, 0, record.size) != record.xxh3:
            yield f"{name} was changed"
    else:
        yield from _weight_problems(path, name, record)


def _weight_problems(path: Path, name: str, record: FileRecord) -> Iterator[str]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > record.size or hash_range(path, 0, 8 + length) != record.xxh3:
        yield f"the header of {name} was changed"
        return
    with path.open("rb") as file:
        file.seek(8)
        header = json.loads(file.read(length))
    for tensor, expected in (record.tensors or {}).items():
        if tensor not in header:
            yield f"tensor {tensor} is not in {name}, though the manifest says so"
            continue
        begin, end = header[tensor]["data_offsets"]
        if hash_range(path, 8 + length + begin, end - begin) != expected:
            yield f"tensor {tensor} in {name} was changed"
