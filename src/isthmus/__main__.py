"""The program `isthmus`, also as `python -m isthmus`."""

import sys

from isthmus.cli.interrupts import listen


def run() -> None:
    """Start the program; loading the commands takes a moment, and Ctrl-C may come in it."""
    listen()
    try:
        from isthmus.cli.main import run as run_commands

        run_commands()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    run()
