"""A pipeline of two processes: steps of Keras and of a function equal that many replicas on one worker, bit for bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.equivalence.harness import ROOT, run_to_its_end

pytestmark = [pytest.mark.equivalence, pytest.mark.processes, pytest.mark.slow]


TITLES = {
    "stages": "Pipeline: 2 stages, 3 micro-batches by 1F1B",
    "mesh": "Pipeline: 2 pipelines of 2 stages, 1 micro-batch by GPipe",
}


def told_by(machines: str, checkpoints: Path, forked_workers: int = 0) -> list[str]:
    script = [sys.executable, "-m", "tests.equivalence.staged_script", machines, str(checkpoints / machines)]
    ended = run_to_its_end(script, ROOT, 240, is_forked=True, forked_workers=forked_workers)
    assert ended.problem is None, ended.output
    assert TITLES.get(machines, "") in ended.output
    logged = "split into 3 micro-batches for the pipeline: 1 of them are empty"
    assert (logged in ended.output) == (machines == "stages")
    assert ("ad.stage has no effect under AllReduce" in ended.output) == machines.startswith("replicas")
    return [line for line in ended.output.splitlines() if "TOLD" in line]


def assert_all_tell(alone: list[str], staged: list[str], workers: int) -> None:
    """The chief's lines and every other worker's are those of replicas on one worker."""
    for worker in range(1, workers):
        other = f"[localhost:{worker}] "
        assert [line.removeprefix(other) for line in staged if line.startswith(other)] == alone
    assert [line for line in staged if line.startswith("TOLD")] == alone
    assert len(alone) == 13


def products(dump: Path, worker: int) -> list[int]:
    """Returns the number of a worker's matrix products in each step, for layers and their gradients."""
    steps = sorted(dump.iterdir(), key=lambda folder: int(folder.name.removeprefix("step_")))
    last = [max((step / f"worker_{worker}").iterdir(), key=lambda f: int(f.name.split("_")[0])) for step in steps]
    return [sum(" = MatMul[" in line for line in (f / "step.txt").read_text().splitlines()) for f in last]


def test_fit_evaluate_predict_and_a_function_are_those_of_replicas_on_one_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump, alone = tmp_path / "dump", told_by("replicas of stages", tmp_path)
    monkeypatch.setenv("AUTODIST_DUMP", str(dump))
    staged = told_by("stages", tmp_path)
    assert_all_tell(alone, staged, workers=2)
    # Evaluated before training, trained, evaluated, predicted, trained: two layers a stage; x needs no gradient. The
    # first stage computes both layers anew, and the last, which goes back at once, none.
    first, last = (products(dump, worker)[:5] for worker in range(2))
    assert first[1:] == [3 * 7, 3 * 2, 3 * 2, 3 * 7]
    assert last == [0, 3 * 6, 3 * 2, 3 * 2, 3 * 6]


def test_two_pipelines_side_by_side_give_the_bits_of_two_replicas(tmp_path: Path) -> None:
    assert_all_tell(told_by("replicas of mesh", tmp_path), told_by("mesh", tmp_path, forked_workers=3), workers=4)
