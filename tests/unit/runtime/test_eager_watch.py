"""All ways of writing and of reading a variable in TensorFlow and Keras are detected.

After a step, the session's values differ from those of the script's objects. A write has to start from the session's
values, and a read has to return them.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.runtime.eager_watch import unwatched
from autodist.runtime.variables import LARGE, TrackedVariable, VariableTracker

OLD = [1.0, 2.0, 3.0]
NEW = [5.0, 6.0, 7.0]
"""After the step."""


class Trained:
    """A variable that a step has written: the session has `NEW`, the script's object `OLD`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tracker = VariableTracker(self.pull, 1)
        self.variable = tf.Variable(OLD)
        self.tracked = self.track(self.variable)
        self.pulls = 0
        self.session = {self.tracked: np.array(NEW, np.float32)}
        self.step()

    def track(self, variable: tf.Variable) -> TrackedVariable:
        tracked = self.tracker.track(variable)
        tracked.is_ahead = False
        return tracked

    def step(self) -> None:
        for tracked in self.session:
            tracked.is_ahead = False
            tracked.fall_behind()
        self.tracker.refresh_aliased()

    def pull(self, read: TrackedVariable | None) -> None:
        self.pulls += 1
        for tracked, value in self.session.items():
            if tracked.is_behind:
                tracked.write(value)
                tracked.is_behind = False

    def saved(self, value: list[float]) -> str:
        """A checkpoint of another process's, in which the variable has that value."""
        return tf.train.Checkpoint(v=tf.Variable(value)).write(str(self.folder / "other"))

    def require_written(self, expected: list[float]) -> None:
        self.tracker.compare_aliased()
        assert self.tracked.is_ahead, "the next step would go on from the old value"
        np.testing.assert_array_equal(self.tracked.read(), expected)


@pytest.fixture
def trained(tmp_path: Path):
    made = Trained(tmp_path)
    yield made
    made.tracker.forget()


def keras_layer(trained: Trained) -> keras.layers.Layer:
    """A built layer with one variable, which the step has written."""
    layer = keras.layers.Dense(3, use_bias=False)
    layer.build((None, 1))
    trained.variable = layer.kernel.value
    trained.tracked = trained.track(trained.variable)
    trained.session[trained.tracked] = np.array([NEW], np.float32)
    trained.step()
    return layer


def rows(*values: float) -> tf.IndexedSlices:
    return tf.IndexedSlices(tf.constant(values), tf.range(len(values)))


def by_checkpoint(trained: Trained) -> None:
    tf.train.Checkpoint(v=trained.variable).restore(trained.saved([8.0, 8.0, 8.0]))


def by_checkpoint_read(trained: Trained) -> None:
    tf.train.Checkpoint(v=trained.variable).read(trained.saved([8.0, 8.0, 8.0])).assert_consumed()


def by_checkpoint_manager(trained: Trained) -> None:
    trained.tracked.write([8.0, 8.0, 8.0])
    with unwatched():
        tf.train.CheckpointManager(tf.train.Checkpoint(v=trained.variable), trained.folder, 3).save()
    trained.tracked.write(OLD)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(v=trained.variable), trained.folder, 3)
    assert manager.restore_or_initialize()


def by_restore_that_waits_for_the_variable(trained: Trained) -> None:
    holder = tf.train.Checkpoint()
    holder.restore(trained.saved([8.0, 8.0, 8.0]))
    holder.v = trained.variable


def by_saver(trained: Trained) -> None:
    with unwatched():
        trained.variable.assign([8.0, 8.0, 8.0])
        saver = tf.compat.v1.train.Saver({"v": trained.variable})
        path = saver.save(None, str(trained.folder / "saver"))
        trained.variable.assign(OLD)
    saver.restore(None, path)


def by_saved_model(trained: Trained) -> None:
    module = tf.Module()
    module.v = tf.Variable([8.0, 8.0, 8.0])
    tf.saved_model.save(module, str(trained.folder / "model"))
    tf.train.Checkpoint(v=trained.variable).restore(str(trained.folder / "model" / "variables" / "variables"))


