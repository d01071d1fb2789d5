"""Capture of TensorFlow 2 steps: the captured parts, and the rejected steps."""

from __future__ import annotations

import gc
import logging
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from autodist.capture.function import capture_function
from autodist.errors import CaptureError
from autodist.graph.names import node_of
from autodist.graph.parts import Aggregation
from tests.unit.capture.captured_steps import OUTSIDE, captured, names, plain_step
from tests.unit.graph.graph_text import assert_imports


def test_a_step_is_captured_with_its_variables_gradients_and_outputs():
    found = captured(plain_step)
    step = found.step
    (variable,) = step.variables
    assert (variable.name, variable.shape, variable.dtype, variable.trainable) == ("outside", (4, 2), tf.float32, True)
    assert found.sources[0] is OUTSIDE
    assert names(found) == ["outside"] and not step.gradients[0].is_sparse
    assert step.inputs == {"x:0": 0} and found.inputs == ("x:0",)
    assert step.spec_of(step.outputs[0]) == tf.TensorSpec([], tf.float32)
    assert_imports(step.graph_def)


def test_gradients_are_proportional_to_a_seed_of_one():
    step = captured(plain_step).step
    (call,) = step.gradient_calls
    seed = next(n for n in step.graph_def.node if n.name == call.seed)
    assert seed.op == "PlaceholderWithDefault"
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(step.graph_def, name="")
        handle = graph.get_tensor_by_name(f"{step.variables[0].handle}:0")
        start = tf.raw_ops.AssignVariableOp(resource=handle, value=tf.ones((4, 2)))
    with tf.compat.v1.Session(graph=graph) as session:
        session.run(start)
        feed = {"x:0": np.ones((2, 4))}
        once = session.run(step.gradients[0].tensors[0], feed)
        thrice = session.run(step.gradients[0].tensors[0], {**feed, f"{call.seed}:0": 3.0})
    np.testing.assert_allclose(thrice, 3 * once)


def test_a_gather_has_a_sparse_gradient():
    table = tf.Variable(tf.ones((6, 2)), name="table")

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.gather(table, ids))
        gradient = tape.gradient(loss, table)
        table.scatter_sub(tf.IndexedSlices(0.1 * gradient.values, gradient.indices))
        return loss

    (gradient,) = captured(step, tf.TensorSpec([None], tf.int32)).step.gradients
    assert gradient.is_sparse


@pytest.mark.parametrize("is_sparse", [False, True])
def test_each_variable_has_a_gradient_of_its_own_where_the_maths_gives_both_the_same(is_sparse):
    first, second = (tf.Variable(tf.ones([4, 2]), name=name) for name in ("first", "second"))

    @tf.custom_gradient
    def rows_of_both(ids):
        def gradient(upstream, variables):
            rows = tf.IndexedSlices(upstream, ids, tf.constant([4, 2]))
            return None, [rows, rows]

        return tf.gather(first, ids) + tf.gather(second, ids), gradient

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(rows_of_both(ids) if is_sparse else first + second)
        for variable, gradient in zip((first, second), tape.gradient(loss, (first, second)), strict=True):
            variable.assign_sub(tf.convert_to_tensor(gradient))
        return loss

    item = capture_function(step, (tf.TensorSpec([None], tf.int32),), [0]).step
    assert [g.variable for g in item.gradients] == ["first", "second"]
    tensors = [t for g in item.gradients for t in g.tensors]
    assert len(tensors) == len(set(tensors)) == (4 if is_sparse else 2)


def test_gradients_outside_of_a_capture_are_plain():
    captured(plain_step)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(OUTSIDE)
    np.testing.assert_array_equal(tape.gradient(loss, OUTSIDE), np.ones((4, 2)))


def test_an_error_in_the_step_is_the_users_own_and_leaves_tensorflow_as_it_was():
    def step(x):
        raise ValueError("the user's own")

    before = tf.GradientTape.gradient
    with pytest.raises(ValueError, match="the user's own"):
        captured(step)
    assert tf.GradientTape.gradient is before


