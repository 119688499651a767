"""The files of a model besides its weights: which go along into an output."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from isthmus.checkpoints.atomic import atomic_write_bytes
from isthmus.checkpoints.base import Checkpoint
from isthmus.checkpoints.dtypes import Dtype
from isthmus.checkpoints.index import inside, read_json
from isthmus.errors import CheckpointError, OutputError

MODEL_CONFIG = "config.json"
MODULES = "modules.json"

# In the model's folder itself. A README describes the model that it came with, and code is not
# passed on: whoever loads the output would run it.
_PATTERNS = (
    MODEL_CONFIG,
    MODULES,
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece*.model",
    "source.spm",
    "target.spm",
    "vocab*.txt",
    "vocab*.json",
    "merges.txt",
    "bpe.codes",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "normalizer.json",
    "chat_template*",
    "*processor_config.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)
_TEMPLATES = "additional_chat_templates"
_DTYPE_KEYS = frozenset({"dtype", "torch_dtype"})


def is_sidecar(name: str) -> bool:
    """Whether a file of this path in a model's folder goes along into outputs.

    Files in sub-folders count when they are chat templates, or belong to one of the numbered
    modules of a sentence encoder, such as `1_Pooling/config.json`.
    """
    parent, _, file = name.rpartition("/")
    if parent:
        return parent == _TEMPLATES or parent[:1].isdigit()
    return not file.endswith(".py") and any(fnmatch.fnmatchcase(file, p) for p in _PATTERNS)


def copy_sidecars(source: Checkpoint, destination: Path, dtype: Dtype | None) -> list[str]:
    """Copy a model's configuration, tokenizer, templates and licence into an output.

    Args:
        source: The model whose files they are. One that was opened as a single file has none.
        destination: An existing folder.
        dtype: What `config.json` shall say of the weights; None leaves it as it is.

    Returns:
        The copied files, as paths within the folder.

    Raises:
        CheckpointError: if a file cannot be read, or leads out of the model's folder.
        OutputError: if the destination cannot be written.
    """
    if not source.path.is_dir():
        return []
    copied = list(_sidecars(source.path))
    for name in copied:
        path = inside(source.path, name)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if name == MODEL_CONFIG and dtype is not None:
            config = with_dtype(read_json(path), dtype)
            if not config.keys() & _DTYPE_KEYS:
                # Without it some versions of transformers load all weights as float32.
                config["torch_dtype"] = dtype.torch_name
            content = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode("utf-8")
        target = destination / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{target.parent} cannot be made: {error.strerror}") from error
        atomic_write_bytes(target, content)
    return copied


def with_dtype(config: Mapping[str, Any], dtype: Dtype) -> dict[str, Any]:
    """A configuration that states another number format, for a model and the models in it.

    Transformers wrote `torch_dtype` and now writes `dtype`; whichever is there is kept, and
    `torch_dtype`, which all of its versions read, is added where neither is.
    """
    changed = _replace_dtype(config, dtype)
    if not any(key in changed for key in _DTYPE_KEYS):
        changed["torch_dtype"] = dtype.torch_name
    return changed


def _replace_dtype(config: Mapping[str, Any], dtype: Dtype) -> dict[str, Any]:
    changed = dict(config)
    for key, value in config.items():
        if key in _DTYPE_KEYS:
            changed[key] = dtype.torch_name
        elif key.endswith("_config") and isinstance(value, Mapping):
            changed[key] = _replace_dtype(value, dtype)
    return changed


def sidecar_notes(folder: Path) -> list[str]:
    """What the user should know about the files beside the weights."""
    code = sorted(path.name for path in folder.glob("*.py"))
    notes = []
    if code:
        notes.append(f"{folder} holds code of its own, which is not copied: {', '.join(code)}.")
    modules = sorted({name.split("/")[0] for name in _module_files(folder) if _has_weights(name)})
    if modules:
        notes.append(
            f"{folder}: the weights in {', '.join(modules)} are copied from one model, not merged."
        )
    return notes


def _has_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


def _sidecars(folder: Path) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        if is_sidecar(path.name) and path.is_file():
            yield path.name
    yield from _files(folder, _TEMPLATES)
    yield from _module_files(folder)


def _module_files(folder: Path) -> Iterator[str]:
    """The files of a sentence encoder's further modules: pooling, projections."""
    path = inside(folder, MODULES)
    if not path.is_file():
        return
    try:
        modules = json.loads(path.read_bytes())
        names = [module["path"] for module in modules]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path} is no list of modules with paths: {error}") from error
    for name in names:
        # The model itself has the empty path.
        if isinstance(name, str) and name:
            yield from _files(folder, name)


def _files(folder: Path, subfolder: str) -> Iterator[str]:
    inner = inside(folder, subfolder)
    if inner.is_dir():
        for path in sorted(inner.iterdir()):
            if path.is_file():
                yield f"{subfolder.rstrip('/')}/{path.name}"
