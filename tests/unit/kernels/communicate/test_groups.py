"""Reductions over groups that are a part of the workers: each group trains as a run of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf

from autodist.batch.examples import share_of, take
from autodist.compressors import Float16
from autodist.graph.step import ReplicatedStep
from autodist.kernels.base import Context, Kernel
from autodist.kernels.pipeline import KERNELS
from autodist.kernels.replicate.replicate import Replicate
from autodist.placement.group import Group
from autodist.proto import strategy_pb2
from tests.unit.kernels.communicate.test_reduce_by_collective import by, run_together
from tests.unit.kernels.in_one_process import Session, capture, one_device, plan, train

Spec = strategy_pb2.AllReduce
ROWS, WIDTH = 9, 40


@dataclass(frozen=True)
class InGroups(Kernel[ReplicatedStep, ReplicatedStep]):
    """Replaces the group of each pending reduction by the one of `groups` that has this worker."""

    groups: tuple[Group, ...]
    name: ClassVar[str] = "in-groups"

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        (group,) = (group for group in self.groups if context.worker in group)
        return replace(step, reductions=tuple(replace(pending, group=group) for pending in step.reductions))


def kernels_in(groups):
    (at,) = (k for k, kernel in enumerate(KERNELS) if isinstance(kernel, Replicate))
    return (*KERNELS[: at + 1], InGroups(tuple(map(Group.of_workers, groups))), *KERNELS[at + 1 :])


def make_step():
    """A step of word ids (n × 3): a table (rows) and a kernel (dense) with a mean as loss, and a count of examples."""
    rng = np.random.default_rng(0)
    table = tf.Variable(rng.normal(size=(ROWS, WIDTH)), name="table")
    kernel = tf.Variable(rng.normal(size=(WIDTH, 2)), name="kernel")
    count = tf.Variable(0.0, dtype=tf.float64, trainable=False, aggregation=tf.VariableAggregation.SUM, name="count")

    def step(ids):
        with tf.GradientTape() as tape:
            scores = tf.reduce_mean(tf.gather(table, ids), 1) @ kernel
            loss = tf.reduce_mean(tf.square(scores - 1.0))
        rows, dense = tape.gradient(loss, [table, kernel])
        table.scatter_sub(tf.IndexedSlices(0.1 * rows.values, rows.indices))
        kernel.assign_sub(0.1 * dense)
        count.assign_add(tf.cast(tf.shape(ids)[0], tf.float64))
        return loss

    return step


def batches_of(workers):
    """Three batches whose parts differ in size between workers."""
    counts = (2 * workers + 1, 3 * workers - 1, workers + 2)
    return [np.random.default_rng(n).integers(0, ROWS, (n, 3)).astype(np.int32) for n in counts]


def of_group(batches, workers, group):
    """The examples of a group's workers, in rank order."""
    shares = [[take(b, 0, share_of(len(b), range(workers), worker)) for worker in group] for b in batches]
    return [(np.concatenate(parts),) for parts in shares]


GROUPS = {
    "pairs": (4, [(0, 2), (3, 1)], Spec.SHUFFLE, 1 << 20),
    "in pieces": (6, [(0, 3, 4), (1, 2, 5)], Spec.SHUFFLE, 8),
    "in subgroups": (8, [(0, 1, 4, 5), (2, 3, 6, 7)], Spec.HIERARCHICAL, 8),
}


@pytest.mark.parametrize("name", GROUPS)
def test_each_group_trains_as_one_device_on_its_examples(name, monkeypatch):
    workers, groups, spec, direct_bytes = GROUPS[name]
    monkeypatch.setattr("autodist.kernels.communicate.communicator.DIRECT_BYTES", direct_bytes)
    step, batches = make_step(), batches_of(workers)
    captured = capture(step, batches[0])
    strategy = plan(captured.step, workers)
    for node in strategy.nodes:
        node.all_reduce.spec = spec
    if spec == Spec.HIERARCHICAL:
        strategy.graph_config.subgroups[:] = [worker // 4 for worker in range(workers)]
    found = Session(captured, strategy, kernels_in(groups)).train([(batch,) for batch in batches])
    for group in groups:
        own = of_group(batches, workers, group)
        expected = one_device(captured, step, own)
        for worker in group:
            for variable, value in expected.variables[0].items():
                np.testing.assert_allclose(found.variables[worker][variable], value, rtol=1e-12, atol=1e-12)
            losses = [outputs[worker][0] for outputs in found.outputs]
            np.testing.assert_allclose(losses, [loss for ((loss,),) in expected.outputs], rtol=1e-12)


def compressing(captured, workers):
    """A strategy that compresses the dense gradient."""
    strategy = plan(captured.step, workers, compressor=Float16())
    (table,) = (node for node in strategy.nodes if node.variable == "table")
    table.all_reduce.ClearField("compressor")
    return strategy


def test_a_group_computes_the_bits_of_a_run_of_its_workers_with_a_compressor_too():
    step, batches = make_step(), [(np.arange(24, dtype=np.int32).reshape(8, 3) % ROWS,)]
    captured = capture(step, *batches[0])
    found = Session(captured, compressing(captured, 4), kernels_in([(0, 1), (2, 3)])).train(batches)
    for group, examples in (((0, 1), slice(0, 4)), ((2, 3), slice(4, 8))):
        alone = train(captured, compressing(captured, 2), [(batches[0][0][examples],)])
        for worker in group:
            for name in ("table", "kernel", "count"):
                np.testing.assert_array_equal(found.variables[worker][name], alone.variable(name), err_msg=name)


def test_collectives_have_a_group_too():
    groups = [(0, 2), (1, 3)]
    step, batches = make_step(), batches_of(4)
    captured = capture(step, batches[0])
    found, _ = run_together(captured, by(Spec.RING, captured, 4), batches, kernels_in(groups))
    for group in groups:
        expected = one_device(captured, step, of_group(batches, 4, group)).variables[0]
        for worker in group:
            for value, (name, wanted) in zip(found[worker], expected.items(), strict=True):
                np.testing.assert_allclose(value, wanted, rtol=1e-12, atol=1e-12, err_msg=name)
