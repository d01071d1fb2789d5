"""Values are restored slice by slice, each on the worker that holds it, for any writer and any shards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import tensorflow as tf

from autodist.checkpoint import slices
from autodist.checkpoint.slices import KeyedVariable, SessionReader, read_into_process
from autodist.checkpoint.write import PartWriter, merge
from autodist.placement.group import Group
from autodist.placement.holder import Holder
from autodist.placement.partitioning import Partitioning
from autodist.runtime import variable_slices as pieces_module
from autodist.runtime.graph_runner import GraphRunner
from autodist.runtime.variable_slices import VariableSlices
from autodist.runtime.variables import TrackedVariable
from tests.unit.kernels.pairs import pairs
from tests.unit.placement.holders import held_by

VALUE = np.arange(24.0).reshape(4, 6)

HOLDERS = {
    "whole": held_by(VALUE.shape),
    "whole at a worker": held_by(VALUE.shape, [1]),
    "whole at mates": held_by(VALUE.shape, [(1, 0)]),
    "rows at owners": held_by(VALUE.shape, (1, 0), Partitioning(0, (1, 3))),
    "rows with copies": held_by(VALUE.shape, (1, 0), Partitioning(0, (2, 2)), copies=[["/proxy"]]),
    "columns": held_by(VALUE.shape, (0, None, 1), Partitioning(1, (2, 1, 3))),
    "rows and columns": Holder.divided(VALUE.shape, (2, 2), [Group.of_workers([worker]) for worker in (0, 1, 1, 0)]),
}


@pytest.fixture
def graph_runner() -> Iterator[GraphRunner]:
    graph_runner = GraphRunner("", tf.compat.v1.ConfigProto())
    yield graph_runner
    graph_runner.close()


def written(graph_runner: GraphRunner, folder: str, holder: Holder) -> str:
    pieces = VariableSlices(graph_runner, 0, 2, lambda worker, dtype, device: "")
    saved = TrackedVariable(tf.Variable(VALUE), "saved", holder)
    pieces.set([saved], lambda one: one.hand_over(is_same=True))
    prefix = f"{folder}/merged"
    merge(PartWriter(graph_runner, pieces, lambda worker: "").write({"k": saved.stored}, folder), prefix)
    return prefix


@pytest.mark.parametrize("before, group", pairs(HOLDERS, [1 << 20, 1], each=2))
def test_values_saved_in_some_shards_are_read_in_others(graph_runner, tmp_path, monkeypatch, before, group):
    monkeypatch.setattr(pieces_module, "GROUP_BYTES", group)
    monkeypatch.setattr(slices, "LARGE", group)
    prefix = written(graph_runner, str(tmp_path), HOLDERS[before])
    asked: list[int] = []
    pieces = VariableSlices(graph_runner, 0, 2, lambda worker, dtype, device: "")
    for k, after in enumerate(HOLDERS.values()):
        one = TrackedVariable(tf.Variable(np.zeros_like(VALUE)), f"v{k}", after)
        SessionReader(graph_runner, pieces, lambda worker: asked.append(worker) or "").read(prefix, [("k", one.stored)])
        assert set(asked) == {w for shard in one.slices for w, _ in pieces.named_holders(shard)}
        asked.clear()
        pieces.pull([one])
        np.testing.assert_array_equal(one.source, VALUE)
        for shard in one.slices:
            for _, held in pieces.named_holders(shard):
                with graph_runner.graph.as_default():
                    handle = tf.raw_ops.VarHandleOp(
                        dtype=tf.float64, shape=shard.shape, shared_name=f"v{k}{held.suffix}"
                    )
                    read = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64)
                part = tuple(slice(b, b + n) for b, n in zip(shard.begin, shard.shape, strict=True))
                np.testing.assert_array_equal(graph_runner.session.run(read), VALUE[part])


@pytest.mark.parametrize("before", HOLDERS)
def test_variables_of_this_process_are_read_whole(graph_runner, tmp_path, monkeypatch, before):
    """A large variable is read once: TensorFlow would read the complete variable for each of its slices."""
    monkeypatch.setattr(slices, "LARGE", 9)
    prefix = written(graph_runner, str(tmp_path), HOLDERS[before])
    variables = [tf.Variable(np.zeros_like(VALUE)) for _ in range(5)]
    scalar = tf.Variable(0.0, dtype=tf.float64)
    tf.raw_ops.SaveV2(
        prefix=f"{tmp_path}/scalar", tensor_names=["s"], shape_and_slices=[""], tensors=[tf.constant(3.0, tf.float64)]
    )
    asked, restored = [], slices._restored
    monkeypatch.setattr(slices, "_restored", lambda *args: asked.extend(args[1]) or restored(*args))
    monkeypatch.setattr(pieces_module, "GROUP_BYTES", 1)
    read_into_process(prefix, [KeyedVariable("k", variable) for variable in variables])
    read_into_process(f"{tmp_path}/scalar", [KeyedVariable("s", scalar)])
    for variable in variables:
        np.testing.assert_array_equal(variable, VALUE)
    assert float(scalar) == 3.0 and sorted(asked) == [("k", "", tf.float64)] * 5 + [("s", "", tf.float64)]


def test_the_old_value_of_a_large_variable_goes_before_the_new_one_is_read(graph_runner, tmp_path, monkeypatch):
    prefix = written(graph_runner, str(tmp_path), HOLDERS["whole"])
    large, small = tf.Variable(np.zeros_like(VALUE)), tf.Variable(np.zeros_like(VALUE))
    shapes, restored = [], slices._restored

    def shape(variable: tf.Variable) -> list[int]:
        return tf.raw_ops.VariableShape(input=variable.handle).numpy().tolist()

    monkeypatch.setattr(
        slices, "_restored", lambda *args: shapes.append((shape(large), shape(small))) or restored(*args)
    )
    read_into_process(prefix, [KeyedVariable("k", small)])
    monkeypatch.setattr(slices, "LARGE", VALUE.nbytes)
    read_into_process(prefix, [KeyedVariable("k", large)])
    assert shapes == [([4, 6], [4, 6]), ([0], [4, 6])]
    np.testing.assert_array_equal(large, VALUE)
    np.testing.assert_array_equal(small, VALUE)


@dataclass(frozen=True)
class Size:
    byte_size: int
    extra_bytes: int = 0


@pytest.mark.parametrize(
    ("reads", "rounds"),
    [
        ([], []),
        ([Size(10)], [[1]]),
        ([Size(10)] * 5, [[1, 1], [1, 1], [1]]),
        ([Size(4)] * 7, [[3, 3], [1]]),
        ([Size(10, 30)] * 3, [[1, 1], [1]]),
        ([Size(10, 31)] * 3, [[1], [1], [1]]),
        ([Size(10, 100), Size(10), Size(10)], [[1], [1, 1]]),
    ],
)
def test_groups_are_read_together_whose_parts_leave_room(monkeypatch, reads, rounds):
    monkeypatch.setattr(pieces_module, "GROUP_BYTES", 10)
    monkeypatch.setattr(slices, "_MORE_BYTES", 60)
    assert [[len(group) for group in together] for together in slices._rounds(reads)] == rounds