def by_function(trained: Trained) -> None:
    tf.function(lambda: trained.variable.assign([8.0, 8.0, 8.0]))()


def by_compiled_function(trained: Trained) -> None:
    @tf.function(jit_compile=True)
    def change() -> None:
        trained.variable.assign_add([3.0, 2.0, 1.0])

    change()


def by_nested_function_under_a_condition(trained: Trained) -> None:
    inner = tf.function(lambda: trained.variable.assign([8.0, 8.0, 8.0]))

    @tf.function
    def outer(is_wanted: tf.Tensor) -> None:
        if is_wanted:
            inner()

    outer(tf.constant(True))


def by_loop_of_a_function(trained: Trained) -> None:
    @tf.function
    def count() -> None:
        for _ in tf.range(3):
            trained.variable.assign_add([1.0, 1.0, 1.0])

    count()


def by_python_function(trained: Trained) -> None:
    def assign() -> None:
        trained.variable.assign([8.0, 8.0, 8.0])

    @tf.function
    def call() -> None:
        tf.py_function(assign, [], [])

    call()


def by_numpy_function(trained: Trained) -> None:
    def assign() -> np.ndarray:
        trained.variable.assign([8.0, 8.0, 8.0])
        return np.zeros([], np.float32)

    tf.function(lambda: tf.numpy_function(assign, [], tf.float32))()


def by_wrapped_graph(trained: Trained) -> None:
    def assign() -> tf.Tensor:
        return tf.compat.v1.assign(trained.variable, [8.0, 8.0, 8.0])

    tf.compat.v1.wrap_function(assign, [])()


def by_data_set(trained: Trained) -> None:
    for _ in tf.data.Dataset.range(3).map(lambda _: trained.variable.assign_add([1.0, 1.0, 1.0])):
        pass


def by_copy_of_the_handle(trained: Trained) -> None:
    handle = tf.identity(trained.variable.handle)
    trained.tracked.is_ahead = False  # no more is known by now than that there is a copy
    trained.tracker.refresh_aliased()
    tf.raw_ops.AssignVariableOp(resource=handle, value=[8.0, 8.0, 8.0])


def by_another_thread(trained: Trained) -> None:
    thread = threading.Thread(target=lambda: trained.variable.assign([8.0, 8.0, 8.0]))
    thread.start()
    thread.join()


def by_keras_variable(trained: Trained) -> None:
    keras_layer(trained).kernel.assign([[8.0, 8.0, 8.0]])


def by_set_weights(trained: Trained) -> None:
    keras_layer(trained).set_weights([np.full((1, 3), 8.0)])


def by_load_own_variables(trained: Trained) -> None:
    keras_layer(trained).load_own_variables({"0": np.full((1, 3), 8.0)})


def by_load_weights(trained: Trained) -> None:
    layer = keras_layer(trained)
    other = keras.Sequential([keras.Input((1,)), keras.layers.Dense(3, use_bias=False)])
    other.set_weights([np.full((1, 3), 8.0)])
    other.save_weights(trained.folder / "other.weights.h5")
    keras.Sequential([keras.Input((1,)), layer]).load_weights(trained.folder / "other.weights.h5")


