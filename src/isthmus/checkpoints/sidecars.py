"""The files of a model besides its weights: which go along into an output."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from isthmus.checkpoints.atomic import atomic_write_bytes
from isthmus.checkpoints.base import Source
from isthmus.checkpoints.dtypes import Dtype
from isthmus.checkpoints.index import inside, read_json
from isthmus.checkpoints.regular import open_regular, read_regular
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
# What a merge writes itself into the top of its output, in small letters.
_OURS = frozenset({"readme.md", "isthmus-manifest.json", ".isthmus"})
_OUR_WEIGHTS = ("model*.safetensors", "*.index.json")
_DTYPE_KEYS = frozenset({"dtype", "torch_dtype"})


def is_sidecar(name: str) -> bool:
    """Whether a file of this path in a model's folder goes along into outputs.

    Files in sub-folders count when they are chat templates, or belong to one of the numbered
    modules of a sentence encoder, such as `1_Pooling/config.json`.
    """
    parent, _, file = name.rpartition("/")
    if parent:
        return parent == _TEMPLATES or parent[:1].isdigit()
    return not _is_code(file) and any(fnmatch.fnmatchcase(file, p) for p in _PATTERNS)


def check_sidecars(source: Source) -> None:
    """Raise what `copy_sidecars` would raise because of the source; nothing is written.

    Args:
        source: The model whose files would be copied.

    Raises:
        CheckpointError: if a file cannot be read, leads out of the model's folder, or would take
            the place of what a merge writes itself.
    """
    for name, path in _sidecars(source).items():
        if name == MODEL_CONFIG:
            _config_text(path, Dtype.F32)
        else:
            os.close(open_regular(path)[0])


def copy_sidecars(source: Source, destination: Path, dtype: Dtype | None) -> list[str]:
    """Copy a model's configuration, tokenizer, templates and licence into an output.

    Args:
        source: The model whose files they are. One that was opened as a single file has none.
        destination: An existing folder.
        dtype: What `config.json` shall say of the weights; None leaves it as it is.

    Returns:
        The copied files, as paths within the folder.

    Raises:
        CheckpointError: if a file cannot be read, leads out of the model's folder, or would take
            the place of what a merge writes itself.
        OutputError: if the destination cannot be written.
    """
    sidecars = _sidecars(source)
    for name, path in sidecars.items():
        if name == MODEL_CONFIG and dtype is not None:
            content = _config_text(path, dtype)
        else:
            content = read_regular(path)
        target = destination / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{target.parent} cannot be made: {error.strerror}") from error
        atomic_write_bytes(target, content)
    return list(sidecars)


def _config_text(path: Path, dtype: Dtype) -> bytes:
    try:
        return config_text(read_json(path), dtype)
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deeply", "Mend it by hand.") from error


def config_text(config: Mapping[str, Any], dtype: Dtype | None) -> bytes:
    """A `config.json` that states a number format; None leaves it as it is."""
    if dtype is not None:
        config = with_dtype(config, dtype)
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:  # half a character, which JSON can write and UTF-8 cannot
        return (json.dumps(config, indent=2) + "\n").encode("ascii")


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
    """What the user should know about the files beside the weights.

    Raises:
        CheckpointError: if `modules.json` makes no sense or leads astray.
    """
    inner = sorted(_module_files(folder))
    code = [*sorted(path.name for path in folder.glob("*.py")), *filter(_is_code, inner)]
    notes = []
    if code:
        notes.append(f"code of its own is not copied: {', '.join(code)}.")
    modules = sorted({name.rpartition("/")[0] for name in inner if _has_weights(name)})
    if modules:
        notes.append(f"the weights in {', '.join(modules)} are copied from one model, not merged.")
    return notes


def _has_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


def _is_code(name: str) -> bool:
    return name.endswith(".py")


def _is_ours(name: str) -> bool:
    """Whether a merge writes a file or folder of this name into the top of its output itself."""
    name = name.lower()  # some file systems see no difference
    return name in _OURS or any(fnmatch.fnmatchcase(name, pattern) for pattern in _OUR_WEIGHTS)


def _sidecars(source: Source) -> dict[str, Path]:
    """The files to copy: where they go within the output, and where they are.

    Raises:
        CheckpointError: if one leads out of the folder, or is the model's own weights.
    """
    folder = source.path
    if folder is None or not folder.is_dir():
        return {}
    try:
        top = sorted(path.name for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be looked into: {error.strerror}") from error
    names = [name for name in top if is_sidecar(name) and not _is_ours(name)]
    names += [*_files(folder, _TEMPLATES), *_module_files(folder)]
    sidecars = {name: inside(folder, name) for name in names if not _is_code(name)}
    weights = {file.path.resolve() for file in source.sources}
    for path in sidecars.values():
        if path.resolve() in weights:
            raise CheckpointError(
                f"{path} holds the model's own weights, which the merge replaces",
                f"Remove it, or what names it in {MODULES}.",
            )
    return sidecars


def _module_files(folder: Path) -> Iterator[str]:
    """The files of a sentence encoder's further modules: pooling, projections."""
    path = inside(folder, MODULES)
    if not path.is_file():
        return
    content = read_regular(path)
    try:
        modules = json.loads(content)
        names = [module["path"] for module in modules]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path} is no list of modules with paths: {error}") from error
    for name in names:
        if not isinstance(name, str):
            continue
        inner = inside(folder, name)
        place = PurePosixPath(name)
        # The model itself has the empty path, or "." or a link to its folder.
        if not place.parts or inner.resolve() == folder.resolve():
            continue
        if _is_ours(place.parts[0]):
            raise CheckpointError(
                f"{path} names the module {name!r}, in the place of what a merge writes itself",
                "Give the module's folder another name, there and in the list.",
            )
        yield from _files(folder, str(place))


def _files(folder: Path, subfolder: str) -> Iterator[str]:
    inner = inside(folder, subfolder)
    try:
        if inner.is_dir():
            yield from sorted(
                f"{subfolder}/{path.name}" for path in inner.iterdir() if path.is_file()
            )
    except OSError as error:
        raise CheckpointError(f"{inner} cannot be looked into: {error.strerror}") from error
