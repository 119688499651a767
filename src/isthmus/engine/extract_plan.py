"""Which part of a fine-tune goes into an adapter as LoRA, which in full, and which not at all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from isthmus.checkpoints import Checkpoint
from isthmus.checkpoints.loaded_model import Kind, loaded_model
from isthmus.checkpoints.orientation import Orientations
from isthmus.checkpoints.ties import is_output_embedding
from isthmus.engine.matching import Matching, Reason, match
from isthmus.engine.streams import Operand
from isthmus.errors import PlanError

# Last parts of the names of embeddings; `embedding_hidden_mapping_in` and their like are linear.
_EMBEDDING = re.compile(
    r"(\w+_)?embeddings?|embed_(tokens|positions|in|tokens_per_layer)|wte|wpe|shared"
    r"|relative_attention_bias"
)


@dataclass(frozen=True, slots=True)
class Target:
    """A module whose change becomes LoRA.

    Attributes:
        module: Its name in the adapter.
        tuned: The fine-tune's weight.
        base: The base's.
        kind: What the module is.
    """

    module: str
    tuned: Operand
    base: Operand
    kind: Kind

    @property
    def kernel(self) -> tuple[int, ...] | None:
        """The shape of a convolution's kernel, None for other modules."""
        return self.tuned.info.shape[2:] or None

    @property
    def embedding(self) -> bool:
        """Whether the module is an embedding."""
        return self.kind is Kind.EMBEDDING

    @property
    def transposed(self) -> bool:
        """Whether the weight is of shape [inputs, outputs]."""
        return self.kind in (Kind.EMBEDDING, Kind.CONV1D)


@dataclass(frozen=True, slots=True)
class Rest:
    """A tensor that is no LoRA's.

    Attributes:
        name: Its name in the adapter, or the stored one if no adapter can hold it.
        module: Its module's.
        tuned: The fine-tune's tensor.
        base: The base's, or None where the base has none of this shape.
    """

    name: str
    module: str
    tuned: Operand
    base: Operand | None


@dataclass(frozen=True, slots=True)
class ExtractionPlan:
    """What an extraction will do.

    Attributes:
        targets: Modules for LoRA.
        rest: Every other floating-point tensor of the fine-tune.
        saved: Names of modules of which tensors are stored in full, if they changed.
        names: The fine-tune's stored names, and the adapter's for each.
        notes: What the user should know.
    """

    targets: tuple[Target, ...]
    rest: tuple[Rest, ...]
    saved: frozenset[str]
    names: Mapping[str, str]
    notes: tuple[str, ...]


def plan_extraction(
    tuned: Checkpoint, base: Checkpoint, modules: str | None, save: str | None
) -> ExtractionPlan:
    """Compare names and shapes, and sort the tensors; no number is read.

    Modules are named as in the fine-tune, as whoever loads the adapter loads the base model into
    the fine-tune's class; and as they are in memory where Transformers renames them.

    Args:
        tuned: The fine-tune.
        base: What it was trained from.
        modules: A regular expression to be found in the names of the modules for LoRA; None for
            all linear layers but the output embedding.
        save: A regular expression to be found in the names of other tensors; their modules are
            stored in full.

    Raises:
        PlanError: if an expression is malformed or fits nothing, the models do not correspond, or
            a module cannot be had as asked.
    """
    matching = match([tuned, base])
    operands = _operands(tuned, base, matching)
    wanted, kept = _compiled("modules", modules), _compiled("save", save)
    kinds = _Kinds(tuned)
    names = kinds.names
    targets = {
        name: Target(names[name].removesuffix(".weight"), ours, theirs, kind)
        for name, (ours, theirs) in operands.items()
        if theirs is not None
        and (kind := kinds.of(name)) is not None
        and _is_wanted(names[name], kind, wanted)
    }
    if not targets:
        raise PlanError(
            f"{tuned.label} has no weight for LoRA "
            + (f"in a module that fits {modules!r}" if wanted else f"that {base.label} has too"),
            "isthmus inspect BASE TUNED shows which tensors correspond.",
        )
    rest = tuple(
        Rest(names.get(name, name), names.get(name, name).rpartition(".")[0], ours, theirs)
        for name, (ours, theirs) in operands.items()
        if name not in targets
    )
    adapted = {target.module for target in targets.values()}
    saved = _saved([r for r in rest if r.tuned.name in names], names, adapted, kept, save, tuned)
    chosen = [t.tuned for t in targets.values()] + [r.tuned for r in rest if r.module in saved]
    _refuse_ties(base, chosen)
    return ExtractionPlan(
        tuple(targets.values()), rest, saved, names, _notes(matching, base, operands.keys() - names)
    )


