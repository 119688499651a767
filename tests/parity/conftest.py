"""What the comparison needs: mergekit, models, and a place for what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from families import ARCHITECTURES, make_family
from measurements import Measurements
from peer import READY, ROOT, VERSION, Mergekit

RESULTS = ROOT / "benchmarks" / "results" / "parity.json"


@pytest.fixture(scope="session")
def mergekit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mergekit]:
    if not READY.exists():
        pytest.skip("no .venv-mergekit with mergekit in it; `make parity` makes one")
    with Mergekit(tmp_path_factory.mktemp("mergekit") / "log.txt") as peer:
        yield peer


@pytest.fixture(scope="session")
def measurements(request: pytest.FixtureRequest, mergekit: Mergekit) -> Iterator[Measurements]:
    """Written to benchmarks/results at the end of a complete, successful `make parity`."""
    found = Measurements()
    yield found
    session, options = request.session, request.config.option
    everything = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    complete = not options.keyword and everything == {item.path.name for item in session.items}
    if options.markexpr == "parity" and complete and not session.testsfailed:
        content = {
            "mergekit": {"version": VERSION, **mergekit.versions},
            "isthmus": {
                "version": version("isthmus"),
                "torch": version("torch"),
                "numpy": version("numpy"),
            },
            "worst_absolute_difference": found.worst,
            "entries_tied_at_the_threshold": found.excluded_ties,
            "random_methods": found.random,
        }
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@pytest.fixture(scope="session", params=ARCHITECTURES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[Path]]:
    """A base and its experts, and what they are."""
    return request.param, make_family(request.param, tmp_path_factory.mktemp(request.param))
