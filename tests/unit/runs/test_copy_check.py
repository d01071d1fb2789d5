"""Copies that differ are found and made equal, on real servers."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from autodist.placement.group import Group
from autodist.placement.holder import Holder
from autodist.runs.copy_check import CopyCheck
from autodist.runtime.graph_runner import GraphRunners
from autodist.runtime.variable_slices import VariableSlices
from autodist.runtime.variables import StoredVariable, TrackedVariable
from tests.unit.runtime.servers import LIMIT, running, start_servers

WORKERS = 4
VALUE = np.arange(24.0).reshape(4, 6)


@pytest.fixture(scope="module")
def targets() -> list[str]:
    return start_servers(WORKERS)


class Reduced:
    """The reductions of all workers, which run in threads."""

    def __init__(self) -> None:
        self._barrier, self._arrays = threading.Barrier(WORKERS, timeout=LIMIT), {}

    def reduce(self, worker: int, array: np.ndarray, how: str) -> np.ndarray:
        self._arrays[worker] = array
        self._barrier.wait()
        found = getattr(np, how)([self._arrays[k] for k in range(WORKERS)], axis=0)
        self._barrier.wait()
        return found


def slices_on(runners: list[GraphRunners]) -> list[VariableSlices]:
    home = lambda worker, dtype, device: f"/job:worker/task:{worker}/cpu:0"  # noqa: E731
    return [VariableSlices(one.control, worker, WORKERS, home) for worker, one in enumerate(runners)]


def compare(slices: list[VariableSlices], variables: list[tuple[str, StoredVariable]]) -> None:
    reduced = Reduced()

    def compare_on(worker: int) -> None:
        check = CopyCheck(worker, slices[worker], lambda array, how: reduced.reduce(worker, array, how))
        check.compare(variables, 7)

    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(compare_on, range(WORKERS)))


EVERYWHERE = Holder.whole(VALUE.shape, Group.all_workers(WORKERS))
HALVES = Holder.divided(VALUE.shape, (1, 2), [Group.of_workers((0, 2)), Group.of_workers((1, 3))])
OWNED = Holder.whole(VALUE.shape, Group.of_workers((2,)))


def test_a_copy_that_differs_takes_the_first_holders_value(targets, caplog):
    variables = [TrackedVariable(tf.Variable(VALUE), name, holder) for name, holder in
                 (("a", EVERYWHERE), ("b", HALVES), ("c", OWNED))]  # fmt: skip
    stored = [(one.shared_name, one.stored) for one in variables]
    with running(targets) as runners, caplog.at_level(logging.WARNING, logger="autodist"):
        slices = slices_on(runners)
        slices[0].set(variables)
        compare(slices, stored)
        assert caplog.text == ""
        changed = TrackedVariable(tf.Variable(VALUE + 1e-9 * (VALUE == 23.0)), "b", HALVES)
        slices[3].set([changed], workers=[3])
        compare(slices, stored)
        (record,) = caplog.records
        assert "After step 7, the workers' copies of b differ, by 1e-09 at most" in record.getMessage()
        part = StoredVariable("b/shard_1", tf.float64, (4, 3), Holder.whole((4, 3), Group.of_workers((1, 3))))
        for worker in (1, 3):
            np.testing.assert_array_equal(slices[worker].read(part, worker), VALUE[:, 3:])
        caplog.clear()
        compare(slices, stored)
        assert caplog.text == ""