WRITES: dict[str, tuple[Callable[[Trained], object], list[float] | list[list[float]]]] = {
    "assign": (lambda t: t.variable.assign([8.0, 8.0, 8.0]), [8.0, 8.0, 8.0]),
    "assign_add": (lambda t: t.variable.assign_add([1.0, 1.0, 1.0]), [6.0, 7.0, 8.0]),
    "assign_sub": (lambda t: t.variable.assign_sub([1.0, 1.0, 1.0]), [4.0, 5.0, 6.0]),
    "slice": (lambda t: t.variable[1].assign(8.0), [5.0, 8.0, 7.0]),
    "slice of several": (lambda t: t.variable[1:].assign([8.0, 9.0]), [5.0, 8.0, 9.0]),
    "scatter_update": (lambda t: t.variable.scatter_update(rows(8.0)), [8.0, 6.0, 7.0]),
    "scatter_add": (lambda t: t.variable.scatter_add(rows(1.0)), [6.0, 6.0, 7.0]),
    "scatter_sub": (lambda t: t.variable.scatter_sub(rows(1.0)), [4.0, 6.0, 7.0]),
    "scatter_max": (lambda t: t.variable.scatter_max(rows(8.0)), [8.0, 6.0, 7.0]),
    "scatter_min": (lambda t: t.variable.scatter_min(rows(3.0)), [3.0, 6.0, 7.0]),
    "scatter_mul": (lambda t: t.variable.scatter_mul(rows(2.0)), [10.0, 6.0, 7.0]),
    "scatter_div": (lambda t: t.variable.scatter_div(rows(2.0)), [2.5, 6.0, 7.0]),
    "batch_scatter_update": (lambda t: t.variable.batch_scatter_update(rows(8.0)), [8.0, 6.0, 7.0]),
    "scatter_nd_update": (lambda t: t.variable.scatter_nd_update([[0]], [8.0]), [8.0, 6.0, 7.0]),
    "scatter_nd_add": (lambda t: t.variable.scatter_nd_add([[0]], [1.0]), [6.0, 6.0, 7.0]),
    "scatter_nd_sub": (lambda t: t.variable.scatter_nd_sub([[0]], [1.0]), [4.0, 6.0, 7.0]),
    "scatter_nd_max": (lambda t: t.variable.scatter_nd_max([[0]], [8.0]), [8.0, 6.0, 7.0]),
    "scatter_nd_min": (lambda t: t.variable.scatter_nd_min([[0]], [3.0]), [3.0, 6.0, 7.0]),
    "tensor_scatter by assign": (
        lambda t: t.variable.assign(tf.tensor_scatter_nd_update(t.variable, [[0]], [8.0])), [8.0, 6.0, 7.0]
    ),
    "compat.v1.assign": (lambda t: tf.compat.v1.assign(t.variable, [8.0, 8.0, 8.0]), [8.0, 8.0, 8.0]),
    "compat.v1.assign_add": (lambda t: tf.compat.v1.assign_add(t.variable, [1.0, 1.0, 1.0]), [6.0, 7.0, 8.0]),
    "compat.v1.scatter_update": (lambda t: tf.compat.v1.scatter_update(t.variable, [0], [8.0]), [8.0, 6.0, 7.0]),
    "AssignVariableOp": (
        lambda t: tf.raw_ops.AssignVariableOp(resource=t.variable.handle, value=[8.0, 8.0, 8.0]), [8.0, 8.0, 8.0]
    ),
    "AssignAddVariableOp": (
        lambda t: tf.raw_ops.AssignAddVariableOp(resource=t.variable.handle, value=[1.0, 1.0, 1.0]), [6.0, 7.0, 8.0]
    ),
    "ResourceScatterUpdate": (
        lambda t: tf.raw_ops.ResourceScatterUpdate(resource=t.variable.handle, indices=[0], updates=[8.0]),
        [8.0, 6.0, 7.0],
    ),
    "ResourceStridedSliceAssign": (
        lambda t: tf.raw_ops.ResourceStridedSliceAssign(
            ref=t.variable.handle, begin=[0], end=[1], strides=[1], value=[8.0]
        ),
        [8.0, 6.0, 7.0],
    ),
    "ResourceApplyGradientDescent": (
        lambda t: tf.raw_ops.ResourceApplyGradientDescent(var=t.variable.handle, alpha=1.0, delta=[1.0, 1.0, 1.0]),
        [4.0, 5.0, 6.0],
    ),
    "Checkpoint.restore": (by_checkpoint, [8.0, 8.0, 8.0]),
    "Checkpoint.read": (by_checkpoint_read, [8.0, 8.0, 8.0]),
    "CheckpointManager": (by_checkpoint_manager, [8.0, 8.0, 8.0]),
    "restore that waits": (by_restore_that_waits_for_the_variable, [8.0, 8.0, 8.0]),
    "Saver": (by_saver, [8.0, 8.0, 8.0]),
    "SavedModel": (by_saved_model, [8.0, 8.0, 8.0]),
    "function": (by_function, [8.0, 8.0, 8.0]),
    "compiled function": (by_compiled_function, [8.0, 8.0, 8.0]),
    "nested function": (by_nested_function_under_a_condition, [8.0, 8.0, 8.0]),
    "loop of a function": (by_loop_of_a_function, [8.0, 9.0, 10.0]),
    "py_function": (by_python_function, [8.0, 8.0, 8.0]),
    "numpy_function": (by_numpy_function, [8.0, 8.0, 8.0]),
    "wrap_function": (by_wrapped_graph, [8.0, 8.0, 8.0]),
    "data set": (by_data_set, [8.0, 9.0, 10.0]),
    "copy of the handle": (by_copy_of_the_handle, [8.0, 8.0, 8.0]),
    "another thread": (by_another_thread, [8.0, 8.0, 8.0]),
    "keras.Variable": (by_keras_variable, [[8.0, 8.0, 8.0]]),
    "set_weights": (by_set_weights, [[8.0, 8.0, 8.0]]),
    "load_own_variables": (by_load_own_variables, [[8.0, 8.0, 8.0]]),
    "load_weights": (by_load_weights, [[8.0, 8.0, 8.0]]),
}  # fmt: skip


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_writes_are_seen_and_start_from_the_value_of_the_step(trained: Trained, way: str):
    write, expected = WRITES[way]
    write(trained)
    trained.require_written(expected)


