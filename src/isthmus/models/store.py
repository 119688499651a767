"""Moments on disk: computed once, and used only with the model and the examples that they are of.

A folder holds a safetensors file for each block of the network, and `calibration.json`, which says in
which file the moments of a weight are, and hashes what they were computed from.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from isthmus.checkpoints import Checkpoint, atomic_write_text
from isthmus.checkpoints.atomic import sync_folder
from isthmus.checkpoints.safetensors_file import SafetensorsFile
from isthmus.errors import CalibrationError, CheckpointError, OutputError
from isthmus.models.calibration import Moments, Report, calibrate_checkpoint
from isthmus.models.listening import Batch
from isthmus.models.states import Keep
from isthmus.projection.statistics import InputMoments

DESCRIPTION = "calibration.json"
FORMAT = 2

_READ = 1 << 22

_AGAIN = "It was changed; remove the folder and run isthmus calibrate again."


@dataclass(frozen=True, slots=True)
class ContentKey:
    """What moments depend on. Equal keys, equal moments.

    Attributes:
        model: Hash of the model's files and configuration.
        examples: Hash of the batches.
        keep: How activations wait between blocks.
    """

    model: str
    examples: str
    keep: str

    @classmethod
    def of(cls, checkpoint: Checkpoint, batches: Sequence[Batch], keep: Keep) -> ContentKey:
        """The key of moments that are to be computed; reads the model's files once.

        Raises:
            CalibrationError: if one of them cannot be read.
        """
        return cls(_model_hash(checkpoint), examples_hash(batches), str(keep.dtype))


class StoredMoments(Mapping[str, InputMoments]):
    """Moments by the weight's name in the checkpoint, read from disk when they are asked for.

    Every input ends with a constant 1, as `calibrate` records them.

    Args:
        folder: As `store_moments` wrote it.

    Attributes:
        key: What they were computed from.

    Raises:
        CalibrationError: if it is no such folder, or of another version.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / DESCRIPTION
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            found = content["format"]
            if found == FORMAT:
                self.key = ContentKey(**content["key"])
                self._places = {
                    name: (Path(place["file"]).name, str(place["tensor"]), int(place["count"]))
                    for name, place in content["weights"].items()
                }
        except OSError as error:
            raise CalibrationError(
                f"{folder} holds no calibration statistics: {path} cannot be read: {error.strerror}",
                "Make them with isthmus calibrate.",
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CalibrationError(
                f"{path} is damaged", "Remove the folder and run isthmus calibrate again."
            ) from error
        if found != FORMAT:
            raise CalibrationError(
                f"{path} is of format {found}; this Isthmus reads format {FORMAT}",
                "Remove the folder and run isthmus calibrate again.",
            )

    def require(self, key: ContentKey) -> None:
        """Refuse moments of another model, other examples or another format of activations.

        Raises:
            CalibrationError: saying in what they differ.
        """
        words = {"model": "another model", "examples": "other examples", "keep": "other settings"}
        ours, theirs = asdict(key), asdict(self.key)
        differing = [word for name, word in words.items() if ours[name] != theirs[name]]
        if differing:
            raise CalibrationError(
                f"{self.folder} holds calibration statistics of {' and '.join(differing)}",
                "Remove the folder, or choose another one.",
            )

    def require_model(self, checkpoint: Checkpoint) -> None:
        """Refuse moments of another model; reads the model's files once.

        Raises:
            CalibrationError: if they are of another one, or a file cannot be read.
        """
        if _model_hash(checkpoint) != self.key.model:
            raise CalibrationError(
                f"{self.folder} holds calibration statistics of another model than {checkpoint.label}",
                "Make its own with isthmus calibrate.",
            )

    def __getitem__(self, weight: str) -> InputMoments:
        file, tensor, count = self._places[weight]
        path = self.folder / file
        try:
            with closing(SafetensorsFile(path)) as opened:
                info = opened.tensors.get(tensor)
                if info is None or len(info.shape) != 2 or info.shape[0] != info.shape[1]:
                    raise CalibrationError(f"{path} has no square matrix {tensor}", _AGAIN)
                gram = np.empty(info.numel, np.float64)
                opened.read(tensor, 0, gram)
        except CheckpointError as error:
            raise CalibrationError(error.problem, _AGAIN) from error
        # The last input is a constant 1, whose squares sum to the number of inputs.
        if not np.isfinite(gram).all() or count < 1 or gram[-1] != count:
            raise CalibrationError(
                f"{path}: the matrix {tensor} is not one of {count} inputs", _AGAIN
            )
        return InputMoments(torch.from_numpy(gram).view(info.shape), count)

    def __contains__(self, weight: object) -> bool:
        return weight in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def store_moments(
    checkpoint: Checkpoint,
    batches: Sequence[Batch],
    out: Path,
    *,
    keep: Keep = Keep.FLOAT32,
    report: Report = lambda _done, _total: None,
) -> tuple[StoredMoments, bool]:
    """Compute moments into a folder, unless it holds them already.

    One block's moments are in memory at a time. The folder appears when it is complete.

    Args:
        checkpoint: The model.
        batches: The examples.
        out: The folder; new, empty, or with moments of this model and these examples.
        keep: How activations wait between blocks.
        report: Is told of progress.

    Returns:
        The moments, and whether they had to be computed.

    Raises:
        CalibrationError: if the folder holds other moments, or as `calibrate_checkpoint` does.
        OutputError: if the folder holds something else, or cannot be written.
    """
    key = ContentKey.of(checkpoint, batches, keep)
    if (out / DESCRIPTION).exists():
        stored = StoredMoments(out)
        stored.require(key)
        return stored, False
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(
            f"{out} exists and holds no calibration statistics", "Choose another folder."
        )
    parts = calibrate_checkpoint(checkpoint, batches, keep=keep, report=report)
    # Beside the output, for a rename to reach it.
    absolute = out.absolute()
    temporary = absolute.with_name(f".{absolute.name}.{secrets.token_hex(4)}")
    try:
        try:
            temporary.mkdir(parents=True)
            _write(parts, key, temporary)
            temporary.rename(absolute)
            sync_folder(absolute.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise OutputError(
            f"{out} cannot be written: {error.strerror}",
            "See that its folder is yours and has room.",
        ) from error
    return StoredMoments(out), True


def _write(parts: Iterator[Moments], key: ContentKey, folder: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    places: dict[str, dict[str, Any]] = {}
    for number, part in enumerate(parts):
        file = f"part-{number:05}.safetensors"
        leaders: dict[int, str] = {}
        for weight, moments in part.items():
            tensor = leaders.setdefault(id(moments), weight)
            places[weight] = {"file": file, "tensor": tensor, "count": moments.count}
        if part:
            grams = {weight: part[weight].gram for weight in leaders.values()}
            try:
                save_file(grams, folder / file)
            except SafetensorError as error:  # which is how it tells of a full disk
                raise OutputError(
                    f"{folder / file} cannot be written: {error}", "See that its disk has room."
                ) from error
            with (folder / file).open("rb") as opened:
                os.fsync(opened.fileno())
    content = {"format": FORMAT, "key": asdict(key), "weights": places}
    atomic_write_text(folder / DESCRIPTION, json.dumps(content, indent=1) + "\n")


def _model_hash(checkpoint: Checkpoint) -> str:
    digest = xxhash.xxh3_128(json.dumps(checkpoint.config, sort_keys=True).encode())
    try:
        for source in checkpoint.sources:
            digest.update(f"\n{source.path.name} {source.size}\n".encode())
            with source.path.open("rb", buffering=0) as file:
                while block := file.read(_READ):
                    digest.update(block)
    except OSError as error:
        raise CalibrationError(f"{error.filename} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def examples_hash(batches: Sequence[Batch]) -> str:
    """Identifies examples: same hash, same numbers."""
    digest = xxhash.xxh3_128()
    for batch in batches:
        for name, tensor in sorted(batch.items()):
            digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
