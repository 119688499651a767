"""What a command costs, and on which machine.

This file and those that measure import the standard library only: Linux counts the memory that a
process had before `exec` towards the peak of the program that it becomes, so a large parent would
show in the figures of its children.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BIN = Path(sys.executable).parent
MERGEKIT_BIN = ROOT / ".venv-mergekit" / "bin"

# The Makefile sets a policy for torch's threads that nobody has by default.
_DEFAULTS = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}


@dataclass(frozen=True)
class Usage:
    """What a process used, from start to end, its own children included.

    Attributes:
        cpu: Seconds of processor time, user and system.
        wall: Seconds on the clock.
        peak: Bytes of resident memory at the most; pages of mapped files count.
    """

    cpu: float
    wall: float
    peak: int

    def as_data(self) -> dict[str, float]:
        return {"cpu": round(self.cpu, 3), "wall": round(self.wall, 3), "peak": self.peak}


def measure(command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> Usage:
    """Run a command to its end.

    Raises:
        RuntimeError: with the end of its messages, if it fails.
    """
    # Unwritten pages of the last run must not be written at the expense of this one.
    os.sync()
    with tempfile.TemporaryFile("w+") as messages:
        start = time.perf_counter()
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=subprocess.DEVNULL,
            stderr=messages,
            env={**_DEFAULTS, "HF_HUB_OFFLINE": "1", **(environment or {})},
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            messages.seek(0)
            raise RuntimeError(f"{command[0]} failed:\n{messages.read()[-3000:]}")
    return Usage(usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss * 1024)


@dataclass(frozen=True)
class Machine:
    """What the figures depend on."""

    processor: str
    processors: int
    memory_gib: float
    system: str
    python: str
    isthmus: str
    numpy: str
    torch: str
    mergekit: str | None


def machine() -> dict[str, object]:
    """This one."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return asdict(
        Machine(
            processor=names[0] if names else platform.processor(),
            processors=len(os.sched_getaffinity(0)),
            memory_gib=round(memory / 2**30, 1),
            system=f"{platform.system()} {platform.release().split('-')[0]}",
            python=platform.python_version(),
            isthmus=version("isthmus"),
            numpy=version("numpy"),
            torch=version("torch"),
            mergekit=_mergekit_version(),
        )
    )


def _mergekit_version() -> str | None:
    if not (MERGEKIT_BIN / "python").exists():
        return None
    code = "from importlib.metadata import version; print(version('mergekit'))"
    found = subprocess.run(
        [MERGEKIT_BIN / "python", "-c", code], capture_output=True, text=True, check=True
    )
    return found.stdout.strip()
