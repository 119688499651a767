"""mergekit, as a process in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-mergekit" / "bin" / "python"
READY = ROOT / ".venv-mergekit" / ".ready"
VERSION = "0.1.5"


class MergekitError(Exception):
    """mergekit gave up."""


class Mergekit:
    """Asks the process one thing after the other.

    Args:
        log: Takes what mergekit prints.
    """

    def __init__(self, log: Path) -> None:
        self._log = log.open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            [PYTHON, Path(__file__).with_name("serve_mergekit.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        self.versions: dict[str, str] = json.loads(self._answer())

    def ask(self, command: str, **arguments: Any) -> None:
        """Run one of the commands of `serve_mergekit.py`.

        Raises:
            MergekitError: with mergekit's own message.
        """
        assert self._process.stdin
        request = {"command": command} | {
            key: str(value) if isinstance(value, Path) else value
            for key, value in arguments.items()
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        error = json.loads(self._answer())["error"]
        if error is not None:
            raise MergekitError(error)

    def _answer(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            raise MergekitError(Path(self._log.name).read_text(encoding="utf-8")[-3000:])
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout
        self._process.stdout.close()
        self._log.close()
