"""Standard output and standard error as they may be: closed, full, or of a small character set."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress


def open_streams() -> None:
    """Make both streams usable whatever the caller did with them.

    Characters that the encoding lacks become question marks. A closed stderr swallows what it is
    told. A closed stdout refuses, so that a result which nobody can see is an error.
    """
    # In this order: each takes the lowest free descriptor, and no file may become 1 or 2.
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def tell_error(text: str) -> None:
    """One message on stderr; if that is broken as well, none."""
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def give_up_what_is_left() -> None:
    """Drop what stdout still holds and cannot take.

    Otherwise the interpreter would try again when it ends, and complain.
    """
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
