"""Each method against its formula in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from isthmus.errors import MethodError
from isthmus.methods.deltas import DeltaChunk
from isthmus.methods.registry import METHODS, get_method
from isthmus.methods.slerp import slerp_coefficients
from isthmus.methods.sparsify import bernoulli

from . import references
from .streams import run
from .streams import settings as make_settings

weight = st.floats(-2, 2).filter(lambda w: abs(w) > 0.05)
density = st.floats(0.05, 1)


def tensors(seed: int, count: int, size: int = 101) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    base = draw.standard_normal(size).astype(np.float32)
    return base + draw.standard_normal((count, size)).astype(np.float32), base


@given(seed=st.integers(0, 99), weights=st.lists(weight, min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_linear(seed, weights):
    experts, _ = tensors(seed, len(weights))
    if abs(sum(weights)) > 0.1:
        result = run(METHODS["linear"], experts, weight=tuple(weights))
        np.testing.assert_allclose(result, references.linear(experts, weights), atol=1e-4)
    plain = run(METHODS["linear"], experts, weight=tuple(weights), normalize=False)
    np.testing.assert_allclose(plain, references.linear(experts, weights, False), atol=5e-6)


@pytest.mark.parametrize("name", ["task_arithmetic", "magnitude", "ties"])
@given(
    seed=st.integers(0, 99),
    models=st.lists(st.tuples(weight, density), min_size=1, max_size=5),
    scale=st.floats(-2, 2),
    normalize=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_task_vectors(name, seed, models, scale, normalize):
    weights, densities = (tuple(column) for column in zip(*models, strict=True))
    if normalize:
        weights = tuple(map(abs, weights))  # an entry whose divisor nearly cancels is anything
    experts, base = tensors(seed, len(models))
    expected = getattr(references, name)(experts, base, weights, densities, scale, normalize)
    result = run(
        METHODS[name],
        experts,
        base,
        weight=weights,
        density=densities,
        normalize=normalize,
        **{"lambda": scale},
    )
    np.testing.assert_allclose(result, expected, atol=2e-5)


def test_ties_elects_the_sign_by_total_weight():
    base = np.zeros(4, np.float32)
    experts = np.array([[1, -1, 1, 0], [-3, 2, 2, 0], [1, -0.5, 0, 0]], np.float32)
    mean = run(METHODS["ties"], experts, base, weight=1.0)
    total = run(METHODS["ties"], experts, base, weight=1.0, normalize=False)
    np.testing.assert_array_equal(mean, [-3, 2, 1.5, 0])
    np.testing.assert_array_equal(total, [-3, 2, 3, 0])


def test_trimming_keeps_all_entries_as_large_as_the_smallest_kept():
    experts = np.array([[1, 2, 2, 2, 3]], np.float32)
    result = run(METHODS["ties"], experts, np.zeros(5, np.float32), weight=1.0, density=0.4)
    np.testing.assert_array_equal(result, [0, 2, 2, 2, 3])


@given(seed=st.integers(0, 50), t=st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_slerp(seed, t):
    experts, base = tensors(seed, 1)
    result = run(METHODS["slerp"], experts, base, t=t)
    np.testing.assert_allclose(result, references.slerp(base, experts[0], t), atol=2e-5)


def test_slerp_ends_are_the_models_and_parallel_models_interpolate_linearly():
    experts, base = tensors(1, 1)
    np.testing.assert_allclose(run(METHODS["slerp"], experts, base, t=0.0), base, atol=1e-6)
    np.testing.assert_allclose(run(METHODS["slerp"], experts, base, t=1.0), experts[0], atol=1e-6)
    assert slerp_coefficients(0.99999, 0.25) == (0.75, 0.25)
    assert slerp_coefficients(-1.0, 0.25) == (0.75, 0.25)
    half = run(METHODS["slerp"], 3 * base[None], base, t=0.5)
    np.testing.assert_allclose(half, 2 * base, atol=1e-5)


def test_passthrough_copies_and_scales():
    experts, _ = tensors(2, 1)
    assert run(METHODS["passthrough"], experts).tobytes() == experts[0].tobytes()
    np.testing.assert_allclose(
        run(METHODS["passthrough"], experts, scale=0.5), 0.5 * experts[0], rtol=1e-7
    )


class Rows:
    """Task vectors in chunks."""

    def __init__(self, rows: np.ndarray, cuts: tuple[int, ...] = ()) -> None:
        self.size, self.itemsize = rows.shape[1], rows.dtype.itemsize
        self.parts = np.split(rows, cuts, axis=1)

    def __iter__(self):
        return (DeltaChunk(0, part.copy()) for part in self.parts)


@pytest.fixture(params=["radix", "sorting"])
def selection(request, monkeypatch):
    """Both ways to find the k-th largest, whatever the size."""
    from isthmus.methods import selection

    monkeypatch.setattr(selection, "SMALL", 0 if request.param == "radix" else 1 << 30)
    return selection.kth_largest_magnitudes


@given(
    rows=arrays(
        st.sampled_from([np.float32, np.float64]),
        st.tuples(st.integers(1, 3), st.integers(1, 80)),
        elements=st.floats(-(2.0**100), 2.0**100, width=32),
    ),
    data=st.data(),
)
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_selection_is_exact(selection, rows, data):
    ranks = [data.draw(st.integers(1, rows.shape[1])) for _ in rows]
    cut = data.draw(st.integers(0, rows.shape[1]))
    found = selection(Rows(rows, (cut,)), ranks)
    assert found == [references.kth_largest(r, k) for r, k in zip(rows, ranks, strict=True)]


def test_selection_on_many_equal_and_tiny_numbers(selection):
    tiny = np.float32(1e-42)  # subnormal
    values = np.concatenate([np.zeros(1000), np.full(500, 0.5), np.full(3, tiny)])
    rows = Rows(values.astype(np.float32)[None])
    assert selection(rows, [500]) == [0.5]
    assert selection(rows, [501]) == [float(tiny)]
    assert selection(rows, [504]) == [0.0]


@pytest.mark.parametrize("selection", ["radix"], indirect=True)
def test_counting_in_torch_is_counting_in_numpy(selection):
    import torch

    values = np.random.default_rng(0).standard_normal((2, 999))
    for dtype in (np.float32, np.float64):
        rows = values.astype(dtype)

        class TorchRows(Rows):
            def __iter__(self):
                return (DeltaChunk(0, torch.from_numpy(part.copy())) for part in self.parts)

        assert selection(TorchRows(rows), [10, 500]) == selection(Rows(rows), [10, 500])


def test_dare_keeps_the_share_it_is_told_and_the_expectation():
    """By 1/density the mean over seeds is the task vector; kept shares are binomial."""
    size, density, repeats = 400, 0.3, 400
    draw = np.random.default_rng(3)
    base = draw.standard_normal(size)
    expert = base + draw.standard_normal(size)
    results = np.stack(
        [
            run(
                METHODS["dare_linear"],
                expert[None],
                base,
                seeds=(seed,),
                weight=1.0,
                density=density,
                rescale_norm="density",
            )
            for seed in range(repeats)
        ]
    )
    kept = (results != base).mean()
    assert abs(kept - density) < 5 * np.sqrt(density * (1 - density) / size / repeats)
    error = results.mean(0) - expert
    spread = np.abs(expert - base) * np.sqrt((1 - density) / density / repeats)
    assert (np.abs(error) < 6 * spread).all()


@pytest.mark.parametrize("name", ["magnitude", "dare_linear", "dare_ties", "ties"])
def test_l1_rescaling_restores_the_norm(name):
    experts, base = tensors(4, 1, 500)
    result = run(METHODS[name], experts, base, weight=1.0, density=0.3, rescale=True)
    norm = np.abs(experts[0] - base).sum()
    np.testing.assert_allclose(np.abs(result - base).sum(), norm, rtol=1e-4)


@given(start=st.integers(0, 40), count=st.integers(0, 100), seed=st.integers(0, 2**128 - 1))
@settings(max_examples=50, deadline=None)
def test_draws_depend_on_the_place_alone(start, count, seed):
    whole = bernoulli(seed, 0, 8 * start + count, 0.5)
    part = bernoulli(seed, 8 * start, count, 0.5)
    np.testing.assert_array_equal(part, whole[8 * start :])


def test_experts_draw_independently():
    one, other = (bernoulli(seed, 0, 20_000, 0.5) for seed in (1, 2))
    assert abs((one == other).mean() - 0.5) < 0.02


@pytest.mark.parametrize("name", ["linear", "task_arithmetic", "magnitude", "dare_linear", "cat"])
def test_weights_that_sum_to_zero_cannot_be_normalised(name):
    method = METHODS[name]
    with pytest.raises(MethodError, match="sum to zero") as caught:
        method.check(make_settings(method, 2, weight=(1.0, -1.0), normalize=True))
    assert "normalize: false" in str(caught.value)
    method.check(make_settings(method, 2, weight=(1.0, -1.0), normalize=False))
    with pytest.raises(MethodError, match="sum to zero"):  # but for rounding
        method.check(make_settings(method, 3, weight=(0.1, 0.2, -0.3), normalize=True))


def test_an_unknown_method_suggests_the_nearest():
    with pytest.raises(MethodError, match="dare_ties"):
        get_method("dare_tis")


def test_defaults_are_mergekits():
    """The table of its registry: normalize, rescale, density, lambda."""
    defaults = {
        name: {parameter.name: parameter.default for parameter in METHODS[name].parameters}
        for name in ("task_arithmetic", "ties", "dare_linear", "dare_ties", "linear")
    }
    assert defaults["linear"]["normalize"] is True
    for name, normalize, rescale in [
        ("task_arithmetic", False, False),
        ("ties", True, False),
        ("dare_linear", False, True),
        ("dare_ties", False, True),
    ]:
        assert defaults[name]["normalize"] is normalize, name
        assert defaults[name]["rescale"] is rescale, name
        assert defaults[name]["density"] == 1
        assert defaults[name]["lambda"] == 1
