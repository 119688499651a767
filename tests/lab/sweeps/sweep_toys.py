"""Experiments for tests: they must be importable by the processes that run them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from isthmus.lab.sweeps.diverged import Diverged
from isthmus.lab.sweeps.experiments import Experiment


class ToySettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    x: int = Field(0, ge=0)
    what: str = "square"
    seconds: float = 0.0
    seed: int = 0


def toy(
    settings: ToySettings, folder: Path, tell: Callable[[float], None], *, cache: Path
) -> dict[str, Any]:
    (folder / "begun.txt").open("a").write("again\n")
    (folder / "checkpoint.pt").touch()
    tell(0.5)
    time.sleep(settings.seconds)
    if settings.what == "diverge":
        raise Diverged(7, float("inf"))
    if settings.what == "break":
        raise ZeroDivisionError("one over nothing")
    if settings.what == "break once" and not (cache / "mended").exists():
        raise ZeroDivisionError("not yet")
    if settings.what == "die":
        os.kill(os.getpid(), 9)
    if settings.what == "listen":
        return {"deaf to": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))}
    if settings.what == "nan":
        return {"square": float("nan")}
    return {"square": settings.x**2 + settings.seed, "name": settings.what, "parts": [1, 2]}


TOYS = {"toy": Experiment("toy", "sweep_toys:ToySettings", "sweep_toys:toy")}
