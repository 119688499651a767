"""Comparing models before a merge: do they correspond, and how far and which way did each move?"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.checkpoints import Checkpoint
from isthmus.engine.devices import Processor
from isthmus.engine.matching import Matched, Matching, match
from isthmus.engine.progress import Progress
from isthmus.engine.streams import Buffers, CheckpointStream, Operand
from isthmus.errors import NonFiniteError
from isthmus.geometry.gram import cosines, norms
from isthmus.typing import FloatArray

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
_PARAMETER = re.compile(r"\.(weight|bias)$")


@dataclass(frozen=True, slots=True)
class ModuleGeometry:
    """How the experts moved in one kind of module.

    Attributes:
        parameters: How many numbers the module has, over all layers.
        base_norm: Frobenius norm of the base's weights; NaN if its square overflows float64.
        distances: ‖τ_k‖ / ‖θ_0‖ for each expert; where the base is zero, infinite, or NaN if the
            expert is zero too; NaN where a square overflows.
        cosines: Cosine between every two task vectors, shape [K, K]; NaN for a zero task vector
            and where a square overflows.
    """

    parameters: int
    base_norm: float
    distances: NDArray[np.float64]
    cosines: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A base and its experts, side by side.

    Attributes:
        labels: The experts' labels.
        matching: Which tensors correspond.
        modules: Geometry by module, layer numbers replaced by `*`.
        total: Geometry of everything that corresponds, or None if nothing does.
    """

    labels: tuple[str, ...]
    matching: Matching
    modules: Mapping[str, ModuleGeometry]
    total: ModuleGeometry | None

    @property
    def far(self) -> tuple[int, ...]:
        """Experts, from 0, that are farther from the base than the base is from zero.

        Fine-tuning moves weights by a few percent; two independent trainings end about √2 apart.
        """
        distances = () if self.total is None else self.total.distances
        return tuple(number for number, distance in enumerate(distances) if distance > 1)


def compare(models: Sequence[Checkpoint], progress: Progress) -> Comparison:
    """Measure task vectors from the first model to each of the others.

    Args:
        models: Two or more; the first is the base.
        progress: Who listens.

    Raises:
        NonFiniteError: if a model holds NaN or infinity.
    """
    base, *experts = models
    matching = match(models)
    count = len(experts)
    grams: dict[str, NDArray[np.float64]] = {}
    sizes: dict[str, int] = {}
    buffers = Buffers()
    progress.begin("comparing", sum(matched.info.nbytes for matched in matching.matched))
    # Squares of float64 may overflow; what follows from them is then unknown, and NaN.
    with np.errstate(all="ignore"):
        try:
            for matched in matching.matched:
                module = module_name(matched.info.name)
                gram = grams.setdefault(module, np.zeros((count + 1, count + 1)))
                gram += _gram(base, experts, matched, buffers)
                sizes[module] = sizes.get(module, 0) + matched.info.numel
                progress.advance(matched.info.nbytes)
        except NonFiniteError as error:
            raise NonFiniteError(
                error.problem,
                "The model is probably broken, and distances to it do not exist. A merge refuses "
                "it too, unless it is told to let such numbers pass.",
            ) from error
        finally:
            progress.finish()
        everything = np.sum(list(grams.values()), axis=0)
        return Comparison(
            labels=tuple(expert.label for expert in experts),
            matching=matching,
            modules={name: _geometry(gram, sizes[name]) for name, gram in grams.items()},
            total=_geometry(everything, sum(sizes.values())) if grams else None,
        )


def module_name(tensor: str) -> str:
    """The tensor's module with its layer numbers replaced: `layers.*.mlp.up_proj`."""
    return _PARAMETER.sub("", _NUMBER.sub("*", tensor))


def _gram(
    base: Checkpoint, experts: Sequence[Checkpoint], matched: Matched, buffers: Buffers
) -> NDArray[np.float64]:
    """Inner products of [θ_0, τ_1, ..., τ_K] at one tensor, in float64."""
    of_base, *of_experts = map(Operand, (base, *experts), matched.names)
    processor = Processor()
    stream = CheckpointStream(
        base=of_base,
        experts=of_experts,
        compute=np.dtype(np.float64),
        chunk_size=processor.chunk_size,
        device=processor,
        buffers=buffers,
        check_finite=True,
        stop=threading.Event(),
    )
    gram = np.zeros((len(experts) + 1, len(experts) + 1))
    for chunk in stream:
        experts_here: FloatArray = chunk.experts
        base_here: FloatArray = np.asarray(chunk.base)
        rows = np.vstack([base_here[np.newaxis], experts_here - base_here])
        gram += rows @ rows.T
    return gram


def _geometry(gram: NDArray[np.float64], parameters: int) -> ModuleGeometry:
    known = np.where(np.isfinite(gram), gram, np.nan)
    lengths = norms(known)
    return ModuleGeometry(
        parameters=parameters,
        base_norm=float(lengths[0]),
        distances=lengths[1:] / lengths[0],
        cosines=cosines(known[1:, 1:]),
    )
