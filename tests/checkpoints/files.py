"""Writing small checkpoints by hand, good ones and bad ones."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.checkpoints import Checkpoint


def raw_safetensors(
    path: Path, header: Any, data: bytes = b"", *, length: int | None = None
) -> Path:
    """A file with any header at all: a text, bytes, or what is dumped as JSON."""
    if isinstance(header, str):
        header = header.encode()
    elif not isinstance(header, bytes):
        header = json.dumps(header).encode()
    size = len(header) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + header + data)
    return path


def save(path: Path, tensors: dict[str, np.ndarray], **more: Any) -> Path:
    """A file by the safetensors library, folders made."""
    from safetensors.numpy import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, **more)
    return path


def numbers(checkpoint: Checkpoint, name: str, dtype: Any = np.float32) -> np.ndarray:
    """A whole tensor, decoded."""
    info = checkpoint.tensors[name]
    out = np.full(info.numel, 7, dtype)
    checkpoint.read(name, 0, out)
    return out.reshape(info.shape)


def packaged(package: str, *parts: str) -> Path:
    """A file of a package that carries a real model, without importing the package."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]).joinpath(*parts)
