"""What a transfer to tasks of text is made from; light enough to import for a command's help."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from isthmus.lab.noise.settings import TrainingSettings

TaskName = Literal["movies", "news", "tweets"]


class TextTransferSettings(BaseModel):
    """Fine-tunes of MiniLM, one for each task, by AdamW at a constant rate and without decay.

    Attributes:
        tasks: Two or more; a task that is named twice has two experts, which differ in the order of examples.
        examples: Of each task, to train on.
        validation: Of each task; none of them is trained on, and they choose λ and density.
        test: Of each task, to judge by.
        tokens: Texts are cut after so many.
        layers: The last so many blocks are trained; all if it is left out. Embeddings never are.
        lr: η.
        batch: B, examples of a step.
        epochs: Over the training examples.
        seed: Of the draw of examples and of their orders.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tasks: tuple[TaskName, ...] = Field(("movies", "tweets"), min_length=2)
    examples: int = Field(1200, ge=10)
    validation: int = Field(100, ge=10)
    test: int = Field(300, ge=10)
    tokens: int = Field(32, ge=4, le=512)
    layers: int | None = Field(None, ge=1)
    lr: float = Field(1e-4, gt=0)
    batch: int = Field(16, ge=1)
    epochs: int = Field(1, ge=1)
    seed: int = Field(0, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.batch > self.examples:
            raise ValueError(f"a batch of {self.batch} is more than the {self.examples} examples")
        return self

    @property
    def training(self) -> TrainingSettings:
        """How each expert is trained, as `isthmus.lab.noise.training.train` takes it."""
        return TrainingSettings(
            optimizer="adamw",
            lr=self.lr,
            batch=self.batch,
            epochs=self.epochs,
            examples=self.examples,
        )

    @property
    def noise_scale(self) -> float:
        """η/√B."""
        return self.training.noise_scale
