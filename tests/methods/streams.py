"""Streams over arrays in memory, and float64 references written straight from the papers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.methods.method import Chunk, Method, Settings
from isthmus.methods.parameters import Scope


@dataclass
class ArrayStream:
    """One tensor of every model, held in memory."""

    experts: np.ndarray
    base: np.ndarray | None
    chunk: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.experts.shape[1:]

    @property
    def itemsize(self) -> int:
        return self.experts.dtype.itemsize

    def __iter__(self) -> Iterator[Chunk]:
        flat = self.experts.reshape(len(self.experts), -1)
        for start in range(0, flat.shape[1], self.chunk):
            stop = start + self.chunk
            base = None if self.base is None else self.base.reshape(-1)[start:stop].copy()
            yield Chunk(start, flat[:, start:stop].copy(), base)


def settings(method: Method, count: int, seeds: tuple[int, ...] = (), **values: Any) -> Settings:
    """Settings with the method's defaults; a tuple gives one value for each expert."""
    shared, per_expert = {}, {}
    for parameter in method.parameters:
        value = values.pop(parameter.name, parameter.default)
        if parameter.scope is Scope.GLOBAL:
            shared[parameter.name] = value
        else:
            per_expert[parameter.name] = value if isinstance(value, tuple) else (value,) * count
    assert not values, f"{method.name} has no {sorted(values)}"
    return Settings(shared, per_expert, seeds or tuple(range(7, 7 + count)))


def run(
    method: Method,
    experts: np.ndarray,
    base: np.ndarray | None = None,
    chunk: int = 64,
    seeds: tuple[int, ...] = (),
    **values: Any,
) -> np.ndarray:
    """Merge in chunks."""
    stream = ArrayStream(experts, base, chunk)
    combine = method.prepare(stream, settings(method, len(experts), seeds, **values))
    parts = [np.array(combine(piece)) for piece in stream]
    flat = np.concatenate(parts) if parts else np.empty(0, experts.dtype)
    return flat.reshape(experts.shape[1:])