def _operands(
    tuned: Checkpoint, base: Checkpoint, matching: Matching
) -> dict[str, tuple[Operand, Operand | None]]:
    """Every floating-point tensor of the fine-tune, and the base's where the two correspond."""
    operands: dict[str, tuple[Operand, Operand | None]] = {
        m.info.name: (Operand(tuned, m.names[0]), Operand(base, m.names[1]))
        for m in matching.matched
    }
    operands |= {
        c.info.name: (Operand(tuned, c.info.name), None)
        for c in matching.carried
        if c.reason in (Reason.MISSING, Reason.SHAPE)
    }
    return {name: operands[name] for name in tuned.tensors if name in operands}


def _compiled(option: str, pattern: str | None) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        return re.compile(pattern)
    except re.error as error:
        raise PlanError(
            f"{option}: {pattern!r} is no regular expression: {error}",
            "Write parts of names with | between: q_proj|v_proj.",
        ) from error


def _is_wanted(name: str, kind: Kind, wanted: re.Pattern[str] | None) -> bool:
    if wanted is not None:
        return wanted.search(name.removesuffix(".weight")) is not None
    return kind in (Kind.LINEAR, Kind.CONV1D) and not is_output_embedding(name)


class _Kinds:
    """What a model's modules are: by Transformers where it knows the model, else by their weights."""

    def __init__(self, model: Checkpoint) -> None:
        stored = [*model.tensors, *model.tied]
        loaded = loaded_model(model.config, stored)
        self.names: Mapping[str, str] = (
            {name: name for name in stored} if loaded is None else loaded.names
        )
        self._kinds = {} if loaded is None else loaded.kinds
        self._tensors = model.tensors
        self._orientations = Orientations(model.tensors)

    def of(self, name: str) -> Kind | None:
        """What the module of a stored weight is to LoRA; None if LoRA cannot be put on it."""
        module, _, part = self.names.get(name, "").rpartition(".")
        shape = self._tensors[name].shape
        if part != "weight" or not module or len(shape) < 2 or 0 in shape:
            return None
        if module in self._kinds:
            return self._kinds[module]
        if len(shape) > 2:
            # With one input for each output it is depthwise, most likely.
            return None if shape[1] == 1 else Kind.CONVOLUTION
        if is_embedding(module):
            return Kind.EMBEDDING
        inputs_first = self._orientations.inputs_first(name.removesuffix(".weight"))
        return Kind.CONV1D if inputs_first else Kind.LINEAR


def is_embedding(module: str) -> bool:
    """Whether a module of this name looks up rows of its weight."""
    name = f"{module}.weight"
    return not is_output_embedding(name) and bool(_EMBEDDING.fullmatch(module.rpartition(".")[2]))


def _saved(
    rest: Iterable[Rest],
    names: Mapping[str, str],
    adapted: set[str],
    kept: re.Pattern[str] | None,
    save: str | None,
    tuned: Checkpoint,
) -> frozenset[str]:
    if kept is None:
        return frozenset()
    found = {r.module for r in rest if kept.search(r.name)}
    if not found:
        raise PlanError(
            f"save: no tensor of {tuned.label} outside of the modules for LoRA fits {save!r}",
            "Write parts of names with | between: norm|classifier.",
        )
    everything = {name.rpartition(".")[0] for name in names.values()}
    for module in sorted(found - adapted):
        # PEFT stores whole modules, and finds them by the end of their names.
        alike = {other for other in everything if other.endswith(module)}
        inner = {other for other in everything if other.startswith(f"{module}.")}
        if not module or inner or alike & adapted:
            clash = min(inner or alike & adapted or {"everything else"})
            raise PlanError(
                f"save: {module or tuned.label} cannot be stored by itself: PEFT would store "
                f"{clash} with it",
                "Write --save so that it does not fit this module.",
            )
        found |= alike
    return frozenset(found)


def _refuse_ties(base: Checkpoint, chosen: Iterable[Operand]) -> None:
    for operand in chosen:
        if operand.name in base.tied:
            raise PlanError(
                f"{operand.name} is stored by itself in {operand.model.label}, but {base.label} "
                f"ties it to {base.tied[operand.name]}",
                "Leave it out of --modules and --save, or untie the two in the base first.",
            )


def _notes(matching: Matching, base: Checkpoint, unloaded: Set[str]) -> tuple[str, ...]:
    notes = []
    lacking = matching.dropped.get(base.label, ())
    if lacking:
        notes.append(
            f"{base.label} has tensors that the fine-tune lacks, and the adapter too: "
            f"{_some(lacking)}."
        )
    if unloaded:
        notes.append(
            "Transformers joins these tensors with others when it loads them, so that no LoRA can "
            f"hold their change: {_some(sorted(unloaded))}."
        )
    return tuple(notes)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
