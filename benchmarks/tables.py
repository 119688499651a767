"""Figures into Markdown; `python benchmarks/tables.py` puts them into docs/benchmarks.md.

Nobody types a figure: the tables are made from benchmarks/results, between comments that name them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
OURS, OURS_ALONE, THEIRS, FLOOR = "isthmus, 2 workers", "isthmus, 1 worker", "mergekit", "floor"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first two are flush right."""
    rule = ["---" if i < 2 else "---:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rows)) + "\n"


def contest_table(contests: dict[str, Any]) -> str:
    """Medians, and the median of the ratios of each round."""
    rows = []
    for shape, methods in contests.items():
        for method, contest in methods.items():
            rounds = contest["rounds"]
            for name in (OURS, OURS_ALONE, THEIRS, FLOOR):
                cpu, wall, peak = (
                    median(one[name][what] for one in rounds) for what in ("cpu", "wall", "peak")
                )
                to_ours = [
                    ""
                    if name == OURS
                    else f"{median(one[name][what] / one[OURS][what] for one in rounds):.2f}"
                    for what in ("cpu", "wall", "peak")
                ]
                rows.append(
                    [
                        f"{shape}, {method}",
                        name,
                        f"{cpu:.2f} s",
                        f"{wall:.2f} s",
                        f"{peak / 2**20:,.0f} MiB",
                        *to_ours,
                    ]
                )
    head = ["merge", "who", "CPU", "wall", "peak", "CPU, ratio", "wall, ratio", "peak, ratio"]
    return table(head, rows)


def rounds_table(contests: dict[str, Any]) -> str:
    """Every round: how many times as much as Isthmus mergekit took, and Isthmus as the floor."""
    rows = []
    for shape, methods in contests.items():
        for method, contest in methods.items():
            for number, one in enumerate(contest["rounds"], 1):
                ratios = [one[THEIRS][what] / one[OURS][what] for what in ("cpu", "wall", "peak")]
                floor = [one[OURS][what] / one[FLOOR][what] for what in ("cpu", "wall")]
                rows.append(
                    [f"{shape}, {method}", str(number), f"{one['load']:.1f}"]
                    + [f"{ratio:.1f}" for ratio in (*ratios, *floor)]
                )
    head = ["merge", "round", "load", "mergekit : Isthmus, CPU", "wall", "peak"]
    return table([*head, "Isthmus : floor, CPU", "wall"], rows)


def memory_table(rows: Sequence[dict[str, Any]]) -> str:
    """Peak memory by depth and number of models."""
    return table(
        ["layers", "models", "inputs", "linear, peak", "ties, peak"],
        [
            [
                str(row["layers"]),
                str(row["models"]),
                *(f"{row[what] / 2**20:,.0f} MiB" for what in ("input", "linear", "ties")),
            ]
            for row in rows
        ],
    )


def compilation_table(compilation: dict[str, Any]) -> str:
    """The first merge with a trim on a machine, and the second: medians."""
    rows = [
        [which, "tiny, ties", *(f"{median(one[w] for one in runs):.2f} s" for w in ("cpu", "wall"))]
        for which, runs in compilation.items()
    ]
    return table(["run", "merge", "CPU", "wall"], rows)


def machine_table(machines: Sequence[dict[str, Any]]) -> str:
    """The machine; refuses figures of several."""
    first = machines[0]
    if any(other != first for other in machines):
        raise SystemExit("the results come from different machines or versions; measure again")
    return table(["what", "value"], [[key, str(value)] for key, value in first.items()])


def parity_table(worst: dict[str, Any]) -> str:
    """Worst absolute differences."""
    models = list(next(iter(worst.values())))
    rows = [
        [
            method,
            str(sum(entry["recipes"] for entry in by_model.values())),
            *(f"{by_model[model]['worst']:.1e}" for model in models),
        ]
        for method, by_model in worst.items()
    ]
    return table(["method", "merges", *models], rows)


def random_table(random: dict[str, Any]) -> str:
    """Statistics of the random methods."""
    rows = [
        [
            what,
            str(one["seeds"]),
            f"{one['z_rms']:.3f}",
            f"{one['z_max']:.2f}",
            f"{one['variance_ratio']:.4f}",
        ]
        for what, one in random.items()
    ]
    return table(["merge", "seeds", "z, root mean square", "z, largest", "variance, ratio"], rows)


def robustness_table(methods: dict[str, Any]) -> str:
    """Kills and workers."""
    rows = [
        [
            method,
            f"{found['tensors']}",
            ", ".join(str(kill["journalled"]) for kill in found["kills"]),
            f"{sum(kill['identical'] for kill in found['kills'])} of {len(found['kills'])}",
            ", ".join(w for w, identical in found["workers"].items() if identical),
        ]
        for method, found in methods.items()
    ]
    return table(
        [
            "method",
            "tensors",
            "written when killed",
            "identical after --resume",
            "same for workers",
        ],
        rows,
    )


def projection_table(results: dict[str, Any]) -> str:
    """Medians of the rounds; scipy's time is that of its sample, scaled up."""
    rows = []
    for name, contest in results["contests"].items():
        for constraint, rounds in contest["isthmus"].items():
            seconds = median(one["seconds"] for one in rounds)
            worst = max(one["residual"] for one in rounds)
            rows.append(
                [name, f"isthmus, {constraint}", f"{seconds:.1f} s", f"residual {worst:.0e}"]
            )
        for method, rounds in contest["scipy"].items():
            seconds = median(one["for_all"] for one in rounds)
            gap = max(one["largest_difference"] for one in rounds)
            rows.append(
                [
                    name,
                    f"lsq_linear `{method}`, box, from {rounds[0]['sample']:,} programmes",
                    f"{seconds:,.0f} s",
                    f"differs by {gap:.0e}",
                ]
            )
    return table(["experts", "who", "time", "worst"], rows)


REFERENCES = {
    "linear, peft svd": "linear, isthmus",
    "knots linear, full SVD": "knots linear, isthmus",
    "ties, peft ties_svd": "ties, isthmus in full",
}
"""Other programmes' merges, and Isthmus's that computes the same or the like."""


def adapters_table(contests: dict[str, Any]) -> str:
    """Times of merging four adapters of one layer."""
    rows = []
    for size, found in contests.items():
        for name, one in found.items():
            if name == "load":
                continue
            ours = REFERENCES.get(name)
            rows.append(
                [
                    f"{size} x {size}",
                    name,
                    f"{one['seconds']:.3f} s",
                    f"{one['seconds'] / found[ours]['seconds']:,.0f} x {ours}" if ours else "",
                    f"{one['error']:.0e}" if "error" in one else "",
                ]
            )
    return table(["weight", "merge", "time", "ratio", "difference"], rows)


def sets_table(sets: Sequence[dict[str, Any]]) -> str:
    """Merges of whole adapters by the command."""
    rows = [
        [
            one["method"],
            "related" if one["related"] else "unrelated",
            f"{one['layers'] * 4}",
            f"{one['adapters']}",
            f"{one['rank']}",
            f"{one['wall']:.0f} s",
            f"{one['cpu']:.0f} s",
            f"{one['peak'] / 2**20:,.0f} MiB",
        ]
        for one in sets
    ]
    head = ["method", "adapters are", "modules", "adapters", "rank", "wall", "CPU", "peak"]
    return table(head, rows)


def tables() -> dict[str, str]:
    """All tables of the page by name."""
    engine, parity, robustness, projection, adapters = (
        json.loads((HERE / "results" / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("engine", "parity", "robustness", "projection_solvers", "adapters")
    )
    contests = engine["contests"]
    machines = [contest["machine"] for methods in contests.values() for contest in methods.values()]
    return {
        "machine": machine_table([*machines, engine["memory"]["machine"]]),
        "engine": contest_table(contests),
        "rounds": rounds_table(contests),
        "memory": memory_table(engine["memory"]["rows"]),
        "compilation": compilation_table(engine["compilation"]),
        "parity": parity_table(parity["worst_absolute_difference"]),
        "random": random_table(parity["random_methods"]),
        "robustness": robustness_table(robustness["methods"]),
        "projection": projection_table(projection),
        "adapters": adapters_table(adapters["contests"]),
        "sets": sets_table(adapters["sets"]),
    }


def main() -> None:
    """Put the tables into the page."""
    page = PAGE.read_text(encoding="utf-8")
    for name, text in tables().items():
        block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not block.search(page):
            raise SystemExit(f"{PAGE.name} has no place for the table {name!r}")
        page = block.sub(lambda found, text=text: f"{found[1]}{text}{found[2]}", page)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
