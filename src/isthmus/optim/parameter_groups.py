"""Which parameters of a network are matrices, and of which shape: groups for the optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from torch import nn
from torch.nn.modules.conv import _ConvNd

from isthmus.errors import TrainingError

Kind: TypeAlias = Literal["matrices", "embeddings", "heads", "vectors"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_HEADS = frozenset(
    {"lm_head", "embed_out", "classifier", "score", "qa_outputs", "head", "heads", "fc"}
)
"""What heads are called where they are a child of the network itself."""

_FUSED = {
    "c_attn": (3, 2),  # GPT-2: queries, keys, values; keys and values alone in cross-attention
    "in_proj_weight": (3,),  # torch's MultiheadAttention
    "qkv": (3,),
    "Wqkv": (3,),
    "qkv_proj": (3,),
}
"""Matrices that share a tensor, one under the other, and their number: square ones."""

_INTERLEAVED = frozenset({"query_key_value"})

Fused: TypeAlias = Mapping[str, int | Sequence[int]]


@dataclass(frozen=True)
class _Form:
    transposed: bool = False
    split: tuple[int, ...] | None = None


def parameter_groups(
    network: nn.Module,
    *,
    settings: Mapping[Kind, Mapping[str, Any]] | None = None,
    heads: Iterable[str] | None = None,
    fused: Fused | None = None,
) -> list[dict[str, Any]]:
    """Groups for `LionK`: matrices by the nuclear norm, all others by the ℓ₁ norm.

    `embeddings` are the tables of `nn.Embedding`, with a head that is tied to one, and parameters of a
    module of its own whose name has "embed" or "token" in it. `heads` are matrices of the output layer.
    `matrices` are the other weights with two dimensions, and of convolutions. `vectors` are biases, gains,
    and what is no known matrix: depthwise convolutions, stacked experts.

    Args:
        network: Parameters that need no gradient are left out.
        settings: For some kinds what their groups say to the optimizer, such as
            {"vectors": {"weight_decay": 0.0}}.
        heads: The modules that are heads, as in `network.named_modules()`; if None, transformers' output
            embeddings, and children of the network named lm_head, classifier, score, head or fc. A plain
            `nn.Sequential` names none: say which.
        fused: Weights in which several matrices lie one under the other, by the name of the parameter or
            the last part of its module's: how many equal ones, or the outputs of each. Known are c_attn,
            in_proj_weight, qkv, Wqkv and qkv_proj where all matrices are square, and gate_up_proj. 1 leaves
            one whole.

    Returns:
        Groups with `params`, their `names`, their `kind`, and `transposed` or `split` where that applies.

    Raises:
        TrainingError: a head or a kind that there is not, nothing to train, or a fused weight whose parts
            its shape does not tell.
    """
    chosen: dict[Kind, dict[str, Any]] = {
        kind: {"norm": "nuclear" if kind == "matrices" else "l1"} for kind in KINDS
    }
    for kind, given in (settings or {}).items():
        if kind not in chosen:
            raise TrainingError(
                f"there are no parameters of the kind {kind!r}", f"Kinds are {', '.join(KINDS)}."
            )
        chosen[kind] |= given
    below = _heads(network, heads)
    sorted_out: dict[tuple[Kind, _Form], dict[str, Any]] = {}
    for name, parameter, owners in _owned(network):
        kind, form = _sort(name, parameter, owners, below, fused or {})
        group = sorted_out.get((kind, form))
        if group is None:
            group = {"params": [], "names": [], "kind": kind, **chosen[kind]}
            if form.transposed:
                group["transposed"] = True
            if form.split is not None:
                group["split"] = form.split
            sorted_out[kind, form] = group
        group["params"].append(parameter)
        group["names"].append(name)
    if not sorted_out:
        raise TrainingError(
            f"{type(network).__name__} has no parameter that needs a gradient",
            "call network.requires_grad_()",
        )
    return sorted(sorted_out.values(), key=lambda group: KINDS.index(group["kind"]))


def _owned(network: nn.Module) -> Iterator[tuple[str, nn.Parameter, list[nn.Module]]]:
    """Every trainable parameter once, with all modules that it is a parameter of."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in network.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, []).append(module)
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            yield name, parameter, owners[parameter]


def _heads(network: nn.Module, given: Iterable[str] | None) -> frozenset[nn.Module]:
    """The modules at and below the heads."""
    if given is None:
        tops = [module for name, module in network.named_children() if name in _HEADS]
        output = getattr(network, "get_output_embeddings", lambda: None)()
        tops += [output] if isinstance(output, nn.Module) else []
    else:
        known = dict(network.named_modules())
        tops = []
        for name in given:
            if name not in known:
                raise TrainingError(
                    f"{type(network).__name__} has no module {name!r} to be a head",
                    "name it as network.named_modules() does",
                )
            tops.append(known[name])
    return frozenset(module for top in tops for module in top.modules())


def _sort(
    name: str,
    parameter: nn.Parameter,
    owners: Sequence[nn.Module],
    heads: frozenset[nn.Module],
    fused: Fused,
) -> tuple[Kind, _Form]:
    owner = owners[0]
    if any(isinstance(one, nn.Embedding | nn.EmbeddingBag) for one in owners):
        return "embeddings", _Form()
    last = name.rpartition(".")[2]
    if parameter.ndim > 1 and any(word in last for word in ("embed", "token")):
        return "embeddings", _Form()
    if parameter.ndim < 2:
        return "vectors", _Form()
    if heads.intersection(owners):
        return "heads", _Form()
    if isinstance(owner, _ConvNd):
        return _convolution(owner)
    if parameter.ndim > 2:
        return "vectors", _Form()
    # By name, as this floor knows no transformers.
    transposed = type(owner).__name__ == "Conv1D"
    rows, columns = parameter.shape[::-1] if transposed else parameter.shape
    return "matrices", _Form(transposed, _parts(name, rows, columns, fused))


def _convolution(module: _ConvNd) -> tuple[Kind, _Form]:
    if module.groups == 1:
        return "matrices", _Form(transposed=module.transposed)
    if module.transposed or module.in_channels == module.groups:
        return "vectors", _Form()
    outputs = module.out_channels // module.groups
    return "matrices", _Form(split=(outputs,) * module.groups)


def _parts(name: str, rows: int, columns: int, fused: Fused) -> tuple[int, ...] | None:
    module, _, own = name.rpartition(".")
    names = (name, own, module.rpartition(".")[2])
    given = next((fused[one] for one in names if one in fused), None)
    if given is not None and not isinstance(given, int):
        return tuple(given)
    count = given
    if count is None and names[2] == "gate_up_proj":
        count = 2
    if count is None:
        known = next((_FUSED[one] for one in names if one in _FUSED), None)
        interleaved = any(one in _INTERLEAVED for one in names)
        if known is None and not interleaved:
            return None
        count = next((number for number in known or () if rows == number * columns), None)
        if count is None:
            layout = "head by head" if interleaved else "of unequal size"
            raise TrainingError(
                f"{name} has shape [{rows}, {columns}] (outputs, inputs) and holds several matrices {layout}",
                f"say fused={{{names[2]!r}: [outputs of each]}}, or 1 to take it as one matrix",
            )
    if count == 1:
        return None
    if count < 1 or rows % count:
        raise TrainingError(
            f"{name} has {rows} outputs, which are not {count} equal matrices",
            "give the outputs of each in `fused`",
        )
    return (rows // count,) * count
