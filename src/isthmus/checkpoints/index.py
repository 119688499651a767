"""The Hub's index files, which say in which shard of a model each tensor lies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from isthmus.checkpoints.regular import read_regular
from isthmus.checkpoints.tensor_file import TensorFile
from isthmus.errors import CheckpointError

SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: if the file cannot be read or holds anything else.
    """
    content = read_regular(path)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not valid JSON: {error}", "Download it again, or mend it by hand."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def read_index(path: Path) -> dict[str, str]:
    """The `weight_map` of an index: each tensor's name, and its shard's file name.

    Raises:
        CheckpointError: if the file cannot be read or has no such map from text to text.
    """
    weight_map = read_json(path).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) and file for file in weight_map.values())
    ):
        raise CheckpointError(
            f"{path} has no weight_map from tensor names to file names", "Download it again."
        )
    return weight_map


def inside(folder: Path, relative: str) -> Path:
    """The path of a file that a model's own files name, which must lie in the model's folder.

    Links may lead elsewhere in the folder. In the Hub's cache, where every file of a snapshot is
    a link to the model's folder of blobs, they may also lead there.

    Args:
        folder: The model's folder.
        relative: A file's path from there, with `/` between its parts.

    Raises:
        CheckpointError: if the path leads out of the folder, in itself or through a link.
    """
    path = Path(relative)
    if path.is_absolute() or ".." in path.parts or "\0" in relative:
        raise CheckpointError(
            f"{folder}: its files name {relative!r}, which lies outside of the folder",
            "A model's files stay in its folder. Do not use this model if you do not trust it.",
        )
    try:
        target = (folder / path).resolve()
    except (OSError, RuntimeError) as error:  # links that lead in a circle
        raise CheckpointError(f"{folder / path} cannot be followed: {error}") from error
    if not any(target.is_relative_to(home) for home in _homes(folder)):
        raise CheckpointError(
            f"{folder / path} is a link to {target}, outside of the folder",
            "Copy the file into the folder, or name the linked folder itself.",
        )
    try:
        # A file that is not there is missed by whoever needs it.
        with suppress(FileNotFoundError, NotADirectoryError):
            target.stat()
    except OSError as error:  # a name of thousands of characters, links in a circle, no permission
        raise CheckpointError(
            f"{folder}: {relative:.80} cannot be looked at: {error.strerror}",
            "See that the model's folder is yours to read, and its index undamaged.",
        ) from error
    return folder / path


def _homes(folder: Path) -> list[Path]:
    """The folders in which a model's files may lie."""
    folder = folder.resolve()
    # The Hub's cache: models--org--name/snapshots/<revision> beside models--org--name/blobs.
    blobs = [
        parent.parent / "blobs"
        for parent in folder.parents
        if parent.name == "snapshots" and parent.parent.name.startswith("models--")
    ]
    return [folder, *blobs]


def check_index(
    index: Path, weight_map: Mapping[str, str], shards: Mapping[str, TensorFile]
) -> list[str]:
    """Compare an index with the shards that it names.

    Args:
        index: The index's path, for errors.
        weight_map: What it says.
        shards: The opened shards by file name.

    Returns:
        Notes: tensors that a shard holds although the index takes them from another one.

    Raises:
        CheckpointError: if a shard lacks a tensor, or holds one that the index does not name.
    """
    for name, file in weight_map.items():
        if name not in shards[file].tensors and name not in shards[file].tied:
            raise CheckpointError(
                f"{index} says that {name!r} lies in {file}, which does not hold it",
                "Index and shards belong to different models; download all of them again.",
            )
    notes = []
    for file, shard in shards.items():
        for name in shard.tensors:
            if name not in weight_map:
                raise CheckpointError(
                    f"{shard.source.path} holds {name!r}, which {index.name} does not name",
                    "Index and shards belong to different models; download all of them again.",
                )
            if weight_map[name] != file:
                notes.append(f"{name} lies in {file} too; the index takes {weight_map[name]}.")
    return notes
