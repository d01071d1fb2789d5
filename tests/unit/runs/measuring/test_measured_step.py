"""Measurements of a step's computation: times of updates and gradients, rows, and steps that cannot be measured."""

from __future__ import annotations

import dataclasses
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.resources import ResourceSpec
from autodist.runs.measuring import copied_step, estimates, measured_step, node_times
from autodist.runs.measuring.copied_step import OneReplica, rewrite_for_one
from autodist.runs.measuring.estimates import estimate_step
from autodist.runs.measuring.measurable import CannotMeasure
from autodist.runs.measuring.measured_step import measure_step
from autodist.runs.measuring.node_times import NodeTimes, update_times, updated_variables
from autodist.strategies import synced_variables
from tests.unit.kernels.in_one_process import capture

ONE = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0]}]}).workers
TWO = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]}).workers
REPLICA = OneReplica.of(ONE, 0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 3)).astype("float32")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """Times few steps, which are enough for all but precision."""
    monkeypatch.setattr(copied_step, "_MOST_STEPS", 2)
    monkeypatch.setattr(copied_step, "_ENOUGH", 0.0)
    monkeypatch.setattr(copied_step, "_MOST_TRACES", 2)


def measured(captured, *values, replica=REPLICA, **options):
    """Measures a captured step with the present values of its variables."""
    batch = dict(zip(captured.inputs, values, strict=True))
    readers = {v.name: v_source.numpy for v, v_source in zip(captured.step.variables, captured.sources, strict=True)}
    return measure_step(captured.step, batch, readers, replica, **options)


def values_of(captured):
    return [source.numpy() for source in captured.sources]


def training(loss_of, variables, optimizer=None, clip=None):
    """Returns a step that trains some variables."""

    def step(*batch):
        with tf.GradientTape() as tape:
            loss = loss_of(*batch)
        gradients = tape.gradient(loss, variables)
        if clip is not None:
            gradients, _ = tf.clip_by_global_norm(gradients, clip)
        if optimizer is not None:
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        else:
            for variable, gradient in zip(variables, gradients, strict=True):
                if isinstance(gradient, tf.IndexedSlices):
                    variable.scatter_sub(tf.IndexedSlices(0.1 * gradient.values, gradient.indices))
                else:
                    variable.assign_sub(0.1 * gradient)
        return loss

    return step


def two_layers(dtype="float32"):
    """Returns the variables of two layers, and the loss of a batch."""
    rng = np.random.default_rng(1)
    hidden, output = (tf.Variable(rng.normal(size=(3, 3)).astype(dtype), name=name) for name in ("hidden", "output"))
    return [hidden, output], lambda x: tf.reduce_mean(tf.tanh(x @ hidden) @ output)


def dense(optimizer=None, dtype="float32", clip=None):
    """Captures a step on two layers."""
    variables, loss_of = two_layers(dtype)
    if optimizer is not None:
        optimizer.build(variables)
    return capture(training(loss_of, variables, optimizer, clip), X.astype(dtype))


@pytest.mark.parametrize("optimizer", [None, keras.optimizers.SGD, keras.optimizers.Adam], ids=["plain", "SGD", "Adam"])
def test_a_measurement_covers_the_synchronized_variables_and_changes_none(optimizer):
    captured = dense(None if optimizer is None else optimizer())
    before = values_of(captured)
    found = measured(captured, X)
    for one, other in zip(before, values_of(captured), strict=True):
        np.testing.assert_array_equal(one, other)
    names = {variable.name for variable in synced_variables(captured.step)}
    assert found.updates.keys() == found.ready.keys() == names == {"hidden", "output"}
    assert all(spent > 0 for spent in found.updates.values())
    assert sum(found.updates.values()) <= found.seconds * (1 + 1e-9)
    assert all(0 < at <= found.seconds for at in found.ready.values())
    assert 0 <= found.fixed <= found.seconds <= found.took
    assert found.rows == {}


