"""The comparisons, and the computation of their ratios."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bench.jobs import TRANSPORTS, Job, Length, Way, running

GOAL = 1.25
"""Goal for a step of several replicas, as a multiple of the limit."""


@dataclass(frozen=True)
class Comparison:
    """Two ways of training a model, and the largest allowed ratio of their step times.

    Attributes:
        group: name of the group that selects the comparison.
        ours: the measured way.
        peer: the way that it is compared with.
        floor: the ratio measured when it was set, on two cores; no change may fall behind it.
    """

    group: str
    ours: Way
    peer: Way
    floor: float


@dataclass(frozen=True)
class Limit:
    """The least time that a step can take.

    Attributes:
        step: seconds of AutoDist's step on one device, in the same run.
        sent_bytes: bytes that AutoDist's processes send one another in a step.
        transfer: seconds to transfer as many bytes between as many processes that do nothing else.
        transport: the fastest one, which takes this time.
    """

    step: float
    sent_bytes: float
    transfer: float
    transport: str = ""

    @property
    def seconds(self) -> float:
        return self.step + self.transfer

    def __str__(self) -> str:
        if not self.transfer:
            return f"{self.step * 1e3:.2f} ms"
        transfer = f"{self.transfer * 1e3:.2f} ms for {self.sent_bytes / 1e6:.2f} MB by {self.transport}"
        return f"{self.step * 1e3:.2f} + {transfer}"


@dataclass(frozen=True)
class Result:
    """A line of the table.

    Attributes:
        group: the group of comparisons.
        what: description of the measurement.
        ours: AutoDist's figure, with its unit.
        peer: the peer's figure, with its unit.
        ratio: the ratio of the two figures.
        floor: largest allowed ratio.
        note: further remarks.
        limit: the least possible time, as text; "" if unknown.
        of_limit: ours as a multiple of it.
        numbers: data for plots.
    """

    group: str
    what: str
    ours: str
    peer: str
    ratio: float
    floor: float
    note: str = ""
    limit: str = ""
    of_limit: float | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)


def comparisons() -> Iterator[Comparison]:
    """Yields all comparisons of step times, with the ratios measured on two cores when the floors were set."""
    for model, floor in (("mlp", 0.56), ("mobilenet", 0.45), ("embedding", 0.26)):
        ours, peer = Way("autodist", model, 1, 2), Way("mirrored", model, 1, 2)
        yield Comparison("mirrored", ours, peer, floor)
    two_workers = (("mlp", 0.62), ("mobilenet", 0.64), ("embedding", 0.40), ("embedding-adagrad", 0.23), ("lstm", 0.96))
    for model, floor in two_workers:
        ours, peer = Way("autodist", model, 2), Way("multi-worker", model, 2)
        yield Comparison("mwms", ours, peer, floor)
    for model, floor in (("mlp", 0.70), ("embedding", 0.125), ("lstm", 0.30)):
        ours, peer = Way("autodist", model, 2, builder="PSLoadBalancing"), Way("parameter-server", model, 2)
        yield Comparison("ps", ours, peer, floor)
    for model, floor in (("mobilenet", 0.56), ("lstm", 0.53)):
        peer = Way("evaluation-alone", model, of_cores=2)
        yield Comparison("evaluate", Way("evaluation", model, 2), peer, floor)
    for builder, floor in (("FSDP", 1.25), ("FSDP without prefetch", 1.5)):
        yield Comparison(
            "fsdp", Way("autodist", "transformer", 2, builder=builder), Way("autodist", "transformer", 2), floor
        )
    for clients in (1, 2):
        ours, peer = (Way(name, "mlp-sgd", clients, 4 // clients, "Mesh") for name in ("mesh", "dtensor"))
        yield Comparison("mesh", ours, peer, 1.0)
    on_mesh, whole = (Way("mesh", "transformer", 4, builder=builder) for builder in ("Mesh", "AllReduce"))
    yield Comparison("mesh", on_mesh, whole, 1.5)
    for framework in ("jax", "torch"):
        for model in ("mlp", "mobilenet", "embedding", "lstm"):
            for workers, replicas in ((1, 1), (1, 2), (2, 1)) if framework == "jax" else ((1, 1), (2, 1)):
                ours, peer = (Way(name, model, workers, replicas) for name in ("autodist", framework))
                yield Comparison("frameworks", ours, peer, 1.0)
    for model in ("mlp", "embedding", "tiny"):
        yield Comparison("alone", Way("autodist", model), Way("alone", model), 1.03)


def compare(comparison: Comparison, length: Length) -> Result:
    """Runs both ways in turns in one run, the peer first, together with AutoDist on one device.

    The ratio is the median over the turns of the ratio of the two medians, so that load lasting longer than a turn
    affects both.

    Raises:
        JobError: one of them did not run.
    """
    ours, peer = comparison.ours, comparison.peer
    is_limited = comparison.group not in ("alone", "evaluate", "fsdp", "frameworks", "mesh")
    ways = [peer, ours, Way("autodist", ours.model)] if is_limited else [peer, ours]
    with running(ways, length) as jobs:
        for _ in range(length.turns):
            for job in jobs:
                job.turn()
        for job in jobs:
            job.finish()
    limit = _limit(jobs[1], jobs[2], length) if is_limited else None
    result = _result(comparison, jobs[1].seconds, jobs[0].seconds, limit)
    if comparison.group == "frameworks":
        return replace(result, what=f"{ours.model} on {peer.name}, {peer.workers} × {peer.replicas}")
    if comparison.group != "mesh":
        return result
    sent = [f"{min(job.sent_bytes) / 1e6:.2f} MB" for job in (jobs[1], jobs[0])]
    against = "AllReduce" if peer.name == "mesh" else f"{peer.workers} × {peer.replicas} places"
    return replace(
        result, what=f"{result.what} against {against}", note=f"{' against '.join(sent)} sent; {result.note}"
    )


def _limit(ours: Job, on_one_device: Job, length: Length) -> Limit:
    step = _median(on_one_device.seconds)
    if ours.way.workers == 1:
        return Limit(step, 0, 0)
    sent = min(ours.sent_bytes)  # other processes of the machine may send, too
    ways = [
        Way("transfer", ours.way.model, ours.way.workers, builder=transport, sent_bytes=round(sent))
        for transport in TRANSPORTS
    ]
    with running(ways, length) as transfers:
        for _ in range(length.turns):
            for transfer in transfers:
                transfer.turn()
        for transfer in transfers:
            transfer.finish()
    seconds = {transfer.way.builder: _median(transfer.seconds) for transfer in transfers}
    best = min(seconds, key=seconds.__getitem__)
    return Limit(step, sent, seconds[best], best)


def _median(turns: Sequence[Sequence[float]]) -> float:
    return statistics.median(s for turn in turns for s in turn)


def _result(
    comparison: Comparison, ours: Sequence[list[float]], peer: Sequence[list[float]], limit: Limit | None
) -> Result:
    by_turn = [statistics.median(a) / statistics.median(b) for a, b in zip(ours, peer, strict=True)]
    times = [_median(turns) for turns in (ours, peer)]
    best = [min(s for turn in turns for s in turn) for turns in (ours, peer)]
    note = f"turns {min(by_turn):.2f} to {max(by_turn):.2f}; best steps {best[0] / best[1]:.2f}"
    if comparison.group == "alone":
        note = f"{(times[0] - times[1]) * 1e3:+.2f} ms a step, best {(best[0] - best[1]) * 1e3:+.2f} ms; {note}"
    what = "evaluation" if comparison.group == "evaluate" else "step"
    what += f" under {comparison.ours.builder}" if comparison.group == "fsdp" else ""
    return Result(
        comparison.group, f"{comparison.ours.model}, {what}", f"{times[0] * 1e3:.2f} ms", f"{times[1] * 1e3:.2f} ms",
        statistics.median(by_turn), comparison.floor, note,
        limit="" if limit is None else str(limit), of_limit=None if limit is None else times[0] / limit.seconds,
        numbers={"workers": comparison.ours.workers, "replicas": comparison.ours.replicas},
    )  # fmt: skip
