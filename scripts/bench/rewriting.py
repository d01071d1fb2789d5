"""Time to rewrite a step, and its growth with the graph and the replicas."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass

from bench.comparisons import Result
from bench.jobs import output_of

LIMIT = 600.0
MOST_SECONDS = 1.0
MOST_GROWTH = 1.2
"""Limit for the growth of the time per node × replica: linear code stays at 1, and timings are noisy."""

FEWEST, *MORE = ("1x2", "1x4", "1x8")
"""A single replica is left out: its step is neither replicated nor joined."""

ON_WORKERS = "2x1"


@dataclass(frozen=True)
class Timed:
    """The rewriting of one model's step.

    Attributes:
        nodes: the number of nodes of the captured graph.
        seconds: median time for each cluster.
    """

    nodes: int
    seconds: dict[str, float]

    def each(self, cluster: str) -> float:
        """Seconds for each node and replica."""
        return self.seconds[cluster] / (self.nodes * int(cluster.partition("x")[2]))


def compare_rewriting(repeat: int) -> list[Result]:
    """Times for ResNet50 with Adam, and their growth.

    Raises:
        JobError: the step was not captured or rewritten.
    """
    resnet = _time("resnet50", repeat)
    mobilenet = _time("mobilenet", repeat)
    return [
        *(_absolute(resnet, cluster) for cluster in (FEWEST, ON_WORKERS)),
        *(
            _growth(f"resnet50, {cluster} to {FEWEST}, each node × replica", resnet.each(cluster), resnet.each(FEWEST))
            for cluster in MORE
        ),
        _growth(
            f"resnet50 ({resnet.nodes} nodes) to mobilenet ({mobilenet.nodes}), each node",
            resnet.each(FEWEST), mobilenet.each(FEWEST),
        ),
    ]  # fmt: skip


def _absolute(timed: Timed, cluster: str) -> Result:
    seconds = timed.seconds[cluster]
    note = f"{timed.nodes} nodes; processor time, without the import into TensorFlow"
    limit = f"{MOST_SECONDS:.2f} s"
    return Result("rewrite", f"resnet50, {cluster}", f"{seconds:.2f} s", limit, seconds / MOST_SECONDS, 1.0, note)


def _growth(what: str, ours: float, base: float) -> Result:
    return Result("rewrite", what, f"{ours * 1e6:.1f} µs", f"{base * 1e6:.1f} µs", ours / base, MOST_GROWTH)


def _time(model: str, repeat: int) -> Timed:
    arguments = (model, FEWEST, *MORE, ON_WORKERS, f"--repeat={repeat}")
    figures = json.loads(output_of(f"{model}: rewriting", "bench.rewrite_step", *arguments, limit=LIMIT)[-1])
    return Timed(figures["nodes"], {cluster: statistics.median(times) for cluster, times in figures["seconds"].items()})
