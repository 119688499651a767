"""The words in which a family of architectures is told."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from isthmus.errors import SymmetryError
from isthmus.symmetry.architectures.architecture import (
    RESIDUAL,
    Architecture,
    Norm,
    Reader,
    Residual,
)
from isthmus.symmetry.group import Group
from isthmus.symmetry.heads import Heads
from isthmus.symmetry.identity import Identity
from isthmus.symmetry.matrix_groups import GeneralLinear, Orthogonal
from isthmus.symmetry.monomial import Factors, Monomial
from isthmus.symmetry.rope import PlaneSigns, RopeCommutant
from isthmus.symmetry.spec import FREE, Dimension, Segment, Site, Spec, on

_BUFFERS = re.compile(
    r"(^|\.)(position_ids|token_type_ids|inv_freq|masked_bias|attn\.bias|attention\.bias)$"
)
"""Constants that old checkpoints store; nothing acts on them."""


class Builder:
    """Collects the dimensions of all tensors of a network.

    Args:
        config: As in `config.json`.
        shapes: Of every tensor in the checkpoint.
        residual: The group of the stream; ``auto`` takes the largest that keeps norms as they are.
        anchor: The end of the name of a tensor that every member of the family has; what stands before
            it is the prefix of the network's body.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        shapes: Mapping[str, Sequence[int]],
        residual: Residual,
        anchor: str,
    ) -> None:
        self.config = config
        self.shapes = shapes
        self.residual = residual
        found = [name for name in shapes if name == anchor or name.endswith(f".{anchor}")]
        if len(found) != 1:
            raise SymmetryError(
                f"{len(found)} tensors are named ...{anchor}, of which a model of type "
                f"{config.get('model_type')!r} has one",
                "See that config.json and the weights belong together.",
            )
        self.body = found[0].removesuffix(anchor)
        self.tensors: dict[str, tuple[Dimension, ...]] = {}
        self.axes: dict[str, Group[Any]] = {}
        self.sites: dict[str, list[Site]] = {}
        self.norms: list[Norm] = []
        self.has_outputs = False
        self.fixed = ""
        self.reads: Dimension = FREE
        self.writes: Dimension = FREE
        self.decoded: Dimension = FREE

    # What the configuration says.

    def number(self, *keys: str, default: int | None = None) -> int:
        """The first of these keys that the configuration has.

        Raises:
            SymmetryError: if there is none and no default.
        """
        for key in keys:
            if self.config.get(key) is not None:
                return int(self.config[key])
        if default is None:
            raise SymmetryError(
                f"The configuration does not say {keys[0]!r}", "Complete the model's config.json."
            )
        return default

    def activation(self, default: str) -> str:
        """The activation of the MLPs."""
        keys = ("hidden_activation", "hidden_act", "activation_function", "activation")
        return str(next((self.config[key] for key in keys if self.config.get(key)), default))

    def rotary(self, head: int, default: float) -> int:
        """How many coordinates of a head RoPE turns."""
        parameters = self.config.get("rope_parameters") or {}
        places = (parameters, self.config)
        keys = ("partial_rotary_factor", "rotary_pct")
        said = [place[key] for place in places for key in keys if place.get(key) is not None]
        return int(head * (said[0] if said else default))

    def layers(self, name: str) -> list[str]:
        """The names of the blocks, such as ``model.layers.0``."""
        block = re.compile(rf"{re.escape(self.body + name)}\.(\d+)\.")
        numbers = {int(found[1]) for found in map(block.match, self.shapes) if found}
        return [f"{self.body}{name}.{number}" for number in sorted(numbers)]

    # What is where.

    def stream(self, width: int, kind: str, *, fixed: str = "") -> None:
        """The residual stream, before anything else.

        Args:
            width: Its width.
            kind: ``rms`` or ``layer``: what its norms are.
            fixed: Why its norms cannot be absorbed, if they cannot.

        Raises:
            SymmetryError: if the group that was asked for does not fit the norms.
        """
        self.fixed = fixed
        if self.residual == "auto":
            self.residual = "signed" if kind == "rms" else "permutation"
        if self.residual == "none":
            return
        if self.residual == "signed" and kind == "layer":
            raise SymmetryError(
                f"Signs on the axis {RESIDUAL!r} change the mean that LayerNorm subtracts",
                "Take permutations, or absorb the norms and take orthogonal matrices.",
            )
        if self.residual == "orthogonal" and fixed:
            raise SymmetryError(
                f"Orthogonal matrices on the axis {RESIDUAL!r} do not fit: {fixed}",
                "Take permutations, signed ones with RMSNorm.",
            )
        groups: dict[str, Group[Any]] = {
            "permutation": Monomial(width),
            "signed": Monomial(width, "sign"),
            "orthogonal": Orthogonal(width, keeps_mean=kind == "layer"),
        }
        self.axes[RESIDUAL] = groups[self.residual]
        self.reads, self.writes = on(RESIDUAL, "dual"), on(RESIDUAL)

    def free(self, *names: str) -> None:
        """Tensors on which nothing acts, if the network has them."""
        for name in names:
            if name in self.shapes:
                self.tensors[name] = (FREE,) * len(self.shapes[name])

    def on_last(self, name: str, dimension: Dimension, *, needed: bool = True) -> None:
        """A tensor whose last dimension lies on an axis, such as an embedding."""
        if needed or name in self.shapes:
            leading = len(self.shapes.get(name, (0, 0))) - 1
            self.tensors[name] = (*(FREE,) * leading, dimension)

    def linear(
        self, module: str, into: Dimension, out: Dimension, *, transposed: bool = False
    ) -> None:
        """A linear layer, whose bias it may lack; `transposed` for GPT-2's Conv1D."""
        self.tensors[f"{module}.weight"] = (into, out) if transposed else (out, into)
        if f"{module}.bias" in self.shapes:
            self.tensors[f"{module}.bias"] = (out,)

    def stream_norm(
        self, module: str, readers: Sequence[Reader], *, plus_one: bool = False
    ) -> None:
        """A norm of the stream, in front of all the layers that read its output."""
        gain, bias = f"{module}.weight", f"{module}.bias"
        has_bias = bias in self.shapes
        self.gains(module)
        self.norms.append(Norm(gain, bias if has_bias else None, tuple(readers), plus_one))

    def gains(self, module: str) -> None:
        """γ and β of a norm in coordinates of the stream."""
        moves = self.residual in ("permutation", "signed")
        self.tensors[f"{module}.weight"] = (on(RESIDUAL, "gain") if moves else FREE,)
        if f"{module}.bias" in self.shapes:
            # With gains of 1 a LayerNorm adds β to coordinates that have turned.
            self.tensors[f"{module}.bias"] = (self.writes,)

    def site(self, axis: str, module: str, **where: Any) -> None:
        """A module whose outputs are coordinates on an axis."""
        if axis in self.axes:
            self.sites.setdefault(axis, []).append(Site(module, **where))

    # The parts of a block.

    def mlp(
        self,
        axis: str,
        up: str,
        down: str,
        units: int,
        activation: str,
        *,
        transposed: bool = False,
    ) -> list[Reader]:
        """Up, an activation, down."""
        self.axes[axis] = Monomial(units, factors_through(activation))
        self.linear(up, self.reads, on(axis), transposed=transposed)
        self.linear(down, on(axis, "dual"), self.writes, transposed=transposed)
        self.site(axis, up)
        return [reader(up, transposed=transposed)]

    def gated_mlp(self, axis: str, at: str, units: int) -> list[Reader]:
        """SwiGLU and its kin: down(act(gate x) ⊙ up x), gate and up apart or in one matrix."""
        self.axes[axis] = Monomial(units, "nonzero")
        self.linear(f"{at}.down_proj", on(axis, "dual"), self.writes)
        if f"{at}.gate_up_proj.weight" in self.shapes:
            fused = (
                Segment(axis, "gain", slice(units)),
                Segment(axis, "vector", slice(units, 2 * units)),
            )
            self.linear(f"{at}.gate_up_proj", self.reads, fused)
            self.site(axis, f"{at}.gate_up_proj", positions=slice(units, 2 * units))
            return [reader(f"{at}.gate_up_proj")]
        self.linear(f"{at}.gate_proj", self.reads, on(axis, "gain"))
        self.linear(f"{at}.up_proj", self.reads, on(axis))
        self.site(axis, f"{at}.up_proj")
        return [reader(f"{at}.gate_proj"), reader(f"{at}.up_proj")]

    def attention(
        self,
        axis: str,
        group: Heads,
        layers: Mapping[str, Dimension],
        output: str,
        *,
        transposed: bool = False,
    ) -> list[Reader]:
        """Heads, the layers that make queries, keys and values, and the one that reads values."""
        self.axes[axis] = group
        for module, out in layers.items():
            self.linear(module, self.reads, out, transposed=transposed)
            for part in out:
                self.site(axis, module, role=part.role, positions=part.positions)
        self.linear(output, on(axis, "output"), self.writes, transposed=transposed)
        return [reader(module, transposed=transposed) for module in layers]

    def finish(self, family: str) -> Architecture:
        """Check that no tensor is forgotten.

        Raises:
            SymmetryError: naming tensors that the family does not have, or that are missing or have
                another shape than the configuration says.
        """
        self.free(*(name for name in self.shapes if _BUFFERS.search(name)))
        spec = Spec(self.axes, self.tensors, self.sites)
        spec.check(self.shapes)
        return Architecture(spec, tuple(self.norms), family, self.residual, self.fixed)