def test_several_calls_of_gradient_are_noted_in_order():
    other = tf.Variable(tf.ones((4, 1)), name="other")

    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            first, second = tf.reduce_mean(x @ OUTSIDE), tf.reduce_mean(x @ other)
        OUTSIDE.assign_sub(tape.gradient(first, OUTSIDE))
        other.assign_sub(tape.gradient(second, [other])[0])
        return first

    item = captured(step).step
    assert [(g.variable, g.call) for g in item.gradients] == [("outside", 0), ("other", 1)]
    assert len({c.seed for c in item.gradient_calls}) == 2


def test_gradients_that_tensorflow_asks_for_graphs_are_noted():
    def step(x):
        loss = tf.reduce_mean(x @ OUTSIDE)
        (gradient,) = tf.gradients(loss, [OUTSIDE])
        OUTSIDE.assign_sub(gradient)
        return loss

    assert names(captured(step)) == ["outside"]


def test_recomputed_gradients_are_part_of_the_call_that_asks_for_them():
    dense = layers.Dense(2)
    dense.build((None, 4))
    again = tf.recompute_grad(lambda x: tf.tanh(dense(x)))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(again(x)))
        for variable, gradient in zip(
            dense.trainable_variables, tape.gradient(loss, [v.value for v in dense.trainable_variables]), strict=True
        ):
            variable.value.assign_sub(gradient)
        return loss

    item = captured(step).step
    assert sorted(names(captured(step))) == sorted(v.value.name.removesuffix(":0") for v in dense.trainable_variables)
    assert len(item.gradient_calls) == 1


def test_a_gradient_by_a_tensor_is_no_variables():
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.square(x))
        return plain_step(x + tape.gradient(y, x))

    assert names(captured(step)) == ["outside"]


def test_a_variable_that_is_written_and_never_read_is_found():
    last = tf.Variable(0.0, name="last", trainable=False)

    def step(x):
        loss = plain_step(x)
        last.assign(loss)
        return loss

    assert {v.name for v in captured(step).step.variables} == {"outside", "last"}


def test_names_that_come_twice_are_told_apart():
    twins = [tf.Variable(tf.ones((4, 1)), name="twin") for _ in range(2)]

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x @ twins[0] + x @ twins[1])
        for twin, gradient in zip(twins, tape.gradient(loss, twins), strict=True):
            twin.assign_sub(gradient)
        return loss

    assert [v.name for v in captured(step).step.variables] == ["twin", "twin_1"]


def test_declarations_of_variables_are_captured():
    state = tf.Variable(0.0, name="state", trainable=False, aggregation=tf.VariableAggregation.SUM)
    generator = keras.random.SeedGenerator(1)

    def step(x):
        state.assign_add(1.0)
        return plain_step(x * keras.random.uniform(tf.shape(x), seed=generator))

    found = {v.name: v for v in captured(step).step.variables}
    assert found["state"].aggregation is Aggregation.SUM
    assert [v.is_seed for v in found.values()].count(True) == 1
    assert not found["state"].is_seed


def test_values_from_outside_become_constants():
    scale = tf.constant([2.0, 2.0, 2.0, 2.0])
    found = captured(lambda x: plain_step(x * scale))
    values = [tf.make_ndarray(n.attr["value"].tensor) for n in found.step.graph_def.node if n.op == "Const"]
    assert any(v.shape == (4,) and (v == 2).all() for v in values)
    assert found.inputs == ("x:0",)


def test_structures_are_kept_and_python_values_stay():
    found = captured(lambda x: {"loss": plain_step(x), "nothing": None, "seven": 7})
    assert set(found.outputs) == {"loss", "nothing", "seven"}
    assert found.outputs["nothing"] is None
    assert len(found.step.outputs) == len([v for v in tf.nest.flatten(found.outputs) if isinstance(v, tf.TensorSpec)])


def test_outputs_do_not_wait_for_the_writes():
    step = captured(plain_step).step
    node = next(n for n in step.graph_def.node if n.name == node_of(step.outputs[0]))
    assert node.op != "Identity"
    assert step.targets


# -- refusals ------------------------------------------------------------------------------------------------------


def test_a_tensor_of_another_graph_is_refused():
    with tf.Graph().as_default():
        foreign = tf.compat.v1.placeholder(tf.float32, [4], name="foreign")
    with pytest.raises(CaptureError, match="foreign:0, a tensor of another graph"):
        captured(lambda x: plain_step(x * foreign))


