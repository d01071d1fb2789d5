"""Step times and peak memory on GPUs: AutoDist, the script alone on one device, and MirroredStrategy, in turns."""

from __future__ import annotations

import statistics

from bench.jobs import Job, Length, Way, running

WARMUP, TURNS, STEPS, SETTLING = 5, 3, 20, 2


def measure(model: str, gpus: int, limit: float) -> str:
    """Returns the figures of a model as text.

    Args:
        model: name of the model in `bench.models`.
        gpus: number of replicas of AutoDist and MirroredStrategy, each on a GPU.
        limit: seconds.

    Raises:
        JobError: one of them did not run.
    """
    length = Length(WARMUP, TURNS, STEPS, SETTLING, limit)
    names = (("autodist", gpus), ("alone", 1), ("mirrored", gpus))
    with running([Way(name, model, replicas=replicas, on_gpus=True) for name, replicas in names], length) as jobs:
        for _ in range(TURNS):
            for job in jobs:
                job.turn()
        for job in jobs:
            job.finish()
    ours, alone, mirrored = jobs
    return (
        f"{gpus} GPU{'s' if gpus > 1 else ''}: AutoDist {_figures(ours)}; one device {_figures(alone)}, ratio "
        f"{_ratio(ours, alone):.2f}; MirroredStrategy {_figures(mirrored)}, ratio {_ratio(ours, mirrored):.2f}"
    )


def _figures(job: Job) -> str:
    milliseconds = statistics.median(s for turn in job.seconds for s in turn) * 1e3
    return f"{milliseconds:.2f} ms, peak {job.reports[0]['gpu_bytes'] / 1e6:.0f} MB"


def _ratio(ours: Job, peer: Job) -> float:
    """Returns the median over the turns of the ratio of the two medians, as `bench.comparisons`."""
    pairs = zip(ours.seconds, peer.seconds, strict=True)
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)
