"""How a run uses the machine, and what it says about it."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def let_threads_sleep() -> None:
    """Have OpenMP's threads sleep while they wait for each other.

    They spin by default, and on a machine that other programs use too a run then takes several
    times as long. The variable is read when torch is loaded; a user's own choice stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Give torch so many threads for a while: sums of another order have other last bits."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def without_renames() -> Iterator[None]:
    """Keep PEFT's use of a name that transformers will drop out of the output of a run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def environment(threads: int) -> dict[str, str]:
    """Versions, the kind of machine, and torch's threads."""
    import torch
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "threads": str(threads),
    }