def test_steps_in_float64_are_measured():
    found = measured(dense(keras.optimizers.SGD(), "float64"), X.astype("float64"))
    assert found.updates.keys() == {"hidden", "output"}


def test_the_nodes_of_an_update_begin_at_the_gradient_and_serve_one_variable():
    captured = dense(clip=1.0)
    rewritten = rewrite_for_one(captured.step, "cpu:0")
    updated = updated_variables(captured.step, rewritten)
    nodes = rewritten.graph_index.nodes
    assert set(updated.values()) == {("hidden",), ("output",)}
    ops = {nodes[name].op for name in updated}
    assert "AssignSubVariableOp" in ops and "Mul" in ops
    assert ops.isdisjoint({"MatMul", "Tanh", "L2Loss", "Sqrt", "ReadVariableOp"})  # forward, backward and the norm
    norms = [node.name for node in rewritten.graph_def.node if "global_norm" in node.name.split("/")]
    assert norms and updated.keys().isdisjoint(norms)
    assert measured(captured, X).updates.keys() == {"hidden", "output"}


def test_slots_belong_to_the_update_and_counters_to_none():
    captured = dense(keras.optimizers.Adam())
    rewritten = rewrite_for_one(captured.step, "cpu:0")
    updated = updated_variables(captured.step, rewritten)
    written = {}
    for name, effect in rewritten.graph_index.effects.items():
        for handle in effect.writes:
            written[rewritten.by_handle[handle].name] = updated.get(name)
    assert not written.pop(next(name for name in written if "iteration" in name))
    assert len(written) == 6 and all(names in (("hidden",), ("output",)) for names in written.values())


def test_updates_in_a_conditional_are_those_of_the_variables_that_it_writes():
    variables, loss_of = two_layers()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    optimizer.build(variables)
    captured = capture(training(loss_of, variables, optimizer), X)
    rewritten = rewrite_for_one(captured.step, "cpu:0")
    assert ("hidden", "output") in updated_variables(captured.step, rewritten).values()
    assert all(spent > 0 for spent in measured(captured, X).updates.values())


def test_the_gradients_of_a_compiled_step_are_ready_at_its_end():
    captured = dense()
    compiled = dataclasses.replace(captured, step=dataclasses.replace(captured.step, jit_compile=True))
    found = measured(compiled, X)
    assert found.ready == {"hidden": found.seconds, "output": found.seconds}
    assert sum(found.updates.values()) < found.seconds and found.updates["hidden"] > 0  # estimated


def test_large_steps_without_loops_are_not_optimized_on_cpus(monkeypatch):
    captured = dense()
    rewritten = rewrite_for_one(captured.step, "cpu:0")

    def is_optimized(replica):
        options = copied_step._config_for(rewritten, replica).graph_options.rewrite_options
        return not options.disable_meta_optimizer

    assert is_optimized(REPLICA)
    monkeypatch.setattr(copied_step, "_MOST_OPTIMIZED", 5)
    assert not is_optimized(REPLICA) and is_optimized(dataclasses.replace(REPLICA, device="gpu:0"))
    assert measured(captured, X).updates.keys() == {"hidden", "output"}


def embedding():
    table = tf.Variable(RNG.normal(size=(10, 2)).astype("float32"), name="table")
    return capture(training(lambda ids: tf.reduce_mean(tf.gather(table, ids) ** 2), [table]), np.zeros(1, np.int32))


def test_distinct_rows_of_a_table_are_counted():
    ids = np.array([4, 4, 7, 1, 4, 7], np.int32)
    assert measured(embedding(), ids).rows == {"table": 3}


def test_a_replica_takes_its_part_of_the_batch():
    ids = np.array([4, 4, 7, 1, 2, 3, 5], np.int32)
    assert measured(embedding(), ids, replica=OneReplica.of(TWO, 0)).rows == {"table": 3}  # 4, 7 and 1


