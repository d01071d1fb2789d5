"""What is compared with what, and how the ratios come out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.jobs import Length, Way, running


@dataclass(frozen=True)
class Comparison:
    """Two ways of training a model, and what the ratio of their step times shall be.

    Attributes:
        group: under which the comparison is asked for.
        ours: what is measured.
        peer: what it is measured against.
        target: the ratio of ours to the peer's is to be at most this.
    """

    group: str
    ours: Way
    peer: Way
    target: float


@dataclass(frozen=True)
class Result:
    """A line of the table.

    Attributes:
        group: of comparisons.
        what: was measured.
        ours: as measured, with its unit.
        peer: as measured, with its unit.
        ratio: of the two.
        target: what it was to be at most.
        note: what else is to be said.
    """

    group: str
    what: str
    ours: str
    peer: str
    ratio: float
    target: float
    note: str = ""


def comparisons() -> list[Comparison]:
    """All comparisons of step times."""
    found = []
    for model, target in (("mlp", 0.40), ("mobilenet", 0.40), ("embedding", 0.08)):
        ours, peer = Way("autodist", model, 1, 2), Way("mirrored", model, 1, 2)
        found.append(Comparison("mirrored", ours, peer, target))
    for model, target in (("mlp", 0.45), ("mobilenet", 0.62), ("embedding", 0.15), ("lstm", 1.0)):
        ours, peer = Way("autodist", model, 2), Way("multi-worker", model, 2)
        found.append(Comparison("mwms", ours, peer, target))
    for model, target in (("mlp", 0.75), ("embedding", 0.06), ("lstm", 0.85)):
        ours, peer = Way("autodist", model, 2, builder="PSLoadBalancing"), Way("parameter-server", model, 2)
        found.append(Comparison("ps", ours, peer, target))
    found += [Comparison("alone", Way("autodist", m), Way("alone", m), 1.03) for m in ("mlp", "embedding", "tiny")]
    return found


def compare(comparison: Comparison, length: Length) -> Result:
    """Gives both ways turns in one run, the peer first.

    The ratio is the median over the turns of the ratio of the two medians, so that what keeps the machine busy for
    longer than a turn falls on both.

    Raises:
        JobError: one of them did not run.
    """
    with running([comparison.peer, comparison.ours], length) as (peer, ours):
        for _ in range(length.turns):
            peer.turn()
            ours.turn()
        for job in (peer, ours):
            job.finish()
        return _result(comparison, ours.seconds, peer.seconds)


def _result(comparison: Comparison, ours: Sequence[list[float]], peer: Sequence[list[float]]) -> Result:
    by_turn = [statistics.median(a) / statistics.median(b) for a, b in zip(ours, peer, strict=True)]
    times = [statistics.median(s for turn in turns for s in turn) for turns in (ours, peer)]
    best = [min(s for turn in turns for s in turn) for turns in (ours, peer)]
    note = f"turns {min(by_turn):.2f} to {max(by_turn):.2f}; best steps {best[0] / best[1]:.2f}"
    if comparison.group == "alone":
        note = f"{(times[0] - times[1]) * 1e3:+.2f} ms a step, best {(best[0] - best[1]) * 1e3:+.2f} ms; {note}"
    return Result(
        comparison.group, f"{comparison.ours.model}, step", f"{times[0] * 1e3:.2f} ms", f"{times[1] * 1e3:.2f} ms",
        statistics.median(by_turn), comparison.target, note,
    )  # fmt: skip
