"""Cost of saving and restoring 2 GB, and of a step at the same time."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from bench.comparisons import Result
from bench.jobs import ANSWER, output_of

LIMIT = 900.0
OF_DISK = 2.0
"""Limit relative to the raw disk's time for as many bytes."""

BESIDE = 1.1
"""Limit relative to a step without a background save."""

_ACTS = {"save": "save", "restore": "restore", "restore before the first step": "first_restore"}
"""The measured actions, and the names that the process uses; before the first step the script's objects hold the
values.
"""

SHARD_BYTES, MORE_BYTES = 128_000_000, 64 << 20
"""Bytes of the largest shard, and the memory allowed on top of it."""


def compare_checkpoints() -> list[Result]:
    """A save, a restore, the memory that each takes, and a step while a save is in the background.

    Raises:
        JobError: it did not run.
    """
    with tempfile.TemporaryDirectory(prefix="autodist-bench-", dir=Path.cwd()) as folder:
        found = _run(folder)
    most = SHARD_BYTES + MORE_BYTES
    results = []
    for what, name in _ACTS.items():
        ours, theirs, extra = found[name], found[f"{name}_disk"], found[f"{name}_bytes"]
        note = "until the disk has them" if name == "save" else "no bytes are in the system's memory before"
        results.append(
            Result("checkpoint", f"{what}, 2 GB", f"{ours:.2f} s", f"{theirs:.2f} s", ours / theirs, OF_DISK, note)
        )
        results.append(
            Result("checkpoint", f"{what}, extra peak", _mb(extra), _mb(most), extra / most, 1.0, "of what is allowed")
        )
    alone, beside = found["step"], found["step_beside"]
    note = f"{found['steps_beside']:.0f} steps were made beside it"
    results.append(Result("checkpoint", "step beside a save", _ms(beside), _ms(alone), beside / alone, BESIDE, note))
    return results


def _run(folder: str) -> dict[str, float]:
    lines = output_of("checkpoints: it", "bench.save_variables", folder, limit=LIMIT, threads=None)
    (line,) = (one for one in lines if one.startswith(ANSWER))
    answer: dict[str, float] = json.loads(line.removeprefix(ANSWER))
    return answer


def _mb(size: float) -> str:
    return f"{size / 1e6:.0f} MB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
