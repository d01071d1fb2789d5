"""Peak memory of a worker, against that of the script alone."""

from __future__ import annotations

from dataclasses import replace

from bench.comparisons import Result
from bench.jobs import Length, Way, running

GRADIENT_BYTES = {"mlp": 3_962_890 * 4, "mobilenet": 2_236_682 * 4, "embedding": 256 * 20 * (64 + 1) * 4}
"""Bytes of one copy of a worker's gradients; the embedding's are the rows used by a global batch, with their ids."""

MODELS = tuple(GRADIENT_BYTES)
TARGET = 1.15


def compare_memory(model: str, length: Length) -> Result:
    """Compares the peak memory of the largest worker, minus one copy of the gradients, with the script alone.

    Raises:
        JobError: one of them did not run.
    """
    with running([Way("alone", model), Way("autodist", model, 2)], replace(length, turns=1)) as jobs:
        for job in jobs:
            job.turn()
        (alone,), workers = (job.finish() for job in jobs)
    ours = max(workers)
    gradients = GRADIENT_BYTES[model]
    note = f"less {gradients / 1e6:.1f} MB of gradients; of {len(workers)} workers the one that needed most"
    ratio = (ours - gradients) / alone
    return Result("memory", f"{model}, peak", f"{ours / 1e6:.0f} MB", f"{alone / 1e6:.0f} MB", ratio, TARGET, note)
