"""The plan that `Auto` chooses, against the best of a reference set; and its predicted step time, against the real one.

All plans of a cell take turns in one run. The fastest ones are timed once more in a run of their own, together with the
chosen one: the fastest of many noisy medians is too good. The ratio's lower bound (90 %, bootstrap over the turns)
counts.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bench.comparisons import Result
from bench.jobs import Job, Length, Way, running

REFERENCE = (
    "AllReduce", "AllReduce in small groups", "ShardedAllReduce", "PS", "PSLoadBalancing", "PartitionedPS", "FSDP",
)  # fmt: skip
TABLES = ("embedding", "embedding-adagrad")
"""Models with a large table, for which Parallax is another plan."""

MODELS = ("mlp", "mobilenet", *TABLES, "lstm", "transformer")
RATES = (0, 1000, 100)
"""Mbit/s between two workers; 0: unlimited."""

FASTEST = 3
"""Number of reference plans that are timed once more."""

MOST, PREDICTED = 1.10, 0.25
"""The largest ratio to the best plan, and the largest error of the prediction on a machine shared with others."""

STEPS = 6
"""Steps of a turn over a slow link."""

DRAWS = 1000
LIMIT = 1800.0
"""Time limit in seconds for all plans of a cell."""


@dataclass(frozen=True)
class Cell:
    """A model on some workers with links of one rate.

    Attributes:
        model: name of the model.
        workers: the number of workers.
        rate: Mbit/s between two workers, in each direction; 0: unlimited.
    """

    model: str
    workers: int = 2
    rate: float = 0

    def __str__(self) -> str:
        return f"{self.model}, {self.workers} workers, {f'{self.rate:.0f} Mbit/s' if self.rate else 'loopback'}"

    def way(self, builder: str) -> Way:
        return Way("autodist", self.model, self.workers, builder=builder, rate=self.rate * 1e6 / 8)


def cells() -> Iterator[Cell]:
    """Yields all cells that are measured. A relay connects two workers, so slow links have two."""
    for model in MODELS:
        for rate in RATES:
            yield Cell(model, rate=rate)
        yield Cell(model, workers=4)


def compare_auto(cell: Cell, length: Length) -> list[Result]:
    """Compares the chosen plan with the best of the reference set, and its prediction with its time.

    Raises:
        JobError: a plan did not run.
    """
    length = replace(length, limit=LIMIT)
    if cell.rate:  # steps may take seconds, and vary little
        length = replace(length, warmup=3, turns=2, steps=STEPS)
    builders = [*REFERENCE, *(["Parallax"] if cell.model in TABLES else [])]
    jobs = _run(cell, builders, length)
    ranked = sorted(jobs, key=_median)
    auto, *others = _run(cell, ["Auto", *(job.way.builder for job in ranked[:FASTEST])], length)
    best = min(others, key=_median)
    report = auto.reports[0]
    took, of_best = _median(auto), _median(best)
    low, high = _interval(auto, best)
    others_note = ", ".join(f"{job.way.builder} {_median(job) * 1e3:.1f}" for job in ranked)
    chosen = Result(
        "auto", f"{cell}: {report['chosen']}", f"{took * 1e3:.2f} ms", f"{of_best * 1e3:.2f} ms by {best.way.builder}",
        low, MOST, f"{took / of_best:.2f} ({low:.2f} to {high:.2f}); first run: {others_note}",
        numbers={"chosen": took, "best": of_best, "low": low, "high": high},
    )  # fmt: skip
    terms = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in report["terms"].items())
    error = abs(report["predicted"] / took - 1)
    predicted = Result(
        "auto", f"{cell}: prediction", f"{report['predicted'] * 1e3:.2f} ms", f"{took * 1e3:.2f} ms measured", error,
        PREDICTED, terms, numbers={"predicted": report["predicted"], "measured": took},
    )  # fmt: skip
    return [chosen, predicted]


def _run(cell: Cell, builders: Sequence[str], length: Length) -> list[Job]:
    with running([cell.way(builder) for builder in builders], length) as jobs:
        for _ in range(length.turns):
            for job in jobs:
                job.turn()
        for job in jobs:
            job.finish()
    return jobs


def _median(job: Job) -> float:
    """Returns the median over the turns: of medians, or of means over a slow link, on which steps differ."""
    of_turn = statistics.mean if job.way.is_relayed else statistics.median
    return statistics.median(map(of_turn, job.seconds))


def _interval(ours: Job, best: Job) -> tuple[float, float]:
    """Returns the bounds of the ratio of two jobs: 90 % of the medians of drawn turns lie between them."""
    ratios = [statistics.mean(a) / statistics.mean(b) for a, b in zip(ours.seconds, best.seconds, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return medians[DRAWS // 20], medians[-DRAWS // 20]
