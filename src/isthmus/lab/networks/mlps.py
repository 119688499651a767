"""Multilayer perceptrons and their symmetries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from isthmus.symmetry.group import Group
from isthmus.symmetry.monomial import Monomial
from isthmus.symmetry.spec import FREE, Dimension, Site, Spec, on


def mlp(inputs: int, width: int, hidden: int, classes: int) -> nn.Sequential:
    """`hidden` layers of ReLUs, then a linear one."""
    sizes = [inputs, *[width] * hidden]
    layers: list[nn.Module] = []
    for size in sizes[:-1]:
        layers += [nn.Linear(size, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def mlp_spec(width: int, hidden: int) -> Spec:
    """Permutations of the units of every hidden layer; inputs and classes stay where they are."""
    axes: dict[str, Group[Any]] = {f"hidden.{layer}": Monomial(width) for layer in range(hidden)}
    tensors: dict[str, Sequence[Dimension]] = {}
    before: Dimension = FREE
    for layer in range(hidden + 1):
        out = on(f"hidden.{layer}") if layer < hidden else FREE
        tensors[f"{2 * layer}.weight"] = (out, before)
        tensors[f"{2 * layer}.bias"] = (out,)
        before = on(f"hidden.{layer}", "dual")
    sites = {f"hidden.{layer}": (Site(str(2 * layer + 1)),) for layer in range(hidden)}
    return Spec(axes, tensors, sites)
