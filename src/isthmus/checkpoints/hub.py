"""Models on the Hub, by way of its own library and cache. The library is imported when needed."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from isthmus.checkpoints.adapter import ADAPTER_CONFIG
from isthmus.checkpoints.adapter_files import ADAPTER_INDEX, ADAPTER_WEIGHTS
from isthmus.checkpoints.folder import choose_weights, preferred_weights
from isthmus.checkpoints.index import inside, read_index
from isthmus.checkpoints.sidecars import MODEL_CONFIG, is_sidecar
from isthmus.errors import CheckpointError

_REFERENCE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


def is_hub_reference(reference: str) -> bool:
    """Whether a text can name a model on the Hub: `org/name` or `org/name@revision`."""
    return not reference.startswith(".") and _REFERENCE.fullmatch(reference) is not None


def fetch(reference: str) -> Path:
    """The folder of a model or adapter from the Hub, downloaded unless it is in the cache.

    Args:
        reference: `org/name`, or `org/name@revision` with a branch, tag or commit.

    Returns:
        The snapshot's folder in the Hub's cache; its name is the commit.

    Raises:
        CheckpointError: if the model is not in the cache and cannot be downloaded.
    """
    match = _REFERENCE.fullmatch(reference)
    assert match is not None
    repository, revision = match["repository"], match["revision"]
    return _cached(repository, revision) or _download(repository, revision)


def _cached(repository: str, revision: str | None) -> Path | None:
    """The model's folder in the cache, if all of its weights are there."""
    from huggingface_hub import try_to_load_from_cache

    for name in (MODEL_CONFIG, ADAPTER_CONFIG):
        found = try_to_load_from_cache(repository, name, revision=revision)
        if isinstance(found, str) and _is_complete(Path(found).parent):
            return Path(found).parent
    return None


def _is_complete(folder: Path) -> bool:
    """Whether the weights are there that opening the folder would look for."""
    single, torch = (folder / name for name in ADAPTER_WEIGHTS)
    if single.exists():
        return True
    if (folder / ADAPTER_INDEX).exists():
        return _has_shards(folder / ADAPTER_INDEX)
    if torch.exists():
        return True
    try:
        weights, _ = choose_weights(folder)
    except CheckpointError:
        return False
    return _has_shards(weights) if weights.name.endswith(".index.json") else True


def _has_shards(index: Path) -> bool:
    return all(inside(index.parent, file).exists() for file in read_index(index).values())


def _download(repository: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, constants, snapshot_download

    name = repository if revision is None else f"{repository}@{revision}"
    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(
            f"{name} is neither a folder here nor complete in the Hub's cache, and HF_HUB_OFFLINE "
            "forbids downloading it",
            "Unset HF_HUB_OFFLINE, or name the model's folder.",
        )

    def snapshot(files: list[str], revision: str | None) -> Path:
        patterns = [glob.escape(file) for file in files]
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))

    try:
        files = HfApi().list_repo_files(repository, revision=revision)
        weights = preferred_weights(files)
        wanted = [file for file in files if is_sidecar(file) or file == weights]
        wanted += [
            file for file in (ADAPTER_CONFIG, *ADAPTER_WEIGHTS, ADAPTER_INDEX) if file in files
        ]
        folder = snapshot(wanted, revision)
        indices = {file for file in wanted if file in (weights, ADAPTER_INDEX)}
        shards = {
            shard
            for index in indices
            if index.endswith(".index.json")
            for shard in read_index(folder / index).values()
        }
        if shards:
            # A snapshot's folder is named by its commit; the branch may have moved meanwhile.
            snapshot(sorted(shards), folder.name)
    except CheckpointError:
        raise
    except Exception as error:  # the library's transport and its errors differ between versions
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{name} cannot be had from the Hub: {reason}",
            "See that the name is right, that you may read it (hf auth login), and that there is "
            "a network; or name the model's folder.",
        ) from error
    return folder
