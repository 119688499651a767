"""Singular values of weight matrices, at one model and along a path."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.errors import PathError
from isthmus.paths.mixing import wide
from isthmus.paths.path import Path

HEAD = 0.1
"""The share of the singular values that counts as the head of a spectrum; the others are its tail."""


@dataclass(frozen=True)
class Spectrum:
    """What the singular values σ₁ ≥ … ≥ σ_n of one matrix say.

    Attributes:
        singular_values: Shape [n].
        stable_rank: ‖W‖_F² / ‖W‖₂², between 1 and n.
        effective_rank: exp of the entropy of σ / Σσ (Roy and Vetterli 2007), between 1 and n.
        tail_mass: The share of ‖W‖_F² in all singular values but the largest ⌈n · HEAD⌉.
        operator_norm: ‖W‖₂ = σ₁.
        frobenius_norm: ‖W‖_F.
        max_norm: max |W_ij|.

    Ranks and shares of a zero matrix are 0.
    """

    singular_values: Tensor
    stable_rank: float
    effective_rank: float
    tail_mass: float
    operator_norm: float
    frobenius_norm: float
    max_norm: float


def spectrum(w: Tensor) -> Spectrum:
    """The spectrum of a matrix, in float32 at least.

    Args:
        w: Shape [m, ...]; what follows the first dimension, as in a convolution, becomes columns.

    Raises:
        PathError: Fewer than two dimensions, no entries, NaN or infinity.
    """
    if w.ndim < 2 or w.numel() == 0:
        raise PathError(
            f"A tensor of shape {list(w.shape)} has no singular values",
            "Name matrices and convolutions only.",
        )
    matrix = wide(w.detach()).flatten(1)
    if not matrix.isfinite().all():
        raise PathError("A matrix holds NaN or infinity", "Leave this model out, or repair it.")
    sigma = torch.linalg.svdvals(matrix)
    s = sigma.double()
    largest, total, energy = float(s[0]), float(s.sum()), float(s.square().sum())
    head = math.ceil(HEAD * len(s))
    if largest == 0:
        return Spectrum(sigma, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    return Spectrum(
        sigma,
        stable_rank=energy / largest**2,
        effective_rank=math.exp(float(torch.special.entr(s / total).sum())),
        tail_mass=float(s[head:].square().sum()) / energy,
        operator_norm=largest,
        frobenius_norm=math.sqrt(energy),
        max_norm=float(matrix.abs().max()),
    )


@dataclass(frozen=True)
class Spectra:
    """Spectra of some matrices along a path.

    Attributes:
        ts: Where on the path.
        by_name: For every matrix its spectrum at every t.
        decay: The weight decay λ for `saturation`, if there is one.
    """

    ts: tuple[float, ...]
    by_name: Mapping[str, tuple[Spectrum, ...]]
    decay: float | None = None

    def singular_values(self, name: str) -> Tensor:
        """Of one matrix, shape [T, n], falling along n."""
        return torch.stack([one.singular_values for one in self.by_name[name]])

    def series(self, figure: str, name: str | None = None) -> list[float]:
        """One figure of `Spectrum` at every t: of one matrix, or its mean over all of them."""
        chosen = self.by_name.values() if name is None else (self.by_name[name],)
        return [
            sum(getattr(one, figure) for one in at) / len(chosen)
            for at in zip(*chosen, strict=True)
        ]

    def saturation(self, name: str, norm: str = "operator_norm") -> list[float]:
        """λ‖W‖ at every t: 1 where a matrix fills the ball into which weight decay draws it.

        That ball is the operator norm's for Muon and the max norm's for AdamW and Lion, at an update
        of size 1 (Chen et al. 2023, arXiv 2310.05898).

        Args:
            name: The matrix.
            norm: "operator_norm", "max_norm" or "frobenius_norm".

        Raises:
            PathError: The weight decay was not given.
        """
        if self.decay is None:
            raise PathError(
                "Saturation is λ‖W‖, and λ is not known", "Give decay=, the weight decay."
            )
        return [self.decay * value for value in self.series(norm, name)]

    def histogram(self, name: str, bins: int = 40) -> tuple[Tensor, Tensor]:
        """The distribution of one matrix's singular values at every t, for a ridge figure.

        Args:
            name: The matrix.
            bins: How many, of equal width from 0 to the largest singular value along the path.

        Returns:
            Edges, shape [bins + 1], the same for all t; densities, shape [T, bins], each of integral 1.
        """
        values = self.singular_values(name).double().cpu()
        largest = float(values.max()) or 1.0
        edges = torch.linspace(0, largest, bins + 1, dtype=torch.float64)
        densities = [torch.histogram(row, edges, density=True).hist for row in values]
        return edges, torch.stack(densities)


def spectra_along(
    path: Path,
    ts: Sequence[float],
    names: Iterable[str] | None = None,
    *,
    decay: float | None = None,
) -> Spectra:
    """Spectra along a path, one matrix in memory at a time.

    Args:
        path: Where the models lie.
        ts: Where on it, at least one.
        names: Which tensors; every one with two dimensions or more if None.
        decay: The weight decay λ with which the ends were trained.

    Raises:
        PathError: No t, no matrix, an unknown name, or a tensor that is no matrix or not finite.
    """
    if names is None:
        first = path.points[0]
        names = [name for name in first if _is_matrix(first[name])]
    chosen = list(names)
    if not chosen or not ts:
        raise PathError("No matrix or no t was named", "Name one matrix and one t at least.")
    found: dict[str, tuple[Spectrum, ...]] = {}
    for name in chosen:
        try:
            found[name] = tuple(spectrum(path.tensor(t, name)) for t in ts)
        except PathError as error:
            raise PathError(f"{name!r}: {error.problem}", error.cure) from error
    return Spectra(tuple(ts), found, decay)


def _is_matrix(tensor: Tensor) -> bool:
    return tensor.ndim > 1 and tensor.is_floating_point()
