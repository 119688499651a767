"""What a recipe says about alignment: `align:`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from isthmus.recipes.calibration import Calibration
from isthmus.recipes.document import KeyPath
from isthmus.recipes.fields import read_fields
from isthmus.recipes.problems import Problems


class Align(BaseModel):
    """Whether models are moved along their symmetries next to one of them before they are merged.

    Attributes:
        by: What is matched: ``weights``, ``activations`` on data, or the loss between the two models, ``learned``.
        to: The model that stays where it is; None for base_model, or else the first model.
        residual: The group of the residual stream: ``auto`` takes the largest that keeps norms as they are.
        axes: Names of the axes to match, `*` standing for any characters; None for all.
        data: Examples for ``activations`` and ``learned``, a file or folder.
        column: The column of the texts; None for `text`, or else `messages`.
        examples: How many to choose at random.
        tokens: Longer texts are cut after so many.
        steps: Of ``learned``.
        seed: Decides the order in which axes are visited, and the choice of examples.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    by: Literal["weights", "activations", "learned"] = "weights"
    to: str | None = None
    residual: Literal["auto", "none", "permutation", "signed"] = "auto"
    axes: list[str] | None = Field(default=None, min_length=1)
    data: str | None = Field(default=None, min_length=1)
    column: str | None = Field(default=None, min_length=1)
    examples: int = Field(default=64, ge=1)
    tokens: int = Field(default=128, ge=1)
    steps: int = Field(default=100, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**40)

    def plain(self) -> dict[str, Any]:
        """All of it, as in YAML."""
        return self.model_dump(exclude_none=True, exclude_defaults=True) | {"by": self.by}

    @property
    def calibration(self) -> Calibration:
        """Where its examples are."""
        return Calibration(data=self.data)


def read_align(raw: Any, path: KeyPath, problems: Problems) -> Align | None:
    """One word, or a mapping with the fields of `Align`.

    Args:
        raw: The value of `align:`.
        path: Where it is.
        problems: Takes what is wrong.

    Returns:
        What it says, or None if something is wrong.
    """
    if isinstance(raw, str):
        raw = {"by": raw}
    if not isinstance(raw, dict):
        problems.add(
            path,
            f"align must be `weights` or a mapping, not {raw!r}",
            "Write `align: weights`, or leave it out.",
        )
        return None
    found = read_fields(Align, raw, path, problems)
    if found is None:
        return None
    if found.by != "weights" and found.data is None:
        problems.add(
            path,
            f"align by {found.by} runs the models on examples, and data is missing",
            "Name some texts or pictures: `align: {by: " + found.by + ", data: examples.jsonl}`.",
        )
        return None
    if found.by == "weights" and found.data is not None:
        problems.add(
            (*path, "data"),
            "align by weights looks at no data",
            "Remove it, or write `by: activations` or `by: learned`.",
        )
        return None
    return found
