"""The repeated blocks of a network, and what comes before and after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from isthmus.errors import CalibrationError


@dataclass(frozen=True, slots=True)
class Blocks:
    """Names of modules, as in `model.named_modules()`.

    Attributes:
        names: The blocks, in the order in which they run.
        before: Other modules with parameters of their own that are defined before the blocks.
        after: Those that are defined after them.
    """

    names: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]


def find_blocks(model: nn.Module) -> Blocks:
    """The blocks of a Hugging Face decoder, encoder or vision transformer.

    They are the `nn.ModuleList` of modules of one class that holds the most parameters; of equals the
    longest. Parameters may be on the meta device.

    Raises:
        CalibrationError: if there is no such list, or one of an encoder and one of a decoder.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise CalibrationError(
            f"{type(model).__name__} is an encoder-decoder, whose blocks do not run in one row",
            "Encoders, decoders and vision transformers can be run on calibration data.",
        )
    candidates = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len({type(part) for part in module}) == 1
        and _size(module)
    }
    if not candidates:
        raise CalibrationError(
            f"{type(model).__name__} has no repeated blocks: no ModuleList of modules of one class",
            "In Python, calibrate_parts takes their names; projection with objective: network needs none.",
        )
    best = max(candidates, key=lambda name: (_size(candidates[name]), len(candidates[name])))
    prefix = f"{best}." if best else ""
    return given_blocks(model, [f"{prefix}{part}" for part, _ in candidates[best].named_children()])


def given_blocks(model: nn.Module, names: Sequence[str]) -> Blocks:
    """Blocks that the user names, for a network that `find_blocks` does not understand.

    Args:
        model: Any network in which each block takes the output of the one before it.
        names: Names of modules, in the order in which they run.

    Raises:
        CalibrationError: if there are none, or one does not exist, is named twice or lies in another.
    """
    modules = dict(model.named_modules())
    if not names:
        raise CalibrationError("no blocks are named", "Name at least one module of the network.")
    for name in names:
        if not name or name not in modules:
            raise CalibrationError(
                f"{type(model).__name__} has no module {name!r} that could be a block",
                "Write names as model.named_modules() gives them.",
            )
    for one in names:
        if names.count(one) > 1 or any(other.startswith(f"{one}.") for other in names):
            raise CalibrationError(
                f"block {one!r} is named twice or holds another one", "Blocks may not overlap."
            )
    before: list[str] = []
    after: list[str] = []
    reached = False
    for name, module in modules.items():
        if any(name == block or name.startswith(f"{block}.") for block in names):
            reached = True
        elif next(module.parameters(recurse=False), None) is not None:
            (after if reached else before).append(name)
    return Blocks(tuple(names), tuple(before), tuple(after))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
