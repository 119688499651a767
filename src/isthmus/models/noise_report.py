"""The noise of a model's gradients, in all and block by block, beside what its training implies."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from isthmus.checkpoints import Checkpoint
from isthmus.errors import CalibrationError, TrainingError
from isthmus.models.network import Weights, empty_network
from isthmus.models.noise import TrainingBatch, measured_noise
from isthmus.models.noise_data import MicroBatches, NoiseData, micro_batches
from isthmus.models.parameter_groups import parameter_groups
from isthmus.models.training_settings import TrainingSettings
from isthmus.optim.gradient_noise import NoiseEstimate, NormNoise

_BLOCKS = 10
"""Where examples allow it; larger blocks tell ‖G‖² better than more of them."""

_PART = re.compile(r"\[\d+\]$")
"""What ends the name of a part of a fused matrix."""


@dataclass(frozen=True)
class NoiseReport:
    """Gradient noise at a model's weights, in evaluation mode and float32.

    Attributes:
        kind: What an example is: text or image.
        batch: Examples of a micro-batch.
        block: Micro-batches of a block.
        examples: How many the estimates rest on: whole blocks count alone.
        total: Of all parameters.
        groups: Of every block of the network, and of what is before and after the blocks; empty for a network
            without numbered blocks.
        sign: The scale for sign updates, if asked for.
        spectral: That for polar updates of the matrices, if asked for.
    """

    kind: str
    batch: int
    block: int
    examples: int
    total: NoiseEstimate
    groups: Mapping[str, NoiseEstimate]
    sign: NormNoise | None
    spectral: NormNoise | None

    @property
    def reading(self) -> str:
        """What the scale says about batch sizes.

        A step along the mean gradient of B examples makes 1/(1 + B_noise/B) of the progress that the exact
        gradient would make, at the best learning rate of each (McCandlish et al. 2018, arXiv 1812.06162, eq.
        2.6); B_simple = trΣ/‖G‖² is B_noise where the Hessian is a multiple of the identity.
        """
        low, high = self.total.scale_interval
        if not math.isfinite(high) or not math.isfinite(self.total.scale):
            least = f" All that is known: it is above {low:,.1f}." if low > 0 else ""
            return (
                f"Noise hides the mean gradient: {self.examples:,} examples do not tell at which batch size "
                f"they are equal.{least} Give more examples."
            )
        about = (
            f"{max(self.total.scale, 1):,.0f} {self.kind}{'s' if self.total.scale >= 1.5 else ''}"
        )
        return (
            f"A batch of about {about} is where noise equals the mean gradient, and a step makes half of the "
            "progress that the exact gradient would. Much smaller batches mostly follow noise; much larger ones "
            "gain little a step."
        )


@dataclass(frozen=True)
class TrainedNoise:
    """Measured noise with the settings of a training.

    Attributes:
        effective: `TrainingSettings.noise_scale`; None where the settings do not tell it.
        missing: Why not.
        ratio: trΣ/(B‖G‖²), noise over signal in the gradient of one step's batch; None without a batch size.
        ratio_interval: Of the ratio.
        diffusion: η/(B(1 − μ))·trΣ, the trace of the covariance by which weights diffuse in a unit of the time
            (steps)·η/(1 − μ); None for adaptive optimizers, whose steps do not grow with the gradient.
    """

    effective: float | None
    missing: str | None
    ratio: float | None
    ratio_interval: tuple[float, float] | None
    diffusion: float | None


def noise_report(
    checkpoint: Checkpoint,
    given: NoiseData,
    *,
    sign_version: bool = False,
    spectral_version: bool = False,
    report: Callable[[int, int], None] = lambda _done, _total: None,
) -> NoiseReport:
    """Measure the noise of a model's gradients on data, with the whole model in memory.

    Bytes for every parameter: 4 of weights, 4 of one gradient and 4 of its mean; 12 more for the sign version;
    8 more of the matrices for the spectral one, and 4·rows² for each. To these come a few copies of the largest
    tensor, and the activations of one micro-batch.

    Args:
        checkpoint: A causal language model, or a classifier of sequences or images, of transformers.
        given: The data.
        sign_version: See `GradientNoise.sign`.
        spectral_version: See `GradientNoise.spectral`.
        report: Is told after every micro-batch how many are done, and of how many.

    Raises:
        CalibrationError: the model cannot be built or lacks weights; as `micro_batches`.
        TrainingError: the loss is not finite, or normalises by its batch; as `micro_batches`.
        NonFiniteError: the weights hold NaN or infinity.
    """
    network = empty_network(checkpoint)
    batches = micro_batches(checkpoint, network, given)
    block = max(2, len(batches) // _BLOCKS)
    with Weights(network, checkpoint).loaded([name for name, _ in network.named_modules()]):
        network.requires_grad_()
        noise = measured_noise(
            network,
            _told(batches, report),
            block=block,
            sign_version=sign_version,
            spectral_version=spectral_version,
        )
        return NoiseReport(
            kind=batches.kind,
            batch=given.batch,
            block=block,
            examples=noise.count // block * block * given.batch,
            total=noise.estimate(),
            groups={
                group: noise.estimate(names)
                for group, names in _groups(network, noise.names).items()
            },
            sign=noise.sign() if sign_version else None,
            spectral=noise.spectral() if spectral_version else None,
        )


def with_training(found: NoiseReport, settings: TrainingSettings) -> TrainedNoise:
    """What the noise comes to at a training's learning rate and batch size."""
    effective, missing = None, None
    try:
        effective = settings.noise_scale()
    except TrainingError as error:
        missing = f"{error.problem}; {error.cure}" if error.cure else error.problem
    size, total = settings.batch_size, found.total
    descends = effective is not None and not settings.adaptive
    return TrainedNoise(
        effective=effective,
        missing=missing,
        ratio=None if size is None else total.scale / size,
        ratio_interval=None
        if size is None
        else (total.scale_interval[0] / size, total.scale_interval[1] / size),
        diffusion=effective * total.trace if descends and effective is not None else None,
    )


def _told(batches: MicroBatches, report: Callable[[int, int], None]) -> Iterator[TrainingBatch]:
    for number, batch in enumerate(batches):
        if number:
            report(number, len(batches))
        yield batch
    report(len(batches), len(batches))


def _groups(network: nn.Module, names: tuple[str, ...]) -> dict[str, list[str]]:
    """The gradients of every group; a fused matrix may have been measured in parts."""
    whole: dict[str, list[str]] = {}
    for name in names:
        whole.setdefault(_PART.sub("", name), []).append(name)
    try:
        groups = parameter_groups(network, list(whole), "blocks")
    except CalibrationError:
        return {}
    return {
        group: [part for name in members for part in whole[name]]
        for group, members in groups.items()
    }
