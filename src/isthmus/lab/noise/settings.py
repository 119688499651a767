"""What a training is made from."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from isthmus.optim.noise_scale import adaptive_noise_scale, effective_noise_scale

Architecture = Literal["mlp", "resnet", "densenet", "vit", "decoder"]
OptimizerName = Literal["sgd", "adamw", "lion", "signum", "muon"]


class NetworkSettings(BaseModel):
    """A network and its data.

    Attributes:
        architecture: `mlp`, `resnet` and `densenet` with BatchNorm, `vit`, or `decoder` of bytes.
        data: The name of a data set; see `isthmus.lab.data.named`.
        examples: To train on, the first of a fixed shuffle.
        test: To judge by.
        pool: Pictures are averaged over squares of so many pixels.
        width: Units of an MLP's layer, channels of a ResNet's first stage, growth of a DenseNet, or the width
            of a transformer's stream.
        depth: Hidden layers, blocks of a stage, layers of a dense block, or blocks of a transformer.
        context: Bytes of an example of text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    architecture: Architecture = "mlp"
    data: str = "mnist"
    examples: int = Field(4000, ge=2)
    test: int = Field(10_000, ge=1)
    pool: int = Field(1, ge=1)
    width: int = Field(128, ge=1)
    depth: int = Field(2, ge=1)
    context: int = Field(64, ge=2)


class TrainingSettings(NetworkSettings):
    """How it is trained.

    Attributes:
        optimizer: `sgd` has decay in the gradient, the others beside the step. `muon` is for matrices; the rest
            is trained by AdamW at a tenth of its rate.
        lr: η.
        batch: B, examples of a step.
        momentum: μ of `sgd`, β of `signum` and `muon`; `adamw` and `lion` have their usual ones.
        weight_decay: λ.
        augment: Pictures are shifted at random by up to so many pixels either way, after pooling.
        schedule: Of the learning rate: `constant`, or half a `cosine` wave to 0.
        epochs: Over the training examples.
    """

    optimizer: OptimizerName = "sgd"
    lr: float = Field(0.1, gt=0)
    batch: int = Field(64, ge=1)
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    augment: int = Field(0, ge=0)
    schedule: Literal["constant", "cosine"] = "constant"
    epochs: int = Field(10, ge=1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.batch > self.examples:
            raise ValueError(f"a batch of {self.batch} is more than the {self.examples} examples")
        if self.batch == 1 and self.architecture in ("resnet", "densenet"):
            raise ValueError("BatchNorm needs a batch of 2 examples or more")
        if self.augment and self.architecture == "decoder":
            raise ValueError("augment shifts pictures; there are none here")
        return self

    @property
    def noise_scale(self) -> float:
        """η/(B(1 − μ)) of gradient descent; η/√B of the optimizers whose steps do not grow with the gradient."""
        if self.optimizer == "sgd":
            return effective_noise_scale(self.lr, self.batch, self.momentum)
        return adaptive_noise_scale(self.lr, self.batch)


class PairSettings(TrainingSettings):
    """Two trainings that differ in the order of their data only.

    Attributes:
        shared: Epochs that they have in common; 0 for a common start only.
        seed: Of the start and of the orders.
        rebasin: Whether the barrier is measured after matching the weights too (`mlp` and `resnet`).
    """

    shared: int = Field(0, ge=0)
    seed: int = Field(0, ge=0, lt=2**63)
    rebasin: bool = False

    @model_validator(mode="after")
    def _branches(self) -> Self:
        if self.shared >= self.epochs:
            raise ValueError(
                f"{self.shared} shared epochs leave nothing of {self.epochs} to differ in"
            )
        if self.rebasin and self.architecture not in ("mlp", "resnet"):
            raise ValueError(f"rebasin is for mlp and resnet, not for {self.architecture}")
        return self


class SingleSettings(TrainingSettings):
    """One training.

    Attributes:
        seed: Of the start and of the order of examples.
    """

    seed: int = Field(0, ge=0, lt=2**63)


class TransferSettings(TrainingSettings):
    """Two fine-tunes of a network that was pretrained on other data.

    Attributes:
        source: The data of the pretraining, by AdamW.
        source_examples: How many.
        source_epochs: Over them.
        source_lr: AdamW's highest rate.
        tasks: Both are fine-tuned on all classes, in other orders (`same`), or each on one half of them
            (`halves`).
        validation: Examples, none of which is trained on, that choose λ and density.
        seed: Of the pretraining and of the orders.
    """

    source: str = "mnist"
    source_examples: int = Field(10_000, ge=64)
    source_epochs: int = Field(6, ge=1)
    source_lr: float = Field(2e-3, gt=0)
    tasks: Literal["same", "halves"] = "same"
    validation: int = Field(1000, ge=10)
    seed: int = Field(0, ge=0, lt=2**63)
