"""A mesh of four devices on two workers or one equals two replicas: Keras, a function, checkpoints, a session."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.equivalence.harness import ROOT, run_to_its_end

pytestmark = [pytest.mark.equivalence, pytest.mark.processes, pytest.mark.slow]


def told_by(machines: str, checkpoints: Path, forked_workers: int = 0) -> tuple[str, list[str]]:
    script = [sys.executable, "-m", "tests.equivalence.staged_script", machines, str(checkpoints / machines)]
    ended = run_to_its_end(script, ROOT, 300, is_forked=True, forked_workers=forked_workers)
    assert ended.problem is None, ended.output
    return ended.output, [line for line in ended.output.splitlines() if "TOLD" in line]


STEPS = ("step", "saved", "restored", "set")
"""Lines of steps, which return a loss, and the rows of the worker's own examples."""


def numbers(line: str) -> list[float]:
    what, *values = line.partition("TOLD ")[2].split()
    shared = values[:1] if what in STEPS else values
    return [x for value in shared for x in np.frombuffer(bytes.fromhex(value))]


@functools.lru_cache(maxsize=1)
def told_by_replicas(folder: Path) -> list[str]:
    return told_by("replicas of mesh", folder)[1]


@pytest.mark.parametrize(
    ("machines", "workers"),
    [("mesh of tensors on one", 1), ("mesh of slices of tensors on two", 2)],
)
def test_a_mesh_of_two_by_two_equals_two_replicas(machines: str, workers: int, tmp_path: Path) -> None:
    alone = told_by_replicas(tmp_path)
    output, on_mesh = told_by(machines, tmp_path, forked_workers=workers - 1)
    named = f"{workers} workers" if workers > 1 else "1 worker"
    assert f"Mesh: 4 places on {named}, mesh {{data: 2, model: 2}}" in output
    held = "384 B" if "slices" in machines else "600 B"
    assert f"each place holds {held} of 1.13 kB" in output
    assert "copies of" not in output
    for worker in range(workers):
        start = f"[localhost:{worker}] TOLD" if worker else "TOLD"
        own = [line for line in on_mesh if line.startswith(start)]
        assert len(own) == len(alone) == 13
        for expected, found in zip(alone, own, strict=True):
            assert numbers(expected)
            np.testing.assert_allclose(numbers(found), numbers(expected), rtol=1e-9, atol=1e-12, err_msg=expected)
