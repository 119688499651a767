"""What a recipe says about the time after the merge: `finish:`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from isthmus.recipes.calibration import Calibration
from isthmus.recipes.document import KeyPath
from isthmus.recipes.fields import read_fields
from isthmus.recipes.problems import Problems


class Finish(BaseModel):
    """What the merged network measures of itself on data.

    Attributes:
        step: ``reset``: the running statistics of BatchNorm anew; ``repair``: activations as large as those of the
            two models that were merged, which for networks with BatchNorm is the same.
        data: Examples, a file or folder; labels are not used.
        column: The column of the texts; None for `text`, or else `messages`.
        examples: How many to choose at random.
        tokens: Longer texts are cut after so many.
        seed: Another seed, another choice.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    step: Literal["reset", "repair"] = "reset"
    data: str = Field(min_length=1)
    column: str | None = Field(default=None, min_length=1)
    examples: int = Field(default=512, ge=2)
    tokens: int = Field(default=128, ge=1)
    seed: int = 0

    def plain(self) -> dict[str, Any]:
        """All of it, as in YAML."""
        return self.model_dump(exclude_none=True)

    @property
    def calibration(self) -> Calibration:
        """Where its examples are."""
        return Calibration(data=self.data)


def read_finish(raw: Any, path: KeyPath, problems: Problems) -> Finish | None:
    """A mapping with the fields of `Finish`.

    Args:
        raw: The value of `finish:`.
        path: Where it is.
        problems: Takes what is wrong.

    Returns:
        What it says, or None if something is wrong.
    """
    if not isinstance(raw, dict) or "data" not in raw:
        problems.add(
            path,
            f"finish must be a mapping with a step and data, not {raw!r}",
            "Write `finish: {step: reset, data: pictures/}`, with examples of the training's kind.",
        )
        return None
    return read_fields(Finish, raw, path, problems)
