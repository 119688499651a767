"""Which part of a fine-tune goes into an adapter as LoRA, which in full, and which not at all."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from isthmus.checkpoints import Checkpoint
from isthmus.checkpoints.loaded_model import NAMELESS_OUTPUT, Kind, loaded_model, unstored_ties
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
    def shape(self) -> tuple[int, int]:
        """Of the weight as a matrix, one side the first dimension."""
        shape = self.tuned.info.shape
        return shape[0], math.prod(shape[1:])

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
        names: The fine-tune's names, stored and tied, and the adapter's for each.
        tied: Of those the tied ones, and the stored tensor whose numbers each shares.
        notes: What the user should know.
    """

    targets: tuple[Target, ...]
    rest: tuple[Rest, ...]
    saved: frozenset[str]
    names: Mapping[str, str]
    tied: Mapping[str, str]
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
    saved = _saved([r for r in rest if r.tuned.name in names], kinds, adapted, kept, save, tuned)
    _refuse_lora_on_ties(tuned, kinds, targets, wanted)
    stored = {r.tuned.name for r in rest if r.module in saved}
    _refuse_nameless(tuned, kinds, stored)
    _refuse_ties(base, tuned, targets.keys() | stored)
    return ExtractionPlan(
        tuple(targets.values()),
        rest,
        saved,
        names,
        kinds.tied,
        _notes(matching, base, operands.keys() - names),
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
        unstored = unstored_ties(model.config, stored, loaded)
        names = {name: name for name in stored} if loaded is None else loaded.names
        self.names: Mapping[str, str] = {**names, **{name: name for name in unstored}}
        ties = {**unstored, **model.tied}
        self.tied = {name: model.tied.get(kept, kept) for name, kept in ties.items()}
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
    kinds: _Kinds,
    adapted: set[str],
    kept: re.Pattern[str] | None,
    save: str | None,
    tuned: Checkpoint,
) -> frozenset[str]:
    if kept is None:
        return frozenset()
    names = kinds.names
    known: dict[str, list[str]] = {}
    for alias, stored in kinds.tied.items():
        known.setdefault(stored, []).append(names.get(alias, alias))
    found = {
        r.module
        for r in rest
        if any(kept.search(name) for name in (r.name, *known.get(r.tuned.name, ())))
    }
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


def _refuse_lora_on_ties(
    tuned: Checkpoint,
    kinds: _Kinds,
    targets: Collection[str],
    wanted: re.Pattern[str] | None,
) -> None:
    """PEFT would add the update to the one end of a tie and leave the other as it was."""
    for alias, kept in kinds.tied.items():
        name = kinds.names.get(alias, alias)
        asked = wanted is not None and wanted.search(name.removesuffix(".weight"))
        if kept in targets or asked:
            raise PlanError(
                f"modules: {tuned.label} ties {name} to {kept}, and LoRA on one of them would leave "
                "the other as it was",
                "Leave both out of --modules; --save stores both in full.",
            )


def _refuse_nameless(tuned: Checkpoint, kinds: _Kinds, stored: Collection[str]) -> None:
    kept = kinds.tied.get(NAMELESS_OUTPUT)
    if kept in stored:
        raise PlanError(
            f"save: {tuned.label} ties {NAMELESS_OUTPUT} to {kept}, and only Transformers knows its "
            "name in the adapter",
            "Install transformers 5, or write --save so that it does not fit this tensor.",
        )


def _refuse_ties(base: Checkpoint, tuned: Checkpoint, chosen: Set[str]) -> None:
    """What the fine-tune stores by itself cannot go on a base that ties it."""
    for name, kept in _Kinds(base).tied.items():
        if name in tuned.tensors and not chosen.isdisjoint({name, kept}):
            raise PlanError(
                f"{name} is stored by itself in {tuned.label}, but {base.label} ties it to {kept}",
                "Leave both out of --modules and --save, or untie the two in the base first.",
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