def test_replicas_divide_the_threads_of_their_worker():
    one, two = OneReplica.of(ONE, 0).config, OneReplica.of(TWO, 0).config
    assert two.intra_op_parallelism_threads == max(1, one.intra_op_parallelism_threads // 2)
    assert two.inter_op_parallelism_threads == max(1, one.inter_op_parallelism_threads // 2)
    assert OneReplica.of(TWO, 0).replicas == 2


def test_generators_draw_as_if_nothing_had_been_measured():
    weight = tf.Variable([1.0, 2.0], name="weight")
    generator = tf.random.Generator.from_seed(3)

    def loss_of(x):
        return tf.reduce_mean(x * weight * generator.uniform([2]) + tf.random.uniform([2]))

    captured = capture(training(loss_of, [weight]), np.ones((2, 2), np.float32))
    state = generator.state.numpy()
    tf.random.set_seed(5)
    measured(captured, np.ones((2, 2), np.float32))
    after = tf.random.uniform([3]).numpy()
    np.testing.assert_array_equal(generator.state.numpy(), state)
    tf.random.set_seed(5)
    np.testing.assert_array_equal(tf.random.uniform([3]).numpy(), after)


def test_strings_are_fed_as_they_are():
    table = tf.Variable(tf.ones([5, 2]), name="table")

    def loss_of(words):
        return tf.reduce_sum(tf.gather(table, tf.strings.to_hash_bucket_fast(words, 5)))

    words = np.array(["a", "b", "a"], object)
    spec = tf.TensorSpec([None], tf.string)
    found = measured(capture(training(loss_of, [table]), spec), words)
    assert 1 <= found.rows["table"] <= 2


def test_an_update_of_several_variables_is_shared_by_their_sizes():
    captured = dense()
    trace = NodeTimes({"both": 0.3, "hidden": 0.1, "other": 1.0}, {}, 2.0)
    updated = {"both": ("hidden", "output"), "hidden": ("hidden",)}
    found = update_times(captured.step, updated, trace, {"hidden": 0.5, "output": 0.5})
    assert found == pytest.approx({"hidden": 0.25, "output": 0.15})
    found = update_times(captured.step, {"hidden": ("hidden",)}, trace, {"hidden": 0.5, "output": 0.5})
    assert found == pytest.approx({"hidden": 0.1, "output": 0.5})  # the estimate of one without nodes of its own


def test_a_node_that_tensorflow_has_added_counts_for_the_node_in_its_name():
    nodes = {"loop", "loop/size"}
    found = [node_times._node_in_name(name, nodes) for name in ("loop/size", "loop/body/_1/product", "_SOURCE")]
    assert found == ["loop/size", "loop", ""]


def python(x):
    return tf.py_function(lambda y: y, [x], tf.float32)


def printing(x):
    tf.print(x)
    return x


def writing(x):
    tf.io.write_file("never_written", tf.strings.as_string(tf.reduce_sum(x)))
    return x


@pytest.mark.parametrize("does, named", [(python, "Python function"), (printing, "PrintV2"), (writing, "WriteFile")])
def test_steps_with_other_effects_are_refused_before_they_run(does, named, monkeypatch):
    weight = tf.Variable([1.0, 2.0, 3.0], name="weight")
    captured = capture(training(lambda x: tf.reduce_mean(does(x) * weight), [weight]), X)
    monkeypatch.delattr(measured_step, "CopiedStep")
    with pytest.raises(CannotMeasure, match=named):
        measured(captured, X)


def test_the_content_of_lookup_tables_is_missing():
    keys = tf.lookup.KeyValueTensorInitializer([0, 1], [1.0, 2.0], tf.int64, tf.float32)
    table, weight = tf.lookup.StaticHashTable(keys, 0.0), tf.Variable([1.0, 2.0, 3.0], name="weight")
    loss_of = training(lambda x: tf.reduce_mean(x * weight * table.lookup(tf.zeros([3], tf.int64))), [weight])
    with pytest.raises(CannotMeasure, match="LookupTable"):
        measured(capture(loss_of, X), X)


def test_effects_within_functions_are_found():
    weight = tf.Variable([1.0, 2.0, 3.0], name="weight")

    def loss_of(x):
        return tf.reduce_mean(tf.cond(tf.reduce_sum(x) > 0, lambda: printing(x), lambda: x) * weight)

    with pytest.raises(CannotMeasure, match="PrintV2"):
        measured(capture(training(loss_of, [weight]), X), X)


def test_a_step_that_needs_more_than_the_memory_is_refused(monkeypatch):
    monkeypatch.delattr(measured_step, "CopiedStep")
    with pytest.raises(CannotMeasure, match="copies of the variables and the activations need .* the worker has 100 B"):
        measured(dense(), X, replica=dataclasses.replace(REPLICA, memory=100))


def test_a_worker_without_replicas_and_a_step_without_gradients_are_refused():
    with pytest.raises(CannotMeasure, match="no replicas"):
        measured(dense(), X, replica=dataclasses.replace(REPLICA, replicas=0))
    with pytest.raises(CannotMeasure, match="trains no variable"):
        measured(capture(tf.reduce_sum, X), X)


def test_a_graph_without_known_runs_is_refused():
    captured = dense()
    step = dataclasses.replace(captured.step, outputs=(), targets=())
    with pytest.raises(CannotMeasure, match="not known which parts"):
        measured(dataclasses.replace(captured, step=step), X)


def test_a_step_that_does_not_end_is_cancelled(monkeypatch):
    monkeypatch.setattr(measured_step, "_LONGEST_STEP", 1.0)
    weight = tf.Variable(1.0, name="weight")

    def loss_of(x):
        (total,) = tf.while_loop(lambda total: total > -1.0, lambda total: (total * 0.5 + 0.1,), (tf.reduce_sum(x**2),))
        return total * weight

    captured = capture(training(loss_of, [weight]), X)
    start = time.monotonic()
    with pytest.raises(CannotMeasure, match="a step takes longer than 500 ms"):
        measured(captured, X, seconds=0.5)
    assert time.monotonic() - start < 30


def test_a_batch_of_one_example_leaves_the_updates_as_the_fixed_part():
    found = measured(dense(), X[:1])
    assert found.fixed == pytest.approx(sum(found.updates.values()))


def test_a_step_that_fails_is_refused_with_the_reason():
    captured = dense()
    with pytest.raises(CannotMeasure, match="fails on one replica"):
        measured(dataclasses.replace(captured, sources=[tf.Variable(np.zeros(2))] * 2), X)


def test_estimates_cover_the_same_variables_and_grow_with_the_batch():
    step = dense(keras.optimizers.Adam()).step
    (name,) = step.inputs
    small, large = (estimate_step(step, {name: (rows, 3)}) for rows in (1024, 4096))
    assert small.updates.keys() == small.ready.keys() == {"hidden", "output"}
    assert small.updates == large.updates
    assert small.updates["hidden"] == pytest.approx(4 * 36 / estimates._UPDATED_BYTES)  # value, gradient, two slots
    assert small.seconds < large.seconds and small.fixed == large.fixed == sum(small.updates.values())
    assert 0 < large.ready["output"] < large.ready["hidden"] < large.seconds
    assert estimate_step(step, {name: (4096, 3)}, cores=2).ready["hidden"] == pytest.approx(large.ready["hidden"] / 2)
    assert estimate_step(step).ready["hidden"] > 0  # without a batch


def test_estimates_count_the_rows_of_a_table():
    step = embedding().step
    (name,) = step.inputs
    assert estimate_step(step, {name: (4,)}).rows == {"table": 4}
    assert estimate_step(step, {name: (400,)}).rows == {"table": 10}