def by_checkpoint_saved(trained: Trained) -> np.ndarray:
    path = tf.train.Checkpoint(v=trained.variable).write(str(trained.folder / "saved"))
    return tf.train.load_checkpoint(path).get_tensor("v/.ATTRIBUTES/VARIABLE_VALUE")


def by_saved_model_saved(trained: Trained) -> np.ndarray:
    module = tf.Module()
    module.v = trained.variable
    module.give = tf.function(lambda: module.v * 1.0, input_signature=[])
    tf.saved_model.save(module, str(trained.folder / "model"))
    loaded = tf.saved_model.load(str(trained.folder / "model"))
    return loaded.give()


def by_data_set_that_reads(trained: Trained) -> np.ndarray:
    data = tf.data.Dataset.range(1).map(lambda _: trained.variable * 1.0)
    trained.session[trained.tracked] = np.array([9.0, 9.0, 9.0], np.float32)
    trained.step()
    np.testing.assert_array_equal(next(iter(data)), [9.0, 9.0, 9.0])
    trained.session[trained.tracked] = np.array(NEW, np.float32)
    trained.step()
    return next(iter(data))


READS: dict[str, Callable[[Trained], object]] = {
    "numpy": lambda t: t.variable.numpy(),
    "value": lambda t: t.variable.value(),
    "read_value": lambda t: t.variable.read_value(),
    "read_value_no_copy": lambda t: t.variable.read_value_no_copy(),
    "arithmetic": lambda t: t.variable + 0.0,
    "NumPy's conversion": lambda t: np.asarray(t.variable),
    "one by one": lambda t: [float(x) for x in t.variable],
    "slice": lambda t: t.variable[:],
    "gather": lambda t: tf.gather(t.variable, [0, 1, 2]),
    "sparse_read": lambda t: t.variable.sparse_read([0, 1, 2]),
    "raw operation": lambda t: tf.raw_ops.Mul(x=t.variable, y=1.0),
    "raw operation of several": lambda t: tf.raw_ops.Pack(values=[t.variable])[0],
    "sum of several": lambda t: tf.raw_ops.AddN(inputs=[t.variable, tf.zeros([3])]),
    "ReadVariableOp": lambda t: tf.raw_ops.ReadVariableOp(resource=t.variable.handle, dtype=tf.float32),
    "ResourceGather": lambda t: tf.raw_ops.ResourceGather(
        resource=t.variable.handle, indices=[0, 1, 2], dtype=tf.float32
    ),
    "value of another's assignment": lambda t: tf.Variable(OLD).assign(t.variable),
    "function": lambda t: tf.function(lambda: t.variable * 1.0)(),
    "py_function": lambda t: tf.function(lambda: tf.py_function(lambda: t.variable * 1.0, [], tf.float32))(),
    "copy": lambda t: copy.deepcopy(t.variable),
    "initial value of another": lambda t: tf.Variable(t.variable),
    "checkpoint": by_checkpoint_saved,
    "SavedModel": by_saved_model_saved,
    "data set": by_data_set_that_reads,
}


