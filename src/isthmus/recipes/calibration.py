"""What a recipe says about calibration data: `calibration:` of one model, and of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from isthmus.recipes.document import KeyPath
from isthmus.recipes.fields import read_fields
from isthmus.recipes.problems import Problems


class Calibration(BaseModel):
    """Which examples a model is run on.

    Attributes:
        data: A file or folder of examples, or what `isthmus calibrate` wrote.
        column: The column of the texts; None for `text`, or else `messages`.
        examples: How many to choose at random.
        tokens: Longer texts are cut after so many.
        seed: Another seed, another choice.
        activations: Of all models: how activations wait between blocks, in memory as float32 or bfloat16,
            or on disk.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    data: str | None = Field(default=None, min_length=1)
    column: str | None = Field(default=None, min_length=1)
    examples: int | None = Field(default=None, ge=1)
    tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    activations: Literal["float32", "bfloat16", "disk"] | None = None

    def plain(self) -> dict[str, Any]:
        """What is given, as in YAML."""
        return self.model_dump(exclude_none=True)

    def over(self, common: Calibration | None) -> Calibration:
        """This, and what `common` says where this is silent."""
        return self if common is None else Calibration(**{**common.plain(), **self.plain()})

    def path(self, root: Path | None) -> Path:
        """Where the data is: from `root` on, before the current folder.

        Args:
            root: The recipe's folder.
        """
        assert self.data is not None
        given = Path(self.data).expanduser()
        rooted = given if root is None else root / given
        return rooted if rooted.exists() else given


def read_calibration(raw: Any, path: KeyPath, problems: Problems) -> Calibration | None:
    """A path, or a mapping with the fields of `Calibration`.

    Args:
        raw: The value of `calibration:`.
        path: Where it is.
        problems: Takes what is wrong.

    Returns:
        What it says, or None if something is wrong.
    """
    if isinstance(raw, str):
        raw = {"data": raw}
    if not isinstance(raw, dict):
        problems.add(
            path,
            f"calibration must be the path of examples or a mapping, not {raw!r}",
            "Write `calibration: examples.jsonl`.",
        )
        return None
    if len(path) > 1 and raw.get("activations") is not None:
        problems.add(
            (*path, "activations"),
            "activations is one value for all models",
            "Move it to `calibration:` at the top level.",
        )
        return None
    return read_fields(Calibration, raw, path, problems)
