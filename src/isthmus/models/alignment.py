"""Finding the symmetry that moves one checkpoint next to another, and seeing that it keeps the function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from isthmus.checkpoints import Checkpoint, align_names
from isthmus.errors import SymmetryError
from isthmus.models.checkpoint_tensors import CheckpointTensors, by_parameter, symmetries
from isthmus.models.equivalence import Equivalence, check_action, random_inputs
from isthmus.models.matched import Batch, By, Told, matched
from isthmus.models.network import empty_network
from isthmus.models.widened_view import WidenedView
from isthmus.symmetry.architectures import Residual
from isthmus.symmetry.matching import Matching, match_weights
from isthmus.symmetry.spec import Spec

CHECKED = 1_000_000_000
"""Parameters of the largest network that is run in float64, before and after, to see that nothing changed."""


@dataclass(frozen=True)
class Alignment:
    """How a checkpoint moves next to another.

    Attributes:
        spec: Where the groups act, by the reference's names.
        names: For each of the reference's tensors the moved checkpoint's name.
        matching: The element, and how near it brings the two.
        check: The difference that it makes to the function on random inputs, in float64; None where the
            network was not run.
        unchecked: Why it was not.
    """

    spec: Spec
    names: Mapping[str, str]
    matching: Matching
    check: Equivalence | None
    unchecked: str = ""


def named_alike(reference: Checkpoint, moved: Checkpoint) -> dict[str, str]:
    """For each of the reference's tensors the other's name.

    Raises:
        SymmetryError: A tensor is missing, or has another shape.
    """
    names = align_names(list(reference.tensors), list(moved.tensors))
    for name, info in reference.tensors.items():
        if not info.dtype.is_float:
            continue
        own = names.get(name)
        if own is None:
            raise SymmetryError(
                f"{moved.label} has no tensor {name!r}, which {reference.label} has",
                "Align networks of one architecture.",
            )
        shape = moved.tensors[own].shape
        if shape != info.shape:
            raise SymmetryError(
                f"{own!r} has the shape {list(shape)} in {moved.label} and {list(info.shape)} in "
                f"{reference.label}",
                "Only networks of one vocabulary and stream can be aligned.",
            )
    return names


def chosen_axes(spec: Spec, patterns: Sequence[str] | None, label: str) -> list[str] | None:
    """The axes that patterns name; None if all are meant.

    Args:
        spec: With all of them.
        patterns: Names, `*` standing for any characters.
        label: Of the model, for errors.

    Raises:
        SymmetryError: A pattern that fits no axis.
    """
    if patterns is None:
        return None
    found: dict[str, None] = {}
    for pattern in patterns:
        fitting = [axis for axis in spec.axes if fnmatchcase(axis, pattern)]
        if not fitting:
            near = get_close_matches(pattern, spec.axes, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise SymmetryError(
                f"{label} has no axis {pattern!r}",
                f"{hint}Its axes are: {', '.join(spec.axes)}.",
            )
        found |= dict.fromkeys(fitting)
    return list(found)


def align_checkpoint(
    reference: Checkpoint,
    moved: Checkpoint,
    *,
    by: By = "weights",
    batches: Sequence[Batch] = (),
    residual: Residual = "auto",
    axes: Sequence[str] | None = None,
    steps: int = 100,
    seed: int = 0,
    told: Told = lambda _what, _done, _total: None,
) -> Alignment:
    """Match a checkpoint to another, and see that its function stays.

    Args:
        reference: It stays as it is.
        moved: The one that moves. By weights, both are read tensor by tensor, several times; otherwise both are
            in memory, in float32.
        by: What is matched; see `matched`.
        batches: Data, unless weights are matched.
        residual: The group of the residual stream.
        axes: Those to match, by name or pattern; all if None.
        steps: Of learning.
        seed: Decides the order in which axes are visited.
        told: Told of progress.

    Raises:
        SymmetryError: The networks do not fit, their symmetries are not known, there is no such axis, or the
            function changes.
        CalibrationError: Transformers cannot build the network.
        PathError: The network has no loss on the data, as `learned` needs it.
    """
    spec = symmetries(reference, residual).spec
    names = named_alike(reference, moved)
    wanted = chosen_axes(spec, axes, reference.label)
    if by == "weights":
        count, visits = len(spec.axes if wanted is None else wanted), 0

        def visited(sweep: int, _axis: str) -> None:
            nonlocal visits
            told(f"matching weights, sweep {sweep}", visits % count, count)
            visits += 1

        matching = match_weights(
            spec,
            CheckpointTensors(reference),
            CheckpointTensors(moved, names),
            axes=wanted,
            seed=seed,
            progress=visited,
        )
    else:
        network = empty_network(reference)
        stored = by_parameter(network, reference)
        named = Spec(
            spec.axes, {here: spec.tensors[name] for here, name in stored.items()}, spec.sites
        )
        matching = matched(
            by,
            network,
            named,
            dict(CheckpointTensors(reference, stored)),
            dict(CheckpointTensors(moved, {here: names[name] for here, name in stored.items()})),
            batches,
            axes=wanted,
            steps=steps,
            seed=seed,
            told=told,
        )
    reason = _unchecked(moved)
    if isinstance(moved, WidenedView) and not reason:
        moved.check()
    check = None if reason else _checked(spec, matching, moved, names)
    return Alignment(spec, names, matching, check, reason)


def _unchecked(moved: Checkpoint) -> str:
    """Why a network is not run; empty if it is."""
    if sum(info.numel for info in moved.tensors.values()) > CHECKED:
        return f"it has more than {CHECKED:,} parameters"
    if not (moved.config or {}).get("architectures"):
        return "its config.json names no architecture, so that its head is not known"
    return ""


def _checked(
    spec: Spec, matching: Matching, moved: Checkpoint, names: Mapping[str, str]
) -> Equivalence:
    """Run the moved network before and after."""
    network = empty_network(moved)
    of_reference = {own: name for name, own in names.items()}
    stored = by_parameter(network, moved)
    if missing := [name for name in stored.values() if name not in of_reference]:
        raise SymmetryError(
            f"{moved.label} has a tensor {missing[0]!r} that the other model lacks",
            "Align networks of one architecture, with the same head.",
        )
    named = Spec(
        spec.axes,
        {parameter: spec.tensors[of_reference[name]] for parameter, name in stored.items()},
    )
    parameters = dict(CheckpointTensors(moved, stored))
    return check_action(
        network, named, matching.element, parameters, random_inputs(moved.config or {})
    )
