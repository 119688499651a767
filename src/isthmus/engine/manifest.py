"""The manifest: what a merge was made of and the hash of all that it wrote.

It holds no time and no absolute path, so that the same merge gives the same manifest.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from isthmus.errors import OutputError

MANIFEST = "isthmus-manifest.json"

WORK = ".isthmus"
"""The folder in which a merge is made, beside its future place."""

LONGEST_NAME = 255
"""Characters; no usual file system has longer names."""


class FileRecord(BaseModel):
    """A file of the output.

    Attributes:
        size: Bytes.
        xxh3: XXH3 (128 bits) of the whole file; of the header alone for a weight file, whose tensors have
            hashes of their own in `tensors`.
        tensors: For a weight file, the hash of each tensor's bytes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int
    xxh3: str
    tensors: dict[str, str] | None = None


class SourceRecord(BaseModel):
    """A model that went in.

    Attributes:
        model: As the recipe names it.
        files: Size in bytes of each of its weight files.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    files: dict[str, int]


class Manifest(BaseModel):
    """What a merge was made of, and what it wrote.

    Attributes:
        isthmus: The version that wrote it.
        recipe: The recipe as canonical YAML.
        sources: The models.
        notes: What the user should know, as printed by the merge.
        files: Every file of the output but the manifest itself.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    isthmus: str
    recipe: str
    sources: list[SourceRecord]
    notes: list[str]
    files: dict[str, FileRecord]

    @field_validator("files")
    @classmethod
    def _names_stay_inside(cls, files: dict[str, FileRecord]) -> dict[str, FileRecord]:
        for name in files:
            parts = PurePosixPath(name).parts
            inside = parts and not name.startswith("/") and not {"..", WORK} & {*parts}
            if not inside or "\0" in name or max(map(len, parts)) > LONGEST_NAME:
                raise ValueError(f"the file name {name[:80]!r} leads outside the folder")
        return files

    def to_json(self) -> str:
        """The text of the manifest file."""
        content: dict[str, Any] = self.model_dump(mode="json", exclude_none=True)
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an output folder.

    Raises:
        OutputError: if there is none, or if it is not a manifest.
    """
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise OutputError(
            f"{folder} has no {MANIFEST}, so it is not a finished merge of Isthmus",
            "If a merge was interrupted, finish it: isthmus merge RECIPE OUT --resume.",
        ) from error
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise OutputError(
            f"{path} is damaged: {where}: {first['msg']}",
            "Remove the folder, or merge into another one.",
        ) from error
