"""What is known of an architecture: its spec, and the norms that a normal form absorbs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.symmetry.spec import Spec

Residual = Literal["auto", "none", "permutation", "signed", "orthogonal"]
"""Which group acts on the residual stream."""

RESIDUAL = "residual"
"""The axis of the residual stream."""


@dataclass(frozen=True)
class Reader:
    """A linear layer that reads a norm's output.

    Attributes:
        weight: Its matrix.
        bias: Its bias, which an absorbed β adds to; the network may have none.
        dimension: Which dimension of the matrix is its input.
        tied_to: The input embedding, if the matrix is that one and not stored apart.
    """

    weight: str
    bias: str
    dimension: int
    tied_to: str | None = None


@dataclass(frozen=True)
class Norm:
    """A norm between the residual stream and those that read it.

    Attributes:
        gain: The tensor γ.
        bias: The tensor β of a LayerNorm; None for RMSNorm.
        readers: All that read its output.
        plus_one: Whether the gain is 1 + γ, as in Gemma.
    """

    gain: str
    bias: str | None
    readers: tuple[Reader, ...]
    plus_one: bool = False


@dataclass(frozen=True)
class Architecture:
    """The symmetries of a network with a residual stream.

    Attributes:
        spec: Where which group acts. The stream is the axis ``residual``, if anything acts on it.
        norms: What `absorb_norms` absorbs.
        family: The model type of its configuration.
        residual: The group of the stream.
        fixed: Why the stream admits no orthogonal matrix even when norms are absorbed; empty if it does.
    """

    spec: Spec
    norms: tuple[Norm, ...]
    family: str
    residual: Residual
    fixed: str = ""
