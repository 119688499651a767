"""The errors that Isthmus raises on purpose: each names what is wrong, where, and the cure."""

from __future__ import annotations


class IsthmusError(Exception):
    """Something that the user can mend.

    Args:
        problem: One sentence that names the file, the tensor or the key.
        cure: What to do about it; printed on a line of its own.
    """

    def __init__(self, problem: str, cure: str | None = None) -> None:
        super().__init__(problem if cure is None else f"{problem}\n  {cure}")
        self.problem = problem
        self.cure = cure


class MethodError(IsthmusError):
    """A merge method was given tensors or parameters that it cannot use."""


class CheckpointError(IsthmusError):
    """A checkpoint cannot be opened, read or written."""


class RecipeError(IsthmusError):
    """A recipe is malformed or asks for what does not exist."""


class PlanError(IsthmusError):
    """A merge cannot work, and this is known before anything is written."""


class OutputError(IsthmusError):
    """The output folder is in the way, belongs to somebody else, or cannot be written."""


class NonFiniteError(IsthmusError):
    """An input or a result holds NaN or infinity."""


class CalibrationError(IsthmusError):
    """Calibration data, or the network that should run on it, cannot be used."""


class SymmetryError(IsthmusError):
    """A symmetry does not fit the tensors it should act on, or changes the network's function."""


class PathError(IsthmusError):
    """A path between models cannot be made, evaluated or trained."""


class TrainingError(IsthmusError):
    """An optimizer, or a measure of the noise it trains with, was given what it cannot use."""


class TwoLayerError(IsthmusError):
    """A two-layer network, its data or a path between two of them cannot be used."""
