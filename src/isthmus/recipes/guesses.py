"""What can be known about the listed models before they are opened."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from isthmus.checkpoints import find_adapter
from isthmus.checkpoints.hub import is_hub_reference
from isthmus.errors import CheckpointError
from isthmus.recipes.schema import ModelEntry


def may_be_adapters(entries: Iterable[ModelEntry], root: Path | None) -> bool:
    """Whether all models are adapters, as far as can be known without the Hub."""
    try:
        return all(
            find_adapter(entry.model, root=root, fetching=False) is not None
            or is_hub_reference(entry.model)
            for entry in entries
        )
    except CheckpointError:  # which opening it will raise again
        return True
