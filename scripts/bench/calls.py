"""Overhead of a call whose step computes next to nothing: processor time, against the script alone."""

from __future__ import annotations

import json

from bench.comparisons import Result
from bench.jobs import output_of

LIMIT = 600.0
MOST = {("function", 1): 0.5, ("function", 2): 0.5, ("session", 1): 0.5, ("session", 2): 0.5, ("fit", 1): 1.0}
"""Limits by way and replicas, relative to `tf.function`, `tf.compat.v1.Session` or Keras's own `fit`."""

TOLD = {"function": "@ad.function", "session": "session.run", "fit": "fit, steps_per_execution=10, a step"}


def compare_calls() -> list[Result]:
    """Measures Dense(32 → 10), by each way.

    Raises:
        JobError: one of them failed.
    """
    alone = {way: _microseconds(way, 0) for way in dict.fromkeys(way for way, _ in MOST)}
    results = []
    for (way, replicas), most in MOST.items():
        ours, peer = _microseconds(way, replicas), alone[way]
        what = f"{TOLD[way]}, Dense(32 → 10) on {replicas} {'replica' if replicas == 1 else 'replicas'}"
        results.append(Result("calls", what, f"{ours:.0f} µs", f"{peer:.0f} µs", ours / peer, most, "processor time"))
    return results


def _microseconds(way: str, replicas: int) -> float:
    figures = output_of(f"{way} on {replicas} replicas", "bench.call_step", way, str(replicas), limit=LIMIT)
    return float(json.loads(figures[-1]))
