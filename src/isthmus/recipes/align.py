"""What a recipe says about alignment: `align:`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from isthmus.recipes.document import KeyPath
from isthmus.recipes.fields import read_fields
from isthmus.recipes.problems import Problems


class Align(BaseModel):
    """Whether models are moved along their symmetries next to one of them before they are merged.

    Attributes:
        by: What is matched: ``weights``.
        to: The model that stays where it is; None for base_model, or else the first model.
        residual: The group of the residual stream: ``auto`` takes the largest that keeps norms as they are.
        seed: Decides the order in which axes are visited.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    by: Literal["weights"] = "weights"
    to: str | None = None
    residual: Literal["auto", "none", "permutation", "signed"] = "auto"
    seed: int = Field(default=0, ge=0, lt=2**40)

    def plain(self) -> dict[str, Any]:
        """All of it, as in YAML."""
        return self.model_dump(exclude_none=True)


def read_align(raw: Any, path: KeyPath, problems: Problems) -> Align | None:
    """`weights`, or a mapping with the fields of `Align`.

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
    return read_fields(Align, raw, path, problems)
