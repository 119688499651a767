"""`isthmus demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    output: Annotated[
        Path, typer.Option(help="Where experts, merged models and the report go.")
    ] = Path("demo"),
) -> None:
    """Fine-tune three real experts, merge them by every method, and compare.

    A sentence encoder is fine-tuned on movie reviews, news topics and tweets. The three experts
    are merged by every method, each merged encoder is tested on each task, and a table and
    report.html show what was kept. Adapters taken out of the experts are merged too. Then two real fine-tunes of a chemistry model are merged, loaded
    and run. Takes five to six minutes on two quiet cores; a second run reuses heads and experts,
    and tests again.

    The models and texts come out of packages that `make setup` installs.
    """
    import isthmus
    from isthmus.lab.demo import run_demo
    from isthmus.reports.html import write_demo_report

    results = run_demo(output, merge=isthmus.merge, extract=isthmus.extract)
    write_demo_report(results, output / "report.html")
    typer.echo(f"The report is {output / 'report.html'}")