@pytest.mark.parametrize("way", READS)
def test_reads_return_the_value_of_the_step(trained: Trained, way: str):
    np.testing.assert_array_equal(READS[way](trained), NEW)
    assert trained.pulls


@pytest.mark.parametrize("way", [w for w in READS if w not in ("data set", "copy", "initial value of another")])
def test_operations_that_only_read_write_nothing(trained: Trained, way: str):
    READS[way](trained)
    trained.tracker.compare_aliased()
    assert not trained.tracked.is_ahead


def test_a_function_that_reads_some_and_writes_others(trained: Trained):
    other = tf.Variable(OLD)
    tracked = trained.track(other)

    @tf.function
    def add() -> None:
        trained.variable.assign_add(other)

    add()
    trained.require_written([6.0, 8.0, 10.0])
    assert not tracked.is_ahead


@pytest.mark.parametrize(
    "write",
    {
        "assign": lambda v: v.assign([1.0]),
        "raw": lambda v: tf.raw_ops.AssignVariableOp(resource=v.handle, value="text"),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_an_assignment_that_fails_leaves_the_steps_value(trained: Trained, write):
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        write[1](trained.variable)
    assert not trained.tracked.is_ahead
    np.testing.assert_array_equal(trained.variable, NEW)


def test_an_assignment_brings_nothing_up_to_date(trained: Trained):
    trained.variable.assign([8.0, 8.0, 8.0])
    assert trained.pulls == 0


def test_the_shape_of_a_large_value_that_the_session_alone_has_is_told(trained: Trained):
    large = tf.Variable(tf.ones([LARGE // 4]))
    trained.session[trained.track(large)] = np.ones(LARGE // 4, np.float32)
    trained.step()
    assert tf.raw_ops.VariableShape(input=large.handle).numpy() == [LARGE // 4]
    assert tf.function(lambda: tf.shape(large))().numpy() == [LARGE // 4]


def test_a_data_set_that_was_made_before_the_first_step_writes(trained: Trained):
    variable = tf.Variable(OLD)
    data = tf.data.Dataset.range(2).map(lambda _: variable.assign_add([1.0, 1.0, 1.0]))
    trained.tracked = trained.track(variable)
    trained.session[trained.tracked] = np.array(NEW, np.float32)
    trained.step()
    list(data)
    trained.require_written([7.0, 8.0, 9.0])


def test_two_runs_see_one_variable(trained: Trained):
    other = VariableTracker(lambda read: None, 1)
    tracked = other.track(trained.variable)
    tracked.is_ahead = False
    trained.variable.assign([8.0, 8.0, 8.0])
    assert tracked.is_ahead and trained.tracked.is_ahead
    tracked.is_ahead = trained.tracked.is_ahead = False
    other.forget()
    trained.variable.assign([9.0, 9.0, 9.0])
    assert trained.tracked.is_ahead and not tracked.is_ahead
