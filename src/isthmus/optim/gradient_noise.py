"""How noisy gradients are: unbiased estimates from micro-batches, one after the other."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isthmus.errors import TrainingError
from isthmus.optim.gradient_maps import matrix_blocks, polar_factor, sign
from isthmus.optim.ratio_interval import Interval, mean_interval, ratio_interval


@dataclass(frozen=True)
class NoiseEstimate:
    """Gradients against their noise in the Euclidean norm, Σ being the covariance of one example's gradient.

    Attributes:
        trace: trΣ, unbiased.
        squared_norm: ‖G‖² of the mean gradient G, unbiased; chance may make it negative.
        scale: trΣ/‖G‖², the simple noise scale, in examples: the batch size at which noise and signal are
            equal. It is a ratio of averages and consistent; infinite where ‖G‖² came out negative.
        trace_interval: Student's over blocks.
        squared_norm_interval: The same.
        scale_interval: Fieller's over blocks; without an upper end where ‖G‖² is not told from 0.
        blocks: How many independent pairs there are.
    """

    trace: float
    squared_norm: float
    scale: float
    trace_interval: Interval
    squared_norm_interval: Interval
    scale_interval: Interval
    blocks: int


@dataclass(frozen=True)
class NormNoise:
    """The same in another norm, where a gradient's norm has no unbiased estimate but one from either side.

    Attributes:
        noise: Of one example: ‖σ‖₁, or the sum of ‖C^½‖_* over the matrices.
        gradient: Lower and upper estimate of ‖G‖: below and above it in expectation.
        scale: noise²/‖G‖² at both, in examples, the lower end first; infinite where noise hides G.
    """

    noise: float
    gradient: tuple[float, float]
    scale: tuple[float, float]


@dataclass(eq=False)
class _Halves:
    """Means of the even and the odd micro-batches, and the scatter around them."""

    means: tuple[Tensor, Tensor]
    squares: Tensor | None
    rows: Tensor | None


@dataclass(eq=False)
class _Sums:
    """Of one parameter."""

    mean: Tensor
    scatter: float = 0.0
    traces: list[float] = field(default_factory=list)
    squared_norms: list[float] = field(default_factory=list)
    halves: _Halves | None = None


class GradientNoise:
    """Takes the gradients of micro-batches and keeps sums.

    Every run of `block` micro-batches is a large batch, and they are its small ones. With ḡ the mean over
    the k of a block, b examples each, and s² = Σ‖g_j − ḡ‖²/(k − 1),

        trΣ ≈ b·s²,   ‖G‖² ≈ ‖ḡ‖² − s²/k,

    which is the unbiased pair of McCandlish et al. 2018 (arXiv 1812.06162, appendix A.1) with B_small = b
    and B_big = kb, written so that no digits cancel. Blocks are independent: averages over them come with
    intervals. Larger blocks tell ‖G‖² better where noise prevails, more of them make the interval surer:
    keep at least ten.

    In the ℓ₁ norm (`sign`) and the nuclear norm (`spectral`) the scales are ‖σ‖₁²/‖G‖₁², with σ_i² the
    variance of a coordinate, and ‖C^½‖_*²/‖G‖_*², with C = E (G_1 − G)(G_1 − G)ᵀ for one example's gradient
    G_1 of a matrix with its outputs as rows (arXiv 2602.03001). For a norm with gradient map P, and means
    ḡ₀, ḡ₁ over the even and odd micro-batches, E⟨P(ḡ₀), ḡ₁⟩ ≤ ‖G‖ ≤ E‖ḡ‖, by duality and by convexity.
    They have no confidence interval.

    Memory: one copy of the parameters, three more for the sign version, two more and [rows, rows] for each
    matrix of the spectral one.

    Args:
        micro_batch: b, the examples whose mean gradient one call of `add` gets. They must be drawn
            independently of those of other calls: no sorting by length or class.
        block: k, at least 2.
        sign_version: Keep what `sign` needs.
        matrices: The parameters to keep what `spectral` needs of; convolutions are flattened.
        transposed: Those of them with inputs first, as in transformers' Conv1D.

    Raises:
        TrainingError: no examples, a block of fewer than two.
    """

    def __init__(
        self,
        micro_batch: int,
        *,
        block: int = 4,
        sign_version: bool = False,
        matrices: Collection[str] = (),
        transposed: Collection[str] = (),
    ) -> None:
        if micro_batch < 1:
            raise TrainingError(
                f"a micro-batch has {micro_batch} examples", "it needs one at least"
            )
        if block < 2:
            raise TrainingError(
                f"a block of {block} micro-batches has no variance", "take 2 or more"
            )
        self._examples = micro_batch
        self._block = block
        self._sign = sign_version
        self._matrices = frozenset(matrices)
        self._transposed = frozenset(transposed)
        self._sums: dict[str, _Sums] = {}
        self.count = 0
        """Micro-batches so far."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that were measured, in the order of the gradients; none before the first."""
        return tuple(self._sums)

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Take the mean gradient over one micro-batch.

        Args:
            gradients: By parameter; the same parameters and shapes every time.

        Raises:
            TrainingError: other parameters than before, NaN or infinity.
        """
        if self.count == 0:
            self._begin(gradients)
        if gradients.keys() != self._sums.keys():
            odd = next(iter(gradients.keys() ^ self._sums.keys()))
            raise TrainingError(
                f"micro-batch {self.count} differs from those before in having or lacking {odd}",
                "give the gradients of the same parameters every time, zeros where there is none",
            )
        number = self.count % self._block + 1
        for name, gradient in gradients.items():
            sums = self._sums[name]
            if gradient.shape != sums.mean.shape or not gradient.isfinite().all():
                raise TrainingError(
                    f"the gradient of {name} in micro-batch {self.count} holds NaN or infinity, or has "
                    "another shape than before",
                    "leave out the examples that do this, or compute in float32",
                )
            values = gradient.detach().to(sums.mean.dtype)
            before = values - sums.mean
            sums.mean.add_(before, alpha=1 / number)
            sums.scatter += _dot(before, values - sums.mean)
            if number == self._block:
                variance = sums.scatter / (number - 1)
                sums.traces.append(self._examples * variance)
                sums.squared_norms.append(_dot(sums.mean, sums.mean) - variance / number)
                sums.mean.zero_()
                sums.scatter = 0.0
            if sums.halves is not None:
                self._add_to_half(name, sums.halves, values)
        self.count += 1

    def estimate(self, names: Iterable[str] | None = None, *, level: float = 0.95) -> NoiseEstimate:
        """The Euclidean version. Micro-batches of an unfinished block do not count.

        Args:
            names: The parameters to take together; all if None.
            level: Of the intervals.

        Raises:
            TrainingError: fewer than two blocks, an unknown parameter, a level out of (0, 1).
        """
        if not 0 < level < 1:
            raise TrainingError(
                f"the level is {level}", "it must lie between 0 and 1, such as 0.95"
            )
        blocks = self.count // self._block
        if blocks < 2:
            raise TrainingError(
                f"{self.count} micro-batches make {blocks} blocks of {self._block}; an interval needs 2",
                "give more micro-batches, ten blocks for a good interval, or make them smaller",
            )
        chosen = self._chosen(names)
        traces = [math.fsum(row) for row in zip(*(one.traces for one in chosen), strict=True)]
        norms = [math.fsum(row) for row in zip(*(one.squared_norms for one in chosen), strict=True)]
        trace, squared_norm = math.fsum(traces) / blocks, math.fsum(norms) / blocks
        return NoiseEstimate(
            trace,
            squared_norm,
            trace / squared_norm if squared_norm > 0 else math.inf,
            mean_interval(traces, level),
            mean_interval(norms, level),
            ratio_interval(traces, norms, level),
            blocks,
        )

    def sign(self, names: Iterable[str] | None = None) -> NormNoise:
        """‖σ‖₁²/‖G‖₁², which tells for signSGD, Lion and Signum what `estimate` does for SGD.

        Standard deviations are corrected for the number of micro-batches as for normal gradients.

        Args:
            names: The parameters to take together; all if None.

        Raises:
            TrainingError: fewer than four micro-batches, an unknown parameter, `sign_version` not set.
        """
        self._require_four()
        degrees = self.count - 2
        # The mean of a sample's standard deviation, for a normal one of deviation 1 (c₄).
        shrunk = math.sqrt(2 / degrees) * math.exp(
            math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
        )
        noise, lower, upper = 0.0, 0.0, 0.0
        for sums in self._chosen(names):
            halves = sums.halves
            if halves is None or halves.squares is None:
                raise TrainingError(
                    "the sign version was not asked for",
                    "say GradientNoise(..., sign_version=True)",
                )
            deviations = (halves.squares * (self._examples / degrees)).sqrt()
            noise += float(deviations.sum(dtype=torch.float64)) / shrunk
            even, odd = halves.means
            lower += (_dot(sign(even), odd) + _dot(sign(odd), even)) / 2
            upper += float(self._mean(halves).abs().sum(dtype=torch.float64))
        return _norm_noise(noise, lower, upper)

    def spectral(self, names: Iterable[str] | None = None) -> NormNoise:
        """‖C^½‖_*²/‖G‖_*², which tells for Muon what `estimate` does for SGD.

        The estimate of ‖C^½‖_* is low where the micro-batches, times the columns, are not many more than the
        rows. Over several matrices norms are added: the dual of the largest operator norm.

        Args:
            names: The matrices to take together; all that were asked for if None.

        Raises:
            TrainingError: fewer than four micro-batches, a parameter that `matrices` did not name.
        """
        self._require_four()
        noise, lower, upper = 0.0, 0.0, 0.0
        for name in sorted(self._matrices) if names is None else names:
            (sums,) = self._chosen([name])
            halves = sums.halves
            if halves is None or halves.rows is None:
                raise TrainingError(
                    f"the spectral version was not asked for of {name}",
                    f"say GradientNoise(..., matrices=[{name!r}])",
                )
            covariance = halves.rows.double() * (self._examples / (self.count - 2))
            noise += float(torch.linalg.eigvalsh(covariance).clamp(min=0).sqrt().sum())
            even, odd, mean = (
                self._matrix(name, part) for part in (*halves.means, self._mean(halves))
            )
            lower += (_dot(polar_factor(even), odd) + _dot(polar_factor(odd), even)) / 2
            upper += float(torch.linalg.matrix_norm(mean, "nuc"))
        return _norm_noise(noise, lower, upper)

    def _begin(self, gradients: Mapping[str, Tensor]) -> None:
        for names in (self._matrices, self._transposed):
            unknown = sorted(names - gradients.keys())
            if unknown:
                raise TrainingError(
                    f"there is no gradient of {unknown[0]}",
                    f"known are {', '.join(list(gradients)[:5])} and so on",
                )
        for name, gradient in gradients.items():
            kept = torch.promote_types(gradient.dtype, torch.float32)
            sums = _Sums(torch.zeros_like(gradient, dtype=kept))
            if self._sign or name in self._matrices:
                rows = None
                if name in self._matrices:
                    size = len(self._matrix(name, gradient))
                    rows = sums.mean.new_zeros(size, size)
                sums.halves = _Halves(
                    (torch.zeros_like(sums.mean), torch.zeros_like(sums.mean)),
                    torch.zeros_like(sums.mean) if self._sign else None,
                    rows,
                )
            self._sums[name] = sums

    def _add_to_half(self, name: str, halves: _Halves, values: Tensor) -> None:
        mean = halves.means[self.count % 2]
        number = self.count // 2 + 1
        before = values - mean
        mean.add_(before, alpha=1 / number)
        if halves.squares is not None:
            halves.squares.addcmul_(before, values - mean)
        if halves.rows is not None:
            # values − mean is (1 − 1/number) of what it was before: the product stays symmetric.
            matrix = self._matrix(name, before)
            halves.rows.addmm_(matrix, matrix.mT, alpha=1 - 1 / number)

    def _mean(self, halves: _Halves) -> Tensor:
        evens, odds = (self.count + 1) // 2, self.count // 2
        return (evens * halves.means[0] + odds * halves.means[1]) / self.count

    def _matrix(self, name: str, values: Tensor) -> Tensor:
        (matrix,) = matrix_blocks(values, name in self._transposed)
        return matrix.flatten(1)

    def _chosen(self, names: Iterable[str] | None) -> list[_Sums]:
        wanted = list(self._sums if names is None else names)
        for name in wanted:
            if name not in self._sums:
                raise TrainingError(
                    f"there is no gradient of {name}",
                    f"known are {', '.join(list(self._sums)[:5])} and so on",
                )
        return [self._sums[name] for name in wanted]

    def _require_four(self) -> None:
        if self.count < 4:
            raise TrainingError(
                f"{self.count} micro-batches are too few for two halves", "give four at least"
            )


def _norm_noise(noise: float, lower: float, upper: float) -> NormNoise:
    lower = max(lower, 0.0)
    low, high = (
        noise**2 / gradient**2 if gradient > 0 else math.inf for gradient in (upper, lower)
    )
    return NormNoise(noise, (lower, upper), (low, high))


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum(dtype=torch.float64))
