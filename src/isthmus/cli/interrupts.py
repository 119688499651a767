"""Ctrl-C and polite kills: the first stops the work in order, the second leaves at once.

Imports next to nothing: it is loaded before everything else.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

_stopping = False


def listen() -> None:
    """Answer Ctrl-C from now on, unless the caller had it ignored (`nohup`)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def listen_to_kill() -> None:
    """Take SIGTERM for a Ctrl-C: what runs can stop in order and leave a resumable state."""
    signal.signal(signal.SIGTERM, _stop)


def _stop(_number: int, _frame: FrameType | None) -> None:
    global _stopping
    if _stopping:
        # Whatever is half done is as good as after kill -9, which a merge survives. Leaving
        # through the interpreter would end in the tracebacks of threads that are waited for.
        if os.isatty(2):
            os.write(2, b"\x1b[?25h")  # Progress bars hide the cursor.
        os._exit(130)
    _stopping = True
    raise KeyboardInterrupt
