"""The manifest: what a merge was made of and the hash of all that it wrote.

It holds no time and no absolute path, so that the same merge gives the same manifest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from isthmus.errors import OutputError

MANIFEST = "isthmus-manifest.json"


class FileRecord(BaseModel):
    """A file of the output.

    Attributes:
        size: Bytes.
        sha256: Of the whole file; of the header alone for a weight file, whose tensors have
            hashes of their own in `tensors`.
        tensors: For a weight file, the sha256 of each tensor's bytes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int
    sha256: str
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
    except (OSError, ValidationError) as error:
        raise OutputError(f"{path} cannot be read as a manifest: {error}") from error
