"""Gradient noise on problems whose noise is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from isthmus.errors import TrainingError
from isthmus.optim.gradient_noise import GradientNoise
from isthmus.optim.ratio_interval import mean_interval, ratio_interval

# The loss of an example e is ½(x − e)ᵀH(x − e), e normal around 0: G = Hx and Σ = HSH.
HESSIAN = torch.linspace(0.5, 2, 12, dtype=torch.float64)
SPREAD = torch.linspace(1.5, 0.5, 12, dtype=torch.float64)
POINT = torch.linspace(-0.6, 0.7, 12, dtype=torch.float64)
TRACE = float((HESSIAN**2 * SPREAD**2).sum())
SQUARED = float((HESSIAN * POINT).square().sum())


def micro_batches(count, size, seed):
    """Mean gradients of micro-batches, shape [count, 12]."""
    draw = torch.Generator().manual_seed(seed)
    examples = SPREAD * torch.randn(count, size, 12, generator=draw, dtype=torch.float64)
    return (HESSIAN * (POINT - examples)).mean(dim=1)


def measured(rows, size, **options):
    noise = GradientNoise(size, **options)
    for row in rows:
        noise.add({"a": row[:5], "b": row[5:]})
    return noise


def test_the_pair_is_mccandlishs():
    rows = micro_batches(8, 3, seed=0)
    found = measured(rows, 3, block=4).estimate()
    traces, norms = [], []
    for block in rows.split(4):
        small, big = float(block.square().sum(1).mean()), float(block.mean(0).square().sum())
        norms.append((12 * big - 3 * small) / (12 - 3))
        traces.append((small - big) / (1 / 3 - 1 / 12))
    assert found.trace == pytest.approx(sum(traces) / 2)
    assert found.squared_norm == pytest.approx(sum(norms) / 2)
    assert found.scale == pytest.approx(sum(traces) / sum(norms))
    assert found.blocks == 2


@pytest.fixture(scope="module")
def trials():
    return [measured(micro_batches(48, 2, seed), 2, block=4).estimate() for seed in range(500)]


def test_unbiased_where_the_truth_is_known(trials):
    # Beside the truth what a biased estimate would miss it by: variances divided by k, not k − 1; the raw
    # ‖ḡ‖² of a block of 4 times 2 examples.
    for name, truth, bias in (("trace", TRACE, TRACE / 4), ("squared_norm", SQUARED, TRACE / 8)):
        values = np.array([getattr(trial, name) for trial in trials])
        error = values.std(ddof=1) / math.sqrt(len(values))
        assert abs(values.mean() - truth) < 3.5 * error < bias / 4


@pytest.mark.parametrize(
    ("name", "truth"),
    [("trace", TRACE), ("squared_norm", SQUARED), ("scale", TRACE / SQUARED)],
)
def test_intervals_cover_the_truth_in_95_of_100_trials(trials, name, truth):
    intervals = [getattr(trial, f"{name}_interval") for trial in trials]
    covered = sum(low <= truth <= high for low, high in intervals) / len(intervals)
    assert 0.92 <= covered <= 0.98


def test_a_higher_level_is_a_wider_interval():
    noise = measured(micro_batches(48, 2, 0), 2)
    narrow, wide = noise.estimate(level=0.8).scale_interval, noise.estimate().scale_interval
    assert wide[0] < narrow[0] < narrow[1] < wide[1]


def test_where_noise_hides_the_gradient_the_interval_has_no_end():
    draw = torch.Generator().manual_seed(0)
    noise = measured(torch.randn(40, 12, generator=draw, dtype=torch.float64), 1)
    low, high = noise.estimate().scale_interval
    assert high == math.inf
    assert 0 < low < math.inf


def test_parameters_add_up():
    noise = measured(micro_batches(16, 2, 0), 2)
    parts = [noise.estimate([name]) for name in ("a", "b")]
    assert noise.estimate().trace == pytest.approx(sum(part.trace for part in parts))
    assert noise.estimate().squared_norm == pytest.approx(sum(p.squared_norm for p in parts))


def test_an_unfinished_block_does_not_count():
    rows = micro_batches(11, 2, 0)
    assert measured(rows, 2).estimate() == measured(rows[:8], 2).estimate()


def test_no_digits_cancel():
    """Noise a millionth of the gradient, in float32."""
    draw = torch.Generator().manual_seed(0)
    deviations = torch.randn(40, 12, generator=draw, dtype=torch.float64)
    exact = measured(1.0 + 1e-3 * deviations, 1).estimate()
    single = measured((1.0 + 1e-3 * deviations).float(), 1).estimate()
    assert single.trace == pytest.approx(exact.trace, rel=1e-3)


def numbers_held(noise):
    held = 0
    for sums in noise._sums.values():
        held += sums.mean.numel()
        if sums.halves is not None:
            held += sum(mean.numel() for mean in sums.halves.means)
            held += sum(
                part.numel() for part in (sums.halves.squares, sums.halves.rows) if part is not None
            )
    return held


def test_memory_does_not_grow_with_micro_batches():
    rows = micro_batches(64, 1, 0)
    for options, copies in (({}, 1), ({"sign_version": True}, 4)):
        for count in (8, 64):
            assert numbers_held(measured(rows[:count], 1, **options)) == copies * 12
    noise = GradientNoise(1, matrices=["w"])
    for _ in range(10):
        noise.add({"w": torch.zeros(300, 20)})
    assert numbers_held(noise) == 3 * 6000 + 300 * 300


def test_sign_version_brackets_the_truth():
    noise = measured(micro_batches(64, 2, 3), 2, sign_version=True)
    found = noise.sign()
    deviations, gradient = float((HESSIAN * SPREAD).sum()), float((HESSIAN * POINT).abs().sum())
    assert found.noise == pytest.approx(deviations, rel=0.05)
    assert found.gradient[0] < gradient < found.gradient[1]
    assert found.scale[0] < deviations**2 / gradient**2 < found.scale[1]


def test_sign_version_is_below_and_above_in_expectation():
    truth = float((HESSIAN * POINT).abs().sum())
    found = [measured(micro_batches(8, 1, s), 1, sign_version=True).sign() for s in range(300)]
    deviations = np.array([one.noise for one in found])
    expected = float((HESSIAN * SPREAD).sum())
    error = deviations.std(ddof=1) / math.sqrt(300)
    assert abs(deviations.mean() - expected) < 3.5 * error
    assert error < 0.01 * expected  # without the correction it would be 4% low
    lower, upper = np.array([one.gradient for one in found]).mean(axis=0)
    assert 0.5 * truth < lower < truth < upper < 2 * truth


ROWS = torch.linspace(0.2, 1.5, 6, dtype=torch.float64)


def matrices(count, scale, seed=0):
    """Gradients G + D·N with D diagonal and N standard normal, [6, 4]: C = 4·D²."""
    draw = torch.Generator().manual_seed(seed)
    mean = torch.randn(6, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    noise = torch.randn(count, 6, 4, generator=draw, dtype=torch.float64)
    return mean, mean + scale * ROWS.unsqueeze(1) * noise


def test_spectral_version_finds_the_truth():
    mean, gradients = matrices(200, 1.0)
    noise, turned = (
        GradientNoise(1, matrices=["w"]),
        GradientNoise(1, matrices=["w"], transposed=["w"]),
    )
    for gradient in gradients:
        noise.add({"w": gradient, "other": gradient[0]})
        turned.add({"w": gradient.mT.contiguous(), "other": gradient[0]})
    found = noise.spectral()
    covariance = torch.stack([(g - mean) @ (g - mean).mT for g in gradients]).mean(0)
    reference = float(torch.linalg.eigvalsh(covariance).sqrt().sum())
    assert found.noise == pytest.approx(reference, rel=0.01)
    assert found.noise == pytest.approx(float(2 * ROWS.sum()), rel=0.05)
    assert found.gradient == pytest.approx(
        [float(torch.linalg.matrix_norm(mean, "nuc"))] * 2, rel=0.1
    )
    assert turned.spectral().noise == pytest.approx(found.noise)
    assert turned.spectral().gradient == pytest.approx(found.gradient)


def test_spectral_version_is_below_and_above_in_expectation():
    found = []
    for seed in range(100):
        mean, gradients = matrices(12, 2.0, seed)
        noise = GradientNoise(1, matrices=["w"])
        for gradient in gradients:
            noise.add({"w": gradient})
        found.append(noise.spectral().gradient)
    truth = float(torch.linalg.matrix_norm(mean, "nuc"))
    lower, upper = np.array(found).mean(axis=0)
    assert 0.5 * truth < lower < 0.99 * truth
    assert 1.01 * truth < upper < 2 * truth


def test_noise_without_gradient_has_no_finite_upper_scale():
    _, gradients = matrices(6, 1.0)
    noise = GradientNoise(1, sign_version=True, matrices=["w"])
    for number, gradient in enumerate(gradients):
        # The halves disagree in every sign.
        noise.add({"w": gradient.abs() * (-1) ** number})
    assert noise.sign().scale[1] == math.inf
    assert noise.spectral().scale[1] == math.inf


def test_ratio_interval_solves_fiellers_inequality():
    draw = np.random.default_rng(0)
    from scipy.stats import t

    for mean in (3.0, 0.4, 0.0):
        tops, bottoms = draw.normal(5, 1, 12), draw.normal(mean, 1, 12)
        low, high = ratio_interval(tops, bottoms, 0.95)
        for ratio in np.linspace(0.01, 60, 4000):
            rest = tops - ratio * bottoms
            statistic = abs(rest.mean()) / (rest.std(ddof=1) / math.sqrt(12))
            inside = statistic <= t.ppf(0.975, 11)
            assert inside == (low <= ratio <= high) or bottoms.mean() <= 0
    assert ratio_interval([5.0, 6.0, 5.5], [-3.0, -3.1, -2.9], 0.95) == (0.0, math.inf)


def test_mean_interval_is_scipys():
    from scipy.stats import ttest_1samp

    values = [1.0, 2.5, 2.0, 4.0]
    expected = ttest_1samp(values, 0).confidence_interval(0.9)
    assert mean_interval(values, 0.9) == pytest.approx((expected.low, expected.high))


def test_too_few():
    rows = micro_batches(8, 1, 0)
    with pytest.raises(TrainingError, match="1 micro-batches make 0 blocks"):
        measured(rows[:1], 1).estimate()
    with pytest.raises(TrainingError, match="7 micro-batches make 1 blocks of 4"):
        measured(rows[:7], 1).estimate()
    with pytest.raises(TrainingError, match="too few for two halves"):
        measured(rows[:3], 1, sign_version=True).sign()
    with pytest.raises(TrainingError, match="a micro-batch has 0 examples"):
        GradientNoise(0)
    with pytest.raises(TrainingError, match="block of 1"):
        GradientNoise(1, block=1)


def test_bad_input():
    rows = micro_batches(8, 1, 0)
    noise = measured(rows, 1)
    with pytest.raises(TrainingError, match="having or lacking b"):
        noise.add({"a": rows[0, :5]})
    with pytest.raises(TrainingError, match="gradient of a in micro-batch 8"):
        noise.add({"a": rows[0, :5] / 0, "b": rows[0, 5:]})
    with pytest.raises(TrainingError, match="another shape"):
        noise.add({"a": rows[0, :4], "b": rows[0, 5:]})
    with pytest.raises(TrainingError, match="level is 1"):
        noise.estimate(level=1)
    with pytest.raises(TrainingError, match="no gradient of c"):
        noise.estimate(["c"])
    with pytest.raises(TrainingError, match="not asked for"):
        noise.sign()
    with pytest.raises(TrainingError, match="not asked for of a"):
        noise.spectral(["a"])
    with pytest.raises(TrainingError, match="no gradient of c"):
        GradientNoise(1, matrices=["c"]).add({"a": rows[0]})
