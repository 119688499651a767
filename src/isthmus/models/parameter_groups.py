"""Which parameters of a network share the coefficients of a merge."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, TypeAlias

from torch import nn

from isthmus.errors import CalibrationError
from isthmus.models.blocks import find_blocks

Grouping: TypeAlias = Literal["scalar", "blocks", "modules"]
GROUPINGS: tuple[Grouping, ...] = ("scalar", "blocks", "modules")

_KINDS = (
    ("rest", r"norm|^ln"),  # first, as post_attention_layernorm is no attention
    ("attention", r"attn|attention"),
    ("mlp", r"mlp|ffn|feed_forward|moe|expert|intermediate|output|dense|^fc\d"),
)


def parameter_groups(
    network: nn.Module, names: Sequence[str], grouping: Grouping
) -> dict[str, tuple[str, ...]]:
    """Split a network's parameters into groups.

    Args:
        network: Its parameters may be on the meta device.
        names: Of the parameters to split, as in `network.named_parameters()`.
        grouping: `scalar`: one group. `blocks`: one for each block, one for what is defined before the
            blocks and one for what is after. `modules`: the same, with attention, MLP and the rest of a
            block (norms, and what has another name) apart, by the name of the module below the block.

    Returns:
        The parameters by group, in the order in which the groups are defined; none is empty.

    Raises:
        CalibrationError: if there is no such grouping, or the network has no blocks.
    """
    if grouping not in GROUPINGS:
        raise CalibrationError(
            f"parameters are not grouped by {grouping!r}", f"Known are {', '.join(GROUPINGS)}."
        )
    if grouping == "scalar":
        return {"all": tuple(names)} if names else {}
    blocks = find_blocks(network)
    before = set(blocks.before)
    found: dict[str, list[str]] = {}
    for name in names:
        block = next((block for block in blocks.names if name.startswith(f"{block}.")), None)
        if block is None:
            group = "before" if name.rpartition(".")[0] in before else "after"
        elif grouping == "blocks":
            group = block
        else:
            group = f"{block}: {_kind(name[len(block) + 1 :].partition('.')[0])}"
        found.setdefault(group, []).append(name)
    return {group: tuple(members) for group, members in found.items()}


def _kind(module: str) -> str:
    return next((kind for kind, known in _KINDS if re.search(known, module.lower())), "rest")
