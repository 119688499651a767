"""What holds for every method."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.methods.method import BaseUse, Method, Reach
from isthmus.methods.registry import METHODS

from .streams import run

SEVERAL = [m for m in METHODS.values() if m.max_experts is None]
WITH_BASE = [m for m in METHODS.values() if m.base is BaseUse.REQUIRED]
ENTRYWISE = [m for m in SEVERAL if m.reach is not Reach.MATRIX]
AVERAGING = [m for m in SEVERAL if any(p.name == "normalize" for p in m.parameters)]
ADDING = [m for m in SEVERAL if m.name != "geomerge" and not m.calibrated]
"""All but those that divide by the sum of the weights."""
KEEPING = [m for m in METHODS.values() if m.name not in {"iso_c", "iso_cts"}]
"""All but those that flatten the spectrum, of one expert too: see test_matrix.py."""


def by_name(method: Method) -> str:
    return method.name


def values(method: Method, weight=1.0, density=0.3) -> dict:
    """Parameters under which the method merges."""
    names = {parameter.name for parameter in method.parameters}
    known = {"weight": weight, "density": density, "t": 1.0}
    return {name: value for name, value in known.items() if name in names}


def merge(method: Method, experts: np.ndarray, base: np.ndarray, **changes) -> np.ndarray:
    return run(method, experts, base if method.base is BaseUse.REQUIRED else None, **changes)


@pytest.fixture
def tensors() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(5)
    base = draw.standard_normal((7, 19)).astype(np.float32)
    return base + 0.1 * draw.standard_normal((3, 7, 19)).astype(np.float32), base


@pytest.mark.parametrize("method", KEEPING, ids=by_name)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_expert_at_weight_one_comes_back(method, dtype, tensors):
    experts, base = (x.astype(dtype) for x in tensors)
    result = merge(method, experts[:1], base, **values(method, density=1.0))
    assert result.dtype == dtype
    # θ_0 + (θ_1 - θ_0) rounds twice.
    np.testing.assert_allclose(result, experts[0], rtol=0, atol=4 * np.finfo(dtype).eps)


@pytest.mark.parametrize("method", SEVERAL, ids=by_name)
@pytest.mark.parametrize("density", [1.0, 0.3])
def test_the_order_of_the_experts_does_not_matter(method, density, tensors):
    experts, base = tensors
    order = [2, 0, 1]
    weights, seeds = (0.2, 0.5, 0.9), (11, 12, 13)
    one = merge(
        method, experts, base, seeds=seeds, **values(method, weight=weights, density=density)
    )
    other = merge(
        method,
        experts[order],
        base,
        seeds=tuple(seeds[i] for i in order),
        **values(method, weight=tuple(weights[i] for i in order), density=density),
    )
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ENTRYWISE, ids=by_name)
def test_two_experts_commute_to_the_bit(method, tensors):
    experts, base = tensors
    one = merge(method, experts[:2], base, seeds=(1, 2), **values(method, weight=(0.3, 0.7)))
    other = merge(method, experts[1::-1], base, seeds=(2, 1), **values(method, weight=(0.7, 0.3)))
    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("method", AVERAGING, ids=by_name)
def test_equal_experts_give_that_expert(method, tensors):
    experts, base = tensors
    same = np.repeat(experts[:1], 3, axis=0)
    averaging = {} if method.name == "linear" else {"normalize": True}
    result = merge(method, same, base, **values(method, density=1.0), **averaging)
    np.testing.assert_allclose(result, experts[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", WITH_BASE, ids=by_name)
def test_experts_equal_to_the_base_give_the_base_exactly(method, tensors):
    _, base = tensors
    count = 1 if method.max_experts == 1 else 3
    result = merge(method, np.repeat(base[None], count, axis=0), base, **values(method))
    np.testing.assert_allclose(result, base, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", METHODS.values(), ids=by_name)
@pytest.mark.parametrize(
    "shape", [(), (1,), (0,), (3, 0), (2, 3)], ids=["scalar", "one", "empty", "no-columns", "2x3"]
)
@pytest.mark.parametrize("fill", [0.0, 1.0, -3.5])
def test_constant_small_and_empty_tensors_give_finite_numbers(method, shape, fill):
    count = 1 if method.max_experts == 1 else 3
    experts = np.full((count, *shape), fill, np.float32)
    base = np.full(shape, 0.5, np.float32)
    result = merge(method, experts, base, **values(method))
    assert result.shape == shape
    assert np.isfinite(result).all()


@pytest.mark.parametrize("method", METHODS.values(), ids=by_name)
@given(chunk=st.integers(1, 20).map(lambda n: 8 * n), size=st.integers(1, 150))
@settings(max_examples=25, deadline=None)
def test_chunks_do_not_change_the_bytes(method, chunk, size):
    """Reductions in float64 may differ in their last bit, which float32 does not show."""
    draw = np.random.default_rng(size)
    base = draw.standard_normal(size).astype(np.float32)
    count = 1 if method.max_experts == 1 else 3
    experts = base + draw.standard_normal((count, size)).astype(np.float32)
    whole = merge(method, experts, base, chunk=1 << 20, **values(method))
    parts = merge(method, experts, base, chunk=chunk, **values(method))
    np.testing.assert_allclose(parts, whole, rtol=2e-7, atol=1e-7)
    if method.name not in {"slerp", "dare_linear", "dare_ties"}:
        assert parts.tobytes() == whole.tobytes()


@pytest.mark.parametrize("method", METHODS.values(), ids=by_name)
def test_torch_gives_the_bytes_that_numpy_gives(method, tensors):
    import torch

    from isthmus.methods.method import Chunk

    from .streams import ArrayStream
    from .streams import settings as make_settings

    experts, base = tensors
    experts = experts[: method.max_experts]
    of_base = base if method.base is BaseUse.REQUIRED else None

    class TorchStream(ArrayStream):
        def __iter__(self):
            for chunk in super().__iter__():
                yield Chunk(
                    chunk.start,
                    torch.from_numpy(chunk.experts),
                    None if chunk.base is None else torch.from_numpy(chunk.base),
                )

    stream = TorchStream(experts, of_base, 64)
    chosen = make_settings(method, len(experts), **values(method))
    combine = method.prepare(stream, chosen)
    theirs = np.concatenate([combine(chunk).numpy() for chunk in stream]).reshape(base.shape)
    ours = merge(method, experts, base, **values(method))
    np.testing.assert_allclose(theirs, ours, rtol=2e-7, atol=1e-7)


@pytest.mark.parametrize("method", ADDING, ids=by_name)
def test_weights_scale_the_merged_task_vector(method, tensors):
    """Twice the weights, not normalised, is twice the sum."""
    experts, base = tensors
    zero = np.zeros_like(base)
    deltas = experts - base
    plain = {"normalize": False} if method in AVERAGING else {}
    once = merge(method, deltas, zero, **values(method, weight=0.25), **plain)
    twice = merge(method, deltas, zero, **values(method, weight=0.5), **plain)
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-6, atol=1e-7)
