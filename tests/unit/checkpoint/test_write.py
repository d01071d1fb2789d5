"""PartWriter: shards on several workers become one checkpoint in TensorFlow's format."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

from autodist.checkpoint.write import PartWriter, merge, place_of, write_from_process
from autodist.placement.partitioning import Partitioning
from autodist.runtime import variable_slices as pieces_module
from autodist.runtime.graph_runner import GraphRunner
from autodist.runtime.variable_slices import VariableSlices
from autodist.runtime.variables import TrackedVariable
from tests.unit.placement.holders import held_by

VALUE = np.arange(24.0).reshape(4, 6)

HOLDERS = {
    "whole": held_by(VALUE.shape),
    "whole_at_worker": held_by(VALUE.shape, [1]),
    "rows_at_owners": held_by(VALUE.shape, (1, 0), Partitioning(0, (1, 3))),
    "rows_everywhere": held_by(VALUE.shape, (None, None), Partitioning(0, (1, 3))),
    "columns": held_by(VALUE.shape, (0, None, 1), Partitioning(1, (2, 1, 3))),
}


@pytest.fixture
def graph_runner() -> Iterator[GraphRunner]:
    graph_runner = GraphRunner("", tf.compat.v1.ConfigProto())
    yield graph_runner
    graph_runner.close()


def push(graph_runner: GraphRunner) -> tuple[VariableSlices, dict[str, TrackedVariable]]:
    """Returns the slices of two workers in one process, and one variable of each placement."""
    pieces = VariableSlices(graph_runner, 0, 2, lambda worker, dtype, device: "")
    variables = {
        name: TrackedVariable(tf.Variable(VALUE * k), f"v{k}", holder)
        for k, (name, holder) in enumerate(HOLDERS.items(), start=1)
    }
    pieces.set(list(variables.values()), lambda one: one.hand_over(is_same=True))
    return pieces, variables


def read(prefix: str) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(prefix)
    return {key: reader.get_tensor(key) for key in reader.get_variable_to_shape_map()}


def test_variables_wherever_they_lie_are_read_whole_by_tensorflow(graph_runner, tmp_path):
    pieces, variables = push(graph_runner)
    writer = PartWriter(graph_runner, pieces, lambda worker: "")
    kept = {name: tracked.stored for name, tracked in variables.items()}
    for step in (1, 2):  # the second time with the nodes of the first
        folder = tmp_path / str(step)
        folder.mkdir()
        parts = [
            *writer.write(kept, str(folder)),
            *write_from_process([("here", lambda: tf.constant([1.5]))], str(folder)),
        ]
        merge(parts, str(folder / "merged"))
        found = read(str(folder / "merged"))
        assert found.keys() == {*HOLDERS, "here"}
        for k, name in enumerate(HOLDERS, start=1):
            np.testing.assert_array_equal(found[name], VALUE * k)
        assert len(writer._rounds) == 1


def test_shards_are_written_by_their_owners_and_in_files_of_their_own(graph_runner, tmp_path, monkeypatch):
    """A file takes no more than a group of slices, so that no more is in memory at once."""
    monkeypatch.setattr(pieces_module, "GROUP_BYTES", 1)
    pieces, variables = push(graph_runner)
    wrote = []
    writer = PartWriter(graph_runner, pieces, lambda worker: wrote.append(worker) or "")
    parts = writer.write({"w": variables["rows_at_owners"].stored}, str(tmp_path))
    assert wrote == [1, 0, 1]  # whether worker 1 sees the folder, then a file of each
    sizes = sorted(os.path.getsize(f"{part}.data-00000-of-00001") for part in parts)
    assert sizes == [6 * 8, 18 * 8]
    merge(parts, str(tmp_path / "merged"))
    np.testing.assert_array_equal(read(str(tmp_path / "merged"))["w"], VALUE * 3)


def test_the_chief_writes_for_those_that_do_not_see_its_folder(graph_runner, tmp_path, monkeypatch):
    pieces, variables = push(graph_runner)
    wrote = []
    writer = PartWriter(graph_runner, pieces, lambda worker: wrote.append(worker) or "")
    with graph_runner.graph.as_default():
        writer._probes[1] = tf.io.read_file(str(tmp_path / "elsewhere"))  # as a machine without the folder answers
    merge(writer.write({"w": variables["rows_at_owners"].stored}, str(tmp_path)), str(tmp_path / "merged"))
    assert wrote == [0]
    np.testing.assert_array_equal(read(str(tmp_path / "merged"))["w"], VALUE * 3)


def test_a_place_is_spelt_as_tensorflow_does(graph_runner):
    kept = TrackedVariable(tf.Variable(VALUE), "v", HOLDERS["columns"]).stored
    assert [place_of(kept, shard) for shard in kept.slices] == ["4 6 0,4:0,2", "4 6 0,4:2,1", "4 6 0,4:3,3"]


def test_values_of_this_process_are_read_a_group_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("autodist.runtime.variable_slices.GROUP_BYTES", 16)
    values = [(f"v{k}", lambda k=k: tf.fill([1], np.float64(k))) for k in range(5)]
    parts = write_from_process(values, str(tmp_path))
    assert len(parts) == 3
    merge(parts, str(tmp_path / "merged"))
    assert {name: value[0] for name, value in read(str(tmp_path / "merged")).items()} == {f"v{k}": k for k in range(5)}


def test_values_of_this_process_are_read_in_a_script_of_sessions_too(tmp_path):
    """As the state of a generator, which belongs to no graph."""
    state = tf.Variable([3.0])
    with tf.Graph().as_default():
        (part,) = write_from_process([("v", state.read_value), ("c", lambda: tf.constant([4.0]))], str(tmp_path))
    assert {name: value[0] for name, value in read(part).items()} == {"v": 3.0, "c": 4.0}


def test_rows_that_are_written_are_saved_without_a_copy_while_all_wait(graph_runner, tmp_path):
    """TensorFlow copies such a variable for each read: a table of 2 GB, saved a shard at a time, took all its memory
    again.
    """
    pieces, variables = push(graph_runner)
    (_, _, handle, _), *_ = pieces.holders(variables["whole"].stored)
    with graph_runner.graph.as_default():
        add = tf.raw_ops.ResourceScatterAdd(resource=handle, indices=[1], updates=np.ones((1, 6)))
    writer = PartWriter(graph_runner, pieces, lambda worker: "")
    expected = VALUE.copy()
    for is_still in (True, False, True):
        graph_runner.session.run(add)
        expected[1] += 1
        (part,) = writer.write({"v": variables["whole"].stored}, str(tmp_path), is_still=is_still)
        np.testing.assert_array_equal(read(part)["v"], expected)
        nodes = [op for made in writer._rounds.values() for op in made[0][0][1].control_inputs]
        reads = [
            i.op for made in writer._rounds.values() for i in made[0][0][1].inputs if i.op.type == "ReadVariableOp"
        ]
        assert nodes == [] and len(reads) == 1
        assert [op.type for op in reads[0].control_inputs] == ["DisableCopyOnRead"] * is_still


def test_two_files_are_written_at_a_time_unless_that_takes_memory(graph_runner, tmp_path, monkeypatch):
    monkeypatch.setattr(pieces_module, "GROUP_BYTES", 1)
    pieces, variables = push(graph_runner)
    writer = PartWriter(graph_runner, pieces, lambda worker: "")
    kept = {f"v{k}": variables["whole"].stored for k in range(3)}
    followed = []
    for is_still, together in ((True, [2, 1]), (False, [1, 1, 1])):
        parts = writer.write(kept, str(tmp_path), followed.append, is_still)
        assert [len(some) for some in next(iter(writer._rounds.values()))] == together
    assert followed[3:] == [f"{part}.data-00000-of-00001" for part in parts]
