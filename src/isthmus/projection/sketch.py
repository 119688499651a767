"""S = Σ bbᵀ in a small memory, where a layer or a network has too many outputs to hold m × m numbers.

Frequent Directions keeps ℓ rows B with 0 ⪯ S − BᵀB ⪯ δ (Ghashami, Liberty, Phillips and Woodruff 2016,
arXiv 1501.01711): deterministic, and δ is known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.errors import MethodError
from isthmus.projection.optimal import ErrorSpectrum


class FrequentDirections:
    """A sketch of S from a stream of residuals.

    Args:
        size: m, of a residual.
        rows: ℓ, how many directions are kept; 2ℓ rows of memory.

    Attributes:
        total: tr S, exactly.
        shrinkage: δ, by which eigenvalues of the sketch fall short of those of S at most.

    Raises:
        MethodError: A size or a number of rows below 1.
    """

    def __init__(self, size: int, rows: int, device: torch.device | str = "cpu") -> None:
        if size < 1 or rows < 1:
            raise MethodError(f"a sketch of {rows} rows of {size}", "give at least one of each")
        self.rows = rows
        self.total = 0.0
        self.shrinkage = 0.0
        self._kept = torch.zeros(0, size, dtype=torch.float64, device=device)

    def add(self, residuals: Tensor) -> None:
        """Add residuals.

        Args:
            residuals: b, shape [..., m], any floating type.

        Raises:
            MethodError: The wrong shape, NaN or infinity.
        """
        size = self._kept.shape[1]
        if residuals.ndim < 1 or residuals.shape[-1] != size:
            raise MethodError(
                f"residuals of shape {list(residuals.shape)}, expected [..., {size}]",
                "give differences of outputs of this layer",
            )
        chunk = residuals.reshape(-1, size).to(torch.float64)
        if not torch.isfinite(chunk).all():
            raise MethodError("NaN or infinity among the residuals", "leave these examples out")
        self.total += float(chunk.square().sum())
        # Blocks of ℓ rows: a decomposition serves many examples.
        for start in range(0, len(chunk), self.rows):
            self._kept = torch.cat([self._kept, chunk[start : start + self.rows]])
            if len(self._kept) > 2 * self.rows:
                self._shrink()

    def spectrum(self) -> ErrorSpectrum:
        """Eigenvalues from below, within `shrinkage` of those of S, and eigenvectors of the sketch."""
        _, roots, right = torch.linalg.svd(self._kept, full_matrices=False)
        return ErrorSpectrum(roots.square(), right.mT, self.total)

    def bounds(self, rank: int) -> tuple[float, float]:
        """What r output directions capture at the best: at least this share of tr S, at most that.

        The first is reached by the sketch's own leading directions.
        """
        lowest = self.spectrum().captured(rank)
        if not self.total > 0:
            return lowest, lowest
        return lowest, min(1.0, lowest + rank * self.shrinkage / self.total)

    def _shrink(self) -> None:
        _, roots, right = torch.linalg.svd(self._kept, full_matrices=False)
        energy = roots.square()
        lost = float(energy[self.rows]) if len(energy) > self.rows else 0.0
        left = (energy[: self.rows] - lost).clamp(min=0).sqrt()
        self._kept = left.unsqueeze(1) * right[: self.rows]
        self.shrinkage += lost
