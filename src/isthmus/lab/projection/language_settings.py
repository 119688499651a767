"""What the experiment with a language model is asked, and what it finds out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import exp
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from isthmus.lab.candidates import Recipe
from isthmus.lab.progress import Stage
from isthmus.lab.projection.results import Checks
from isthmus.lab.results_file import write_results


@dataclass(frozen=True)
class Steps:
    """A run of AdamW on a language model.

    Attributes:
        steps: Number of steps.
        batch: Sequences per step.
        learning_rate: Peak rate, reached after a tenth of the steps and then lowered to a tenth.
    """

    steps: int
    batch: int
    learning_rate: float


@dataclass(frozen=True)
class LanguageSettings:
    """Everything that decides the numbers.

    Attributes:
        seeds: Each fixes the draw of the texts, the order of the experts' training and the draws of
            random methods. The base is the same for all.
        base: `small`: a Llama that is trained here. `smollm2`: SmolLM2-135M, out of its package; what says
            how the small one is made then has no meaning.
        layers: Blocks of the base, a Llama.
        width: Of its hidden states.
        inner: Of its gated MLP.
        heads: Of attention.
        vocabulary: Of its byte-level tokenizer, trained on the same texts.
        length: Tokens of a sequence.
        pretraining: Of the base, on all domains alike.
        fine_tuning: Of an expert, on its own domain.
        pretraining_texts: Texts of each domain that the base and its tokenizer learn from.
        training_texts: Other texts of each domain that its expert learns from.
        calibration: How many of these it is calibrated on.
        validation: Texts of each domain that scales and densities are chosen on.
        test: Texts of each domain that are reported on.
        tries: How many settings a heuristic may look at.
        threads: Threads that torch computes with.
    """

    seeds: tuple[int, ...] = (0,)
    base: Literal["small", "smollm2"] = "small"
    layers: int = 4
    width: int = 192
    inner: int = 512
    heads: int = 4
    vocabulary: int = 4096
    length: int = 96
    pretraining: Steps = Steps(300, 16, 2e-3)
    fine_tuning: Steps = Steps(100, 16, 5e-4)
    pretraining_texts: int = 600
    training_texts: int = 600
    calibration: int = 128
    validation: int = 60
    test: int = 150
    tries: int = 6
    threads: int = 2

    @classmethod
    def smollm2(cls, seeds: tuple[int, ...]) -> LanguageSettings:
        """SmolLM2 in short runs: what it costs is some 40 minutes of two processors for each seed."""
        return cls(
            seeds=seeds,
            base="smollm2",
            fine_tuning=Steps(30, 4, 5e-5),
            training_texts=400,
            calibration=48,
            validation=8,
            test=24,
            tries=4,
        )

    def quick(self) -> LanguageSettings:
        """The same with a tenth of the steps and half of the tries: to see it run."""
        return replace(
            self,
            pretraining=replace(self.pretraining, steps=self.pretraining.steps // 10),
            fine_tuning=replace(self.fine_tuning, steps=self.fine_tuning.steps // 10),
            tries=3,
        )


@dataclass(frozen=True)
class LanguageRow:
    """One model.

    Attributes:
        name: Of the merge.
        loss: Mean negative log-likelihood of a token, in nats, by domain.
        captured: Energy by the layer-local objective on the experts' inputs; None for what is no merge.
        seconds: Of the merge.
        setting: What validation chose.
    """

    name: str
    loss: dict[str, float]
    captured: float | None = None
    seconds: float | None = None
    setting: str = ""

    def perplexity(self, domain: str) -> float:
        """Of one domain."""
        return exp(self.loss[domain])

    @property
    def mean_perplexity(self) -> float:
        """The geometric mean over domains."""
        return exp(fmean(self.loss.values()))


@dataclass(frozen=True)
class LanguageSeed:
    """One seed.

    Attributes:
        seed: The seed.
        rows: Base, each expert, each domain under its own expert, then one row per merge.
        recipes: By name of the merge's row.
        checks: Of the solutions' J, by name.
    """

    seed: int
    rows: tuple[LanguageRow, ...]
    recipes: Mapping[str, Recipe]
    checks: Mapping[str, Checks]


@dataclass(frozen=True)
class LanguageResults:
    """All seeds.

    Attributes:
        settings: What was asked for.
        parameters: Numbers of the base.
        domains: In the order of the columns.
        seeds: Results by seed; all have the same rows.
        stages: Times, in order.
        environment: Versions and threads.
    """

    settings: LanguageSettings
    parameters: int
    domains: tuple[str, ...]
    seeds: tuple[LanguageSeed, ...]
    stages: tuple[Stage, ...]
    environment: Mapping[str, str]

    @property
    def rows(self) -> tuple[LanguageRow, ...]:
        """Means of loss, energy and time over seeds."""
        means = []
        for same in zip(*(seed.rows for seed in self.seeds), strict=True):
            energies = [row.captured for row in same if row.captured is not None]
            seconds = [row.seconds for row in same if row.seconds is not None]
            means.append(
                LanguageRow(
                    same[0].name,
                    {domain: fmean(row.loss[domain] for row in same) for domain in self.domains},
                    fmean(energies) if energies else None,
                    fmean(seconds) if seconds else None,
                    ", ".join(dict.fromkeys(row.setting for row in same if row.setting)),
                )
            )
        return tuple(means)

    def spread(self, name: str) -> float | None:
        """Standard deviation over seeds of a row's mean perplexity; None for one seed."""
        values = [
            row.mean_perplexity for seed in self.seeds for row in seed.rows if row.name == name
        ]
        return stdev(values) if len(values) > 1 else None

    @property
    def checks(self) -> Checks:
        """Of all merges and seeds together."""
        found = [
            (f"{name}, seed {seed.seed}", checks)
            for seed in self.seeds
            for name, checks in seed.checks.items()
        ]
        return Checks(
            sum(checks.compared for _, checks in found),
            tuple(f"{name}: {one}" for name, checks in found for one in checks.violations),
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values, with the means written out."""
        values = asdict(self)
        values["mean_over_seeds"] = [
            {
                **asdict(row),
                "perplexity": {domain: row.perplexity(domain) for domain in self.domains},
                "mean_perplexity": row.mean_perplexity,
                "spread_of_mean_perplexity": self.spread(row.name),
            }
            for row in self.rows
        ]
        values["checks"] = asdict(self.checks)
        return values

    def write(self, path: Path) -> None:
        """Write the JSON form."""
        write_results(path, self.as_json(), indent=1)