@pytest.mark.feature("function", "data: iterators that the step itself reads", refused="CaptureError")
def test_an_iterator_is_refused_with_its_mend():
    batches = iter(tf.data.Dataset.from_tensors(tf.ones([3, 4])))

    with pytest.raises(CaptureError, match=r"takes its batches from an iterator.*`step\(next\(iterator\)\)`"):
        captured(lambda _: plain_step(next(batches)), tf.TensorSpec([]))


@pytest.mark.feature("function", "data: queues", refused="CaptureError")
def test_another_resource_is_refused_by_what_uses_it():
    queue = tf.queue.FIFOQueue(1, tf.float32, [[3, 4]])

    with pytest.raises(CaptureError, match="not a variable.*QueueDequeueV2"):
        captured(lambda _: plain_step(queue.dequeue()), tf.TensorSpec([]))


@pytest.mark.feature("fit", "model: layers that write summaries", refused="CaptureError")
@pytest.mark.feature("function", "model: layers that write summaries", refused="CaptureError")
@pytest.mark.parametrize("condition", [True, lambda: tf.reduce_sum(OUTSIDE) > 0])
def test_summaries_within_a_step_are_refused_with_the_mend(tmp_path, condition):
    writer = tf.summary.create_file_writer(str(tmp_path))

    def step(x):
        loss = plain_step(x)
        with writer.as_default(step=tf.constant(1, tf.int64)), tf.summary.record_if(condition):
            tf.summary.write("loss", loss)
        return loss

    with pytest.raises(CaptureError, match="writes a summary.*Return the value and write it after the step"):
        captured(step)


def test_a_variable_without_a_gradient_is_named_once(caplog):
    unused = tf.Variable(1.0, name="unused")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x @ OUTSIDE) + 0.0 * tf.stop_gradient(unused)
        mine, _ = tape.gradient(loss, [OUTSIDE, unused])
        OUTSIDE.assign_sub(mine)
        return loss

    with caplog.at_level(logging.WARNING, "autodist"):
        captured(step)
    assert caplog.text.count("unused") == 1
    assert "does not depend on unused" in caplog.text


def test_the_traced_graph_ends_with_the_capture():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="relu"), layers.Dense(2)])
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    traced = []

    def step(x):
        traced.append(weakref.ref(tf.compat.v1.get_default_graph()))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return {"loss": loss}

    found = captured(step)
    gc.collect()
    assert [graph() for graph in traced] == [None]
    assert found.outputs["loss"] == tf.TensorSpec([], tf.float32)


def test_every_tensor_that_remains_has_its_shape_and_dtype():
    step = captured(plain_step).step
    nodes = [node.name for node in step.graph_def.node]
    graph = tf.Graph()
    with graph.as_default():
        tf.import_graph_def(step.graph_def, name="")
    for tensor in (t for name in nodes for t in graph.get_operation_by_name(name).outputs):
        assert step.spec_of(tensor.name).dtype == tensor.dtype
        assert step.spec_of(tensor.name).shape.is_compatible_with(tensor.shape)
    with pytest.raises(KeyError):
        step.spec_of("nothing:0")


def test_names_do_not_depend_on_what_the_process_did_before():
    """TensorFlow numbers the handle that this lookup captures by all that was made before."""
    table = tf.Variable(tf.ones([5, 3]), name="table")

    def step(ids):
        with tf.GradientTape() as tape:
            found = tf.nn.embedding_lookup_sparse(table, tf.sparse.from_dense(ids), None, combiner="sum")
            loss = tf.reduce_mean(found)
        table.assign_sub(tf.convert_to_tensor(tape.gradient(loss, table)))
        return loss

    ids = tf.TensorSpec([None, 2], tf.int64)
    first = capture_function(step, (ids,), [0])
    tf.add(table, table)
    second = capture_function(step, (ids,), [0])
    assert [n.name for n in first.step.graph_def.node] == [n.name for n in second.step.graph_def.node]


def test_optimizers_of_version_1_leave_no_device_of_this_process():
    """They read a variable's device when the step is traced, which is none of several workers'."""
    weight, optimizer = tf.Variable([1.0, 2.0]), tf.compat.v1.train.AdamOptimizer(0.1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * weight)
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

    item = capture_function(step, (tf.TensorSpec([None, 2], tf.float32),), [0]).step
    assert {node.device for node in item.graph_def.node} <= {"", "/device:CPU:0"}
