"""Specs of plain modules, read from their graph by torch.fx."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from isthmus.errors import SymmetryError
from isthmus.symmetry.group import Group
from isthmus.symmetry.monomial import Factors, Monomial
from isthmus.symmetry.spec import FREE, Dimension, Segment, Site, Spec
from isthmus.symmetry.traced_kinds import (
    ADD,
    AVERAGES,
    BATCH_NORMS,
    CONVOLUTIONS,
    FUNCTIONS,
    HOMOGENEOUS,
    LINEAR,
    MAXIMA,
    METHODS,
    MULTIPLY,
    ODD,
    OTHERS,
)

_CURE = "Write its spec by hand: isthmus.symmetry.spec.Spec names the axis of every dimension."


@dataclass(eq=False)
class _Axis:
    """A set of units, as far as is known; axes that turn out to be one point to it."""

    units: int
    signs: bool = True
    scales: bool = True
    pinned: bool = False
    into: _Axis | None = None
    sites: list[Site] = field(default_factory=list)

    def root(self) -> _Axis:
        return self if self.into is None else self.into.root()


@dataclass(frozen=True)
class _Value:
    """Where a tensor in the graph has its units.

    Attributes:
        axis: Which units.
        dimension: Where; 1 for channels of images, else the last one.
        inner: Consecutive places of each unit.
    """

    axis: _Axis
    dimension: int
    inner: int = 1


def traced_spec(module: nn.Module, *example: Tensor) -> Spec:
    """The permutations of a module's units, and factors where its activations let them through.

    Known are linear layers and convolutions (full, or one filter a channel), embeddings, BatchNorm, LayerNorm
    and GroupNorm with one group, RMSNorm, activations, dropout, pooling, flattening, means over places, sums
    (residual connections) and products (gates). Inputs and outputs stay where they are.

    Args:
        module: Traceable by torch.fx.
        example: Inputs, of a batch: their shapes are needed to flatten.

    Raises:
        SymmetryError: naming the operation that is not known, or why the module cannot be traced.
    """
    try:
        graph = fx.symbolic_trace(module)
    except Exception as error:  # whatever it makes of somebody's module
        reason = " ".join(str(error).split())[:300]
        raise SymmetryError(f"{type(module).__name__} cannot be traced: {reason}", _CURE) from error
    training = module.training
    graph.eval()
    with torch.no_grad():
        ShapeProp(graph).propagate(*example)
    module.train(training)
    return _Reader(module, graph).spec()


class _Reader:
    def __init__(self, module: nn.Module, graph: fx.GraphModule) -> None:
        self.modules = dict(module.named_modules())
        self.shapes = {name: tuple(x.shape) for name, x in module.state_dict().items()}
        self.parameters = {id(x): name for name, x in module.named_parameters()}
        self.graph = graph.graph
        self.values: dict[fx.Node, _Value] = {}
        self.axes: list[_Axis] = []
        self.placed: dict[str, list[tuple[_Axis, str, int] | None]] = {}

    def spec(self) -> Spec:
        for node in self.graph.nodes:
            if node.op == "placeholder":
                shape = _shape(node)
                dimension = 1 if len(shape) > 2 else -1
                size = shape[dimension] if shape else 1
                self.values[node] = _Value(self._new(size, pinned=True), dimension)
            elif node.op == "call_module":
                self.values[node] = self._module(node)
            elif node.op in ("call_function", "call_method"):
                found = self._function(node)
                if found is not None:
                    self.values[node] = found
            elif node.op == "output":
                self._output(node)
            else:
                raise self._unknown(node)
        return self._finished()

    def _new(self, units: int, *, pinned: bool = False) -> _Axis:
        axis = _Axis(units, pinned=pinned)
        self.axes.append(axis)
        return axis

    def _unknown(self, node: fx.Node) -> SymmetryError:
        target = (
            node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")
        )
        kind = type(self.modules[target]).__name__ if target in self.modules else ""
        what = f"{kind} {target!r}" if kind else repr(target)
        return SymmetryError(f"What {what} does to units is not known (node {node.name!r})", _CURE)

    def _value(self, node: fx.Node, argument: Any) -> _Value:
        if not isinstance(argument, fx.Node) or argument not in self.values:
            raise self._unknown(node)
        return self.values[argument]

    # Modules.

    def _module(self, node: fx.Node) -> _Value:
        name = str(node.target)
        module = self.modules[name]
        given = self._value(node, node.args[0] if node.args else None)
        found = self._weighted(node, name, module, given)
        if found is None:
            found = self._plain(node, module, given)
        if found.inner == 1:
            found.axis.sites.append(Site(name, dimension=found.dimension))
        return found

    def _weighted(
        self, node: fx.Node, name: str, module: nn.Module, given: _Value
    ) -> _Value | None:
        """Modules with parameters; None for others."""
        if isinstance(module, nn.Linear):
            if given.dimension != -1:
                raise self._unknown(node)
            out = self._new(module.out_features)
            self._place(name, "weight", [(out, "vector", 1), (given.axis, "dual", given.inner)])
            self._place(name, "bias", [(out, "vector", 1)])
            return _Value(out, -1)
        if isinstance(module, CONVOLUTIONS):
            return self._convolution(node, name, module, given)
        if isinstance(module, nn.Embedding):
            out = self._new(module.embedding_dim)
            self._place(name, "weight", [None, (out, "vector", 1)])
            return _Value(out, -1)
        if isinstance(module, BATCH_NORMS):
            if given.inner != 1:
                raise self._unknown(node)
            self._norm(name, given, statistics=True)
            return given
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            if len(module.normalized_shape) != 1 or given.dimension != -1 or given.inner != 1:
                raise self._unknown(node)
            self._norm(name, given, signs=isinstance(module, nn.RMSNorm))
            return given
        if isinstance(module, nn.GroupNorm):
            if module.num_groups != 1 or given.inner != 1:
                raise self._unknown(node)
            self._norm(name, given)
            return given
        return None

    def _convolution(self, node: fx.Node, name: str, module: Any, given: _Value) -> _Value:
        places = [None] * len(module.kernel_size)
        if given.dimension != 1 or given.inner != 1:
            raise self._unknown(node)
        if module.groups == 1:
            out = self._new(module.out_channels)
            self._place(name, "weight", [(out, "vector", 1), (given.axis, "dual", 1), *places])
            self._place(name, "bias", [(out, "vector", 1)])
            return _Value(out, 1)
        if module.groups != module.in_channels or module.out_channels != module.in_channels:
            raise self._unknown(node)
        self._place(name, "weight", [(given.axis, "gain", 1), None, *places])
        self._place(name, "bias", [(given.axis, "vector", 1)])
        return given

    def _norm(
        self, name: str, given: _Value, *, statistics: bool = False, signs: bool = False
    ) -> None:
        self._restrict(given, signs=signs, scales=False)
        self._place(name, "weight", [(given.axis, "gain", 1)])
        self._place(name, "bias", [(given.axis, "vector", 1)])
        if statistics:
            self._place(name, "running_mean", [(given.axis, "vector", 1)])
            self._place(name, "running_var", [(given.axis, "gain", 1)])
            self._place(name, "num_batches_tracked", [])

    def _plain(self, node: fx.Node, module: nn.Module, given: _Value) -> _Value:
        if isinstance(module, LINEAR):
            return given
        if isinstance(module, AVERAGES):
            return self._pooled(node, given)
        if isinstance(module, MAXIMA):
            self._restrict(given, signs=False)
            return self._pooled(node, given)
        if isinstance(module, nn.Flatten):
            return self._flattened(node, given, module.start_dim)
        for kinds, how in ((HOMOGENEOUS, "homogeneous"), (ODD, "odd"), (OTHERS, "other")):
            if isinstance(module, kinds):
                return self._activated(given, how)
        raise self._unknown(node)

    # Functions.

    def _function(self, node: fx.Node) -> _Value | None:
        target = node.target
        if target is getattr or (node.op == "call_method" and target == "size"):
            return None
        if target is operator.getitem and node.args[0] not in self.values:
            return None
        if target in ADD or target in MULTIPLY or target in ("add", "add_", "mul", "mul_"):
            return self._joined(node, product=target in (*MULTIPLY, "mul", "mul_"))
        given = self._value(node, node.args[0] if node.args else None)
        if target is torch.flatten or target == "flatten":
            start = node.args[1] if len(node.args) > 1 else node.kwargs.get("start_dim", 0)
            return self._flattened(node, given, start)
        if target in ("view", "reshape") or target is torch.reshape:
            return self._flattened(node, given, 1)
        if target is torch.mean or target == "mean":
            return self._averaged(node, given)
        how = METHODS.get(target) if isinstance(target, str) else FUNCTIONS.get(target)
        if how is None:
            raise self._unknown(node)
        if "pool" in str(getattr(target, "__name__", "")):
            self._activated(given, how)
            return self._pooled(node, given)
        return self._activated(given, how)

    def _joined(self, node: fx.Node, *, product: bool) -> _Value:
        one, other = (self._value(node, argument) for argument in node.args[:2])
        if (one.dimension, one.inner) != (other.dimension, other.inner):
            raise self._unknown(node)
        if one.axis.root().units != other.axis.root().units:
            raise self._unknown(node)
        merged = self._merge(one.axis, other.axis)
        found = _Value(merged, one.dimension, one.inner)
        if product:
            self._restrict(found, signs=False, scales=False)
        return found

    def _averaged(self, node: fx.Node, given: _Value) -> _Value:
        over: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        dimensions = [over] if isinstance(over, int) else list(over or [])
        rank = len(_shape(node.args[0]))
        own = given.dimension % rank
        gone = sorted(d % rank for d in dimensions)
        if not gone or own in gone or 0 in gone or given.inner != 1:
            raise self._unknown(node)
        left = rank if node.kwargs.get("keepdim") else rank - len(gone)
        last = own == rank - 1 if node.kwargs.get("keepdim") else left == 2
        return replace(given, dimension=-1 if last else given.dimension)

    def _flattened(self, node: fx.Node, given: _Value, start: Any) -> _Value:
        before, after = _shape(node.args[0]), _shape(node)
        if before == after:
            return given
        if start != 1 or len(after) != 2 or after[0] != before[0] or given.inner != 1:
            raise self._unknown(node)
        if given.dimension == -1 and len(before) != 2:
            # Units lie innermost, which flattening keeps apart by place.
            raise self._unknown(node)
        return _Value(given.axis, -1, after[1] // given.axis.root().units)

    def _pooled(self, node: fx.Node, given: _Value) -> _Value:
        if given.dimension != 1 or given.inner != 1:
            raise self._unknown(node)
        return given

    def _activated(self, given: _Value, how: str) -> _Value:
        if how == "homogeneous":
            self._restrict(given, signs=False)
        elif how == "odd":
            self._restrict(given, scales=False)
        elif how == "other":
            self._restrict(given, signs=False, scales=False)
        return given

    def _restrict(self, given: _Value, *, signs: bool = True, scales: bool = True) -> None:
        axis = given.axis.root()
        axis.signs &= signs
        axis.scales &= scales

    def _merge(self, one: _Axis, other: _Axis) -> _Axis:
        one, other = one.root(), other.root()
        if one is not other:
            other.into = one
            one.signs &= other.signs
            one.scales &= other.scales
            one.pinned |= other.pinned
            one.sites += other.sites
        return one

    def _place(self, module: str, kind: str, dimensions: list[Any]) -> None:
        """Say where the dimensions of a parameter lie; one that is used twice has one answer."""
        name = f"{module}.{kind}" if module else kind
        if name not in self.shapes:
            return
        own = self.modules[module]
        parameter = getattr(own, kind)
        name = self.parameters.get(id(parameter), name)
        known = self.placed.setdefault(name, dimensions)
        for one, other in zip(known, dimensions, strict=True):
            if one is None or other is None:
                continue
            if one[1:] != other[1:]:
                raise SymmetryError(f"{name!r} is used in two ways that do not agree", _CURE)
            self._merge(one[0], other[0])

    def _output(self, node: fx.Node) -> None:
        def pin(argument: Any) -> None:
            if isinstance(argument, fx.Node) and argument in self.values:
                self.values[argument].axis.root().pinned = True

        fx.map_arg(node.args, lambda argument: pin(argument))

    def _finished(self) -> Spec:
        roots = {id(axis.root()): axis.root() for axis in self.axes}
        free = [axis for axis in roots.values() if not axis.pinned]
        names = {id(axis): f"units.{number}" for number, axis in enumerate(free)}
        groups: dict[str, Group[Any]] = {
            names[id(axis)]: Monomial(axis.units, _factors(axis)) for axis in free
        }

        def dimension(place: tuple[_Axis, str, int] | None) -> Dimension:
            if place is None or place[0].root().pinned:
                return FREE
            return (Segment(names[id(place[0].root())], place[1], inner=place[2]),)

        missing = set(self.shapes) - set(self.placed)
        if rest := sorted(name for name in missing if not self._is_tied(name)):
            raise SymmetryError(
                f"The tensor {rest[0]!r} is not used by any module that is known", _CURE
            )
        tensors = {name: tuple(map(dimension, places)) for name, places in self.placed.items()}
        sites = {names[id(axis)]: tuple(axis.sites) for axis in free if axis.sites}
        return Spec(groups, tensors, sites)

    def _is_tied(self, name: str) -> bool:
        """Whether a tensor is the same parameter as one that was placed."""
        module, _, kind = name.rpartition(".")
        return self.parameters.get(id(getattr(self.modules[module], kind)), name) in self.placed


def _factors(axis: _Axis) -> Factors:
    table: dict[tuple[bool, bool], Factors] = {
        (False, False): "one",
        (True, False): "sign",
        (False, True): "positive",
        (True, True): "nonzero",
    }
    return table[axis.signs, axis.scales]


def _shape(node: Any) -> tuple[int, ...]:
    meta = node.meta.get("tensor_meta") if isinstance(node, fx.Node) else None
    return tuple(meta.shape) if meta is not None and hasattr(meta, "shape") else ()
