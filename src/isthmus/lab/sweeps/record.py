"""What one run left in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from isthmus.checkpoints import atomic_write_text

METRICS = "metrics.json"
"""Written last, in one step: it decides that a run is over."""

Status = Literal["done", "diverged", "failed"]
_FORMAT = 1


@dataclass(frozen=True)
class RunRecord:
    """A run that is over.

    Attributes:
        name: Of its folder.
        settings: All of them.
        status: ``done``; ``diverged``, a result too; or ``failed``, by an error that is none of the settings'.
        metrics: What the experiment found; of a run that
            diverged ``diverged_step`` and, if finite, ``diverged_loss``.
        seconds: By the clock on the wall, over all times that it was begun anew.
        error: Of a failed run.
    """

    name: str
    settings: Mapping[str, Any]
    status: Status
    metrics: Mapping[str, Any]
    seconds: float
    error: str | None = None


_VALID = TypeAdapter(RunRecord)


def checked(content: Mapping[str, Any]) -> RunRecord:
    """A record from the values of its attributes.

    Raises:
        ValueError: Some are missing, or cannot be what they should.
    """
    return _VALID.validate_python(dict(content))


def write_record(folder: Path, record: RunRecord) -> None:
    """Declare a run over.

    Raises:
        OutputError: It cannot be written.
    """
    content = {"format": _FORMAT, **asdict(record)}
    atomic_write_text(folder / METRICS, json.dumps(content, indent=1) + "\n")


def read_record(folder: Path) -> RunRecord | None:
    """The record of a run, or None if the run is not over or its record is damaged."""
    try:
        content = json.loads((folder / METRICS).read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT or content["name"] != folder.name:
            return None
        return checked(content)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
