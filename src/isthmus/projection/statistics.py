"""What a linear layer's projection needs of the calibration inputs: sums of outer products, streamed.

A layer is y = Wx with W of shape [m, n]. A bias is a last column of W and a constant 1 at the end of x:
`with_constant` appends it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.linalg.blas import dsyrk
from torch import Tensor

from isthmus.errors import MethodError

_WIDE = 1024
"""Inputs from whose size on half of the product is clearly faster (benchmarks/calibration.py)."""

_TILE = 256


def with_constant(x: Tensor) -> Tensor:
    """Inputs [..., n] with a last entry 1, shape [..., n + 1]: the input of a layer's bias."""
    return torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)


class InputMoments:
    """C = Σ w xxᵀ over the inputs of one task, accumulated in float64.

    Args:
        gram: C so far, shape [n, n], symmetric; `add` changes it.
        count: How many inputs were added, those of weight 0 left out.
    """

    def __init__(self, gram: Tensor, count: int = 0) -> None:
        self._gram = gram
        self.count = count
        self._half = False

    @classmethod
    def empty(cls, n: int, device: torch.device | str = "cpu") -> InputMoments:
        """Of no inputs yet."""
        return cls(torch.zeros(n, n, dtype=torch.float64, device=device))

    @property
    def gram(self) -> Tensor:
        """C, shape [n, n]."""
        if self._half:
            _mirror(self._gram)
            self._half = False
        return self._gram

    def add(self, x: Tensor, weights: Tensor | None = None) -> None:
        """Add a chunk of inputs.

        Args:
            x: Shape [..., n], any floating type.
            weights: Shape [...], non-negative; 0 leaves an input out, as for padding. All 1 if None.

        Raises:
            MethodError: The wrong shape, NaN or infinity, negative weights.
        """
        rows, scale = _chunk(x, len(self._gram), "inputs", weights)
        if scale is not None:
            rows = rows * scale
        if len(rows) and _worth_halving(self._gram):
            _add_upper(self._gram, rows)
            self._half = True
        else:
            self._gram.addmm_(rows.mT, rows)
        self.count += len(rows) if scale is None else int((scale > 0).sum())

    def without_constant(self) -> InputMoments:
        """Of inputs `with_constant`, those without it, for a layer that has no bias; shares memory."""
        return InputMoments(self.gram[:-1, :-1], self.count)


@dataclass(eq=False)
class TargetMoments:
    """Σ w xxᵀ, Σ w yxᵀ and Σ w y² of inputs x and the outputs y that the layer should have.

    The targets are free: an expert's output at its own inputs, say, while x comes from the layers that are
    merged already.

    Attributes:
        gram: Σ w xxᵀ, shape [n, n].
        cross: Σ w yxᵀ, shape [m, n].
        squares: Σ w y², shape [m]; or Σ w yyᵀ, shape [m, m], where it was asked for.
        count: How many pairs were added, those of weight 0 left out.
    """

    gram: Tensor
    cross: Tensor
    squares: Tensor
    count: int = 0

    @classmethod
    def empty(
        cls, m: int, n: int, *, outer: bool = False, device: torch.device | str = "cpu"
    ) -> TargetMoments:
        """Of no pairs yet; `outer` keeps Σ w yyᵀ, for the optimal directions."""
        kwargs = {"dtype": torch.float64, "device": device}
        squares = torch.zeros((m, m) if outer else (m,), **kwargs)  # type: ignore[call-overload]
        return cls(
            torch.zeros(n, n, **kwargs),  # type: ignore[call-overload]
            torch.zeros(m, n, **kwargs),  # type: ignore[call-overload]
            squares,
        )

    def add(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> None:
        """Add a chunk of pairs.

        Args:
            x: Shape [..., n], any floating type.
            y: Shape [..., m], any floating type.
            weights: Shape [...], non-negative. All 1 if None.

        Raises:
            MethodError: Shapes that do not fit, NaN or infinity, negative weights.
        """
        inputs, scale = _chunk(x, self.gram.shape[0], "inputs", weights)
        outputs, _ = _chunk(y, self.cross.shape[0], "targets", None)
        if len(inputs) != len(outputs):
            raise MethodError(
                f"calibration: {len(inputs)} inputs and {len(outputs)} targets",
                "give one target for each input",
            )
        if scale is not None:
            inputs, outputs = inputs * scale, outputs * scale
        self.gram.addmm_(inputs.mT, inputs)
        self.cross.addmm_(outputs.mT, inputs)
        if self.squares.ndim == 2:
            self.squares.addmm_(outputs.mT, outputs)
        else:
            self.squares += outputs.square().sum(dim=0)
        self.count += len(inputs) if scale is None else int((scale > 0).sum())


def _worth_halving(gram: Tensor) -> bool:
    """Whether `_add_upper` can be used, and takes less time than the whole product."""
    return len(gram) >= _WIDE and gram.device.type == "cpu" and gram.is_contiguous()


def _add_upper(gram: Tensor, rows: Tensor) -> None:
    """Add rowsᵀ rows to the upper triangle alone, in half of the operations."""
    # BLAS counts by columns: what is the lower triangle to it is the upper one here.
    dsyrk(1.0, rows.contiguous().numpy().T, 1.0, gram.numpy().T, lower=1, overwrite_c=1)


def _mirror(gram: Tensor) -> None:
    """Copy the upper triangle into the lower one, by tiles that fit in the cache."""
    n = len(gram)
    for start in range(0, n, _TILE):
        stop = min(start + _TILE, n)
        gram[stop:, start:stop] = gram[start:stop, stop:].mT
        corner = gram[start:stop, start:stop]
        corner.copy_(corner.triu() + corner.triu(1).mT)


def _chunk(x: Tensor, size: int, name: str, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The vectors as rows in float64, and the roots of their weights as a column."""
    if x.ndim < 1 or x.shape[-1] != size:
        raise MethodError(
            f"calibration: {name} of shape {list(x.shape)}, expected [..., {size}]",
            "give the vectors that enter or leave this layer",
        )
    rows = x.reshape(-1, size).to(torch.float64)
    if not torch.isfinite(rows).all():
        raise MethodError(
            f"calibration: NaN or infinity among the {name}",
            "leave these examples out, or run the model in higher precision",
        )
    if weights is None:
        return rows, None
    column = weights.reshape(-1, 1).to(torch.float64)
    if len(column) != len(rows) or not (column >= 0).all() or not torch.isfinite(column).all():
        raise MethodError(
            f"calibration: weights of shape {list(weights.shape)} for {name} of shape "
            f"{list(x.shape)}",
            "give one finite, non-negative weight for each vector",
        )
    return rows, column.sqrt()