def factors_through(activation: str) -> Factors:
    """Which factors a function of single numbers lets through; none for those that are not known."""
    factors: dict[str, Factors] = {"relu": "positive", "tanh": "sign"}
    return factors.get(activation, "one")


def reader(module: str, *, transposed: bool = False, tied_to: str | None = None) -> Reader:
    """A linear layer that reads the stream."""
    return Reader(f"{module}.weight", f"{module}.bias", 0 if transposed else 1, tied_to)


def separate(axis: str, query: str, key: str, value: str) -> dict[str, Dimension]:
    """Queries, keys and values from layers of their own."""
    return {query: on(axis, "query"), key: on(axis, "key"), value: on(axis, "value")}


def fused(axis: str, module: str, group: Heads) -> dict[str, Dimension]:
    """All queries, then all keys, then all values from one layer."""
    start, parts = 0, []
    for role in ("query", "key", "value"):
        stop = start + group.size(role)
        parts.append(Segment(axis, role, slice(start, stop)))
        start = stop
    return {module: tuple(parts)}


def interleaved(axis: str, module: str, heads: int, size: int) -> dict[str, Dimension]:
    """Query, key and value of the first head from one layer, then those of the second, ..."""
    rows = torch.arange(heads * 3 * size).reshape(heads, 3, size)
    roles = ("query", "key", "value")
    parts = [Segment(axis, role, rows[:, i].reshape(-1)) for i, role in enumerate(roles)]
    return {module: tuple(parts)}


def heads_without_rope(heads: int, size: int) -> Heads:
    """Heads whose scores are inner products of queries and keys."""
    return Heads(heads, 1, GeneralLinear(size), GeneralLinear(size))


def heads_with_rope(
    heads: int, groups: int, size: int, rotary: int, *, normed: str | None = None
) -> Heads:
    """Heads whose queries and keys RoPE turns.

    Args:
        heads: Of queries.
        groups: Of keys and values.
        size: Coordinates of a head.
        rotary: How many of them RoPE turns.
        normed: What normalises queries and keys before: ``rms`` or ``layer``, with gains.
    """
    key: Group[Any] = RopeCommutant(size, rotary)
    if normed == "rms":
        key = PlaneSigns(size, rotary)
    elif normed == "layer":
        key = Identity(size)
    return Heads(groups, heads // groups, key, GeneralLinear(size))
