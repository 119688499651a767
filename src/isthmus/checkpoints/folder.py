"""Opening a model: a folder in the Hub's layout, or one file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from isthmus.checkpoints.adapter import ADAPTER_CONFIG
from isthmus.checkpoints.adapter_files import ADAPTER_STEM
from isthmus.checkpoints.base import Checkpoint, TensorInfo
from isthmus.checkpoints.codes import refuse_codes
from isthmus.checkpoints.index import (
    SAFETENSORS_INDEX,
    TORCH_INDEX,
    check_index,
    inside,
    read_index,
    read_json,
)
from isthmus.checkpoints.safetensors_file import SafetensorsFile
from isthmus.checkpoints.sidecars import MODEL_CONFIG, sidecar_notes
from isthmus.checkpoints.tensor_file import TensorFile
from isthmus.checkpoints.ties import tied_by_config
from isthmus.checkpoints.torch_file import TorchFile
from isthmus.errors import CheckpointError
from isthmus.typing import FloatArray, StorageArray

SAFETENSORS_SINGLE = "model.safetensors"
TORCH_SINGLE = "pytorch_model.bin"
TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".tar", ".ckpt")


class FileCheckpoint(Checkpoint):
    """A checkpoint made of opened files.

    Args:
        label: The model as the user wrote it.
        path: The folder or file.
        homes: The file in which each tensor lies.
        config: The parsed `config.json`.
        notes: What the user should know, beside the files' own notes.

    Raises:
        CheckpointError: if the stored weights are quantised.
    """

    def __init__(
        self,
        label: str,
        path: Path,
        homes: Mapping[str, TensorFile],
        config: Mapping[str, Any] | None,
        notes: tuple[str, ...] = (),
    ) -> None:
        files = list(dict.fromkeys(homes.values()))
        stored = {name: file.tensors[name] for name, file in homes.items()}
        refuse_codes(label, stored, config)
        tied = tied_by_config(stored, config)
        self.label = label
        self.path = path
        self.config = config
        self.sources = tuple(file.source for file in files)
        self.tensors: Mapping[str, TensorInfo] = {
            name: info for name, info in stored.items() if name not in tied
        }
        # A file may tie a name to one that the configuration ties in turn.
        shared = {name: kept for file in files for name, kept in file.tied.items()}
        self.tied = {
            name: tied.get(kept, kept)
            for name, kept in (shared | tied).items()
            if name not in self.tensors and tied.get(kept, kept) in self.tensors
        }
        self.tied_by_file = {name: kept for name, kept in self.tied.items() if name not in tied}
        self.notes = (
            *notes,
            *(note for file in files for note in file.notes),
            *(
                f"{name} is stored but left out: config.json ties it to {kept}, which Transformers "
                "uses in its place."
                for name, kept in tied.items()
            ),
        )
        self._homes = homes
        self._files = files

    def read(self, name: str, start: int, out: FloatArray) -> None:
        """Decode a range; see `Checkpoint`."""
        self._homes[name].read(name, start, out)

    def read_stored(
        self, name: str, start: int, stop: int, out: StorageArray | None = None
    ) -> StorageArray:
        """Copy a range as stored; see `Checkpoint`."""
        return self._homes[name].read_stored(name, start, stop, out)

    def close(self) -> None:
        """Release the files. Closing twice is allowed."""
        for file in self._files:
            file.close()


def open_file(path: Path, label: str) -> FileCheckpoint:
    """Open one file of tensors. Its folder is not looked at, a `config.json` in it included.

    Raises:
        CheckpointError: if it is of no known format, damaged, or quantised.
    """
    file = _open_tensors(path)
    notes: tuple[str, ...] = ()
    if (path.parent / MODEL_CONFIG).is_file():
        notes = (
            f"{path.name} was opened by itself; name its folder to use the config.json and tokenizer "
            "beside it.",
        )
    return FileCheckpoint(label, path, dict.fromkeys(file.tensors, file), None, notes)


def open_folder(folder: Path, label: str) -> FileCheckpoint:
    """Open a model's folder.

    Where it holds several formats, the one counts that Transformers would load: first
    `model.safetensors`, then the index of sharded safetensors, then a lone `.safetensors` file of
    another name, then `pytorch_model.bin` and its index.

    Raises:
        CheckpointError: if it holds no model, or a damaged, inconsistent or quantised one.
    """
    weights, notes = choose_weights(folder)
    config_path = inside(folder, MODEL_CONFIG)
    config = read_json(config_path) if config_path.exists() else None
    notes += sidecar_notes(folder)
    # Before the shards are opened: a config says more clearly what is wrong than a header.
    refuse_codes(label, {}, config)
    if weights.name.endswith(".index.json"):
        homes, more = _open_shards(folder, weights)
        notes += more
    else:
        file = _open_tensors(weights)
        homes = dict.fromkeys(file.tensors, file)
    return FileCheckpoint(label, folder, homes, config, tuple(notes))


def preferred_weights(names: Collection[str]) -> str | None:
    """The name, among a folder's file names, of the file or index that stands for its model.

    Returns:
        None if there is none, or several files of weights of which none stands out.
    """
    for name in (SAFETENSORS_SINGLE, SAFETENSORS_INDEX):
        if name in names:
            return name
    lone = [
        name
        for name in names
        if name.endswith(".safetensors") and "/" not in name and not name.startswith(ADAPTER_STEM)
    ]
    if lone:
        return lone[0] if len(lone) == 1 else None
    return next((name for name in (TORCH_SINGLE, TORCH_INDEX) if name in names), None)


def choose_weights(folder: Path) -> tuple[Path, list[str]]:
    """The file or index in a folder that stands for its model, and notes about the choice.

    Raises:
        CheckpointError: if there is none, or none that stands out.
    """
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be looked into: {error.strerror}") from error
    weights = preferred_weights(names)
    if weights is not None:
        notes = []
        if weights == SAFETENSORS_SINGLE and SAFETENSORS_INDEX in names:
            notes.append(
                f"{SAFETENSORS_SINGLE} and {SAFETENSORS_INDEX} are both there; the first is used, as "
                "Transformers does."
            )
        return inside(folder, weights), notes
    if ADAPTER_CONFIG in names:
        raise CheckpointError(
            f"{folder} is an adapter, not a model",
            "Write its base model before it, with a plus sign between: base+adapter.",
        )
    lone = [name for name in names if name.endswith(".safetensors")]
    if lone:
        raise CheckpointError(
            f"{folder} holds {len(lone)} safetensors files and no {SAFETENSORS_INDEX}: "
            f"{', '.join(lone[:6])}",
            "Name one of the files, or fetch the index.",
        )
    raise CheckpointError(
        f"{folder} holds no weights that Isthmus reads; it holds "
        f"{', '.join(names[:8]) or 'nothing'}",
        _cure(names),
    )


def _cure(names: list[str]) -> str:
    if any(name.endswith(".gguf") for name in names):
        return _GGUF
    files = [name for name in names if name.endswith(TORCH_SUFFIXES)]
    if files:
        return f"Name the file itself if it holds the model, such as {files[0]}."
    return f"It looks for {SAFETENSORS_SINGLE}, {TORCH_SINGLE}, or the index of either's shards."


_GGUF = (
    "GGUF files hold quantised codes. Use the original model, or load it in Transformers with "
    "gguf_file=..., which dequantises it, and save that."
)


def _open_tensors(path: Path) -> TensorFile:
    if path.name.endswith(".safetensors"):
        return SafetensorsFile(path)
    if path.name.endswith(TORCH_SUFFIXES):
        return TorchFile(path)
    if path.name.endswith(".gguf"):
        raise CheckpointError(f"{path} is a GGUF file", _GGUF)
    raise CheckpointError(
        f"{path} is of no format that Isthmus knows",
        f"It opens folders, .safetensors files, and {', '.join(TORCH_SUFFIXES)} files of torch.",
    )


def _open_shards(folder: Path, index: Path) -> tuple[dict[str, TensorFile], list[str]]:
    """Open every shard that an index names."""
    weight_map = read_index(index)
    shards: dict[str, TensorFile] = {}
    try:
        for file in sorted(set(weight_map.values())):
            path = inside(folder, file)
            if not path.exists():
                raise CheckpointError(
                    f"{path} is missing, though {index.name} names it", "Download it again."
                )
            shards[file] = _open_tensors(path)
        notes = check_index(index, weight_map, shards)
    except BaseException:
        for shard in shards.values():
            shard.close()
        raise
    suffix = ".safetensors" if index.name == SAFETENSORS_INDEX else ".bin"
    leftovers = sorted(
        entry.name for entry in folder.glob(f"*-of-*{suffix}") if entry.name not in shards
    )
    if leftovers:
        notes.append(f"not in {index.name}, and so left out: {', '.join(leftovers)}.")
    homes = {
        name: shard
        for file, shard in shards.items()
        for name in shard.tensors
        if weight_map[name] == file
    }
    return homes, notes
