"""Captures the stored steps again: from programs that train under AutoDist, and from steps of unit tests."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.capture.gradients import recording_gradients
from autodist.capture.graph_mode import CapturedGraph
from autodist.graph.step import Step
from autodist.kernels import Fetching
from autodist.runs.run_steps import RunSteps
from autodist.runs.step_plans import share_names
from tests.equivalence.cases import PROGRAMS
from tests.equivalence.train import SEED
from tests.replay.stored import PIPELINES, StoredStep, undecided
from tests.unit.kernels import in_one_process, whole_sum_steps
from tests.unit.kernels.drawn_steps import Choices, make_batches, make_step
from tests.unit.kernels.table_steps import table_step

OF_PROGRAMS: Mapping[str, Sequence[int]] = {
    "keras-convolution-adam": [0],
    "keras-mlp-adam-float32": [0],
    "keras-embedding-adagrad": [0],
    "fit_dropout": [0],
    "fit_ema": [0],
    "fit_gradient_accumulation": [0],
    "fit_half_precision": [0],
    "fit_loss_scale": [0],
    "fit_masked_lstm": [0],
    "fit_metrics_and_validation": [0],
    "fit_outputs_reduced_in_two_ways": [0],
    "fit_synchronized_norms": [0],
    "jit_fit_recurrent": [0],
    "function-embedding-adam-clipped": [0],
    "jit_step": [0],
    "step_cotangents_adversarial": [0],
    "step_cotangents_clip_gradient_of_weights": [0],
    "step_cotangents_clip_under_a_mask": [0],
    "step_cotangents_two_groups": [0],
    "step_large_matrix": [0],
    "step_mean_and_penalty": [0],
    "step_nested_functions": [0],
    "step_odd_types": [0],
    "step_repeated_ids": [0],
    "step_scalar_variable": [0],
    "step_statistics": [0],
    "step_two_optimizers": [0],
    "graph-convolution-momentum": [0, 1, 2],
    "graph-embedding-adagrad": [0, 1, 2],
    "graph_alternating_optimizers": [0, 1, 2, 3],
    "graph_fetches": [0, 2, 3, 4],
    "graph_global_norm": [0, 2],
    "graph_initializable_iterator": [0, 1, 2, 3],
    "graph_loop": [0, 2],
    "graph_terms_of_several_weights": [0, 2],
}
"""The stored steps of each program, counted in the order in which they are prepared to run.

For a session, the whole graph is the first step. The first has the program's name, the others are numbered.
"""


class _Enough(BaseException):
    """Ends a program whose steps have been captured."""


def captured_by_program(name: str) -> dict[str, StoredStep]:
    """Returns the stored steps of a program, as prepared to run on two replicas."""
    keras.config.set_floatx("float64")
    keras.utils.clear_session()
    keras.utils.set_random_seed(SEED)
    node = {"address": "localhost", "cpus": [0, 1]}
    with _noting(name, OF_PROGRAMS[name]) as found, contextlib.suppress(_Enough):
        PROGRAMS[name](AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [node]})))
    return found


@contextlib.contextmanager
def _noting(name: str, positions: Sequence[int]) -> Iterator[dict[str, StoredStep]]:
    first = name.replace("-", "_")
    found: dict[str, StoredStep] = {}
    planned: dict[str, tf.compat.v1.GraphDef] = {}
    count = itertools.count()
    plan, program = RunSteps.plan, RunSteps.program

    def note(step: StoredStep) -> str:
        position = next(count)
        own = f"{first}.{position}" if position else first
        if position in positions:
            found[own] = step
        if position == max(positions):
            raise _Enough
        return own

    def noting_plan(self: RunSteps, step: Step, names: Mapping[str, str], *given: Any, **told: Any) -> Any:
        if step.gradients:
            own = note(StoredStep(undecided(share_names(step, names))))
            planned.clear()
            planned[own] = step.graph_def
        return plan(self, step, names, *given, **told)

    def noting_program(self: RunSteps, *given: Any, **told: Any) -> Any:
        bound = inspect.signature(program).bind(self, *given, **told)
        bound.apply_defaults()
        asked = bound.arguments
        if all(asked["step"].graph_def is not graph_def for graph_def in planned.values()):
            pipeline = next(key for key, kernels in PIPELINES.items() if kernels is asked["kernels"])
            item = undecided(share_names(asked["step"], asked["names"]))
            note(StoredStep(item, next(iter(planned), None), pipeline, asked["fetching"] is Fetching.BY_ALL))
        return program(self, *given, **told)

    with mock.patch.object(RunSteps, "plan", noting_plan), mock.patch.object(RunSteps, "program", noting_program):
        yield found


def _drawn(**choices: Any) -> Step:
    step = make_step(Choices(**choices))
    return in_one_process.capture(step, *make_batches(0, [4])[0]).step


def _momentum_and_counter() -> Step:
    return _drawn(loss="masked", optimizer="momentum", is_tied=True, is_frozen=True, counts_steps=True)


def _adamw() -> Step:
    return _drawn(loss="mean", optimizer="adamw", is_tied=False, is_frozen=False, counts_steps=False)


def _rmsprop() -> Step:
    return _drawn(loss="weighted", optimizer="rmsprop", is_tied=False, is_frozen=True, counts_steps=False)


def _generator() -> Step:
    """A weight that is trained on noise from a `tf.random.Generator`."""
    weight = tf.Variable(np.linspace(-0.5, 1.0, 6).reshape(3, 2), name="weight")
    generator = tf.random.Generator.from_seed(1)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            noise = generator.normal(tf.shape(x), dtype=x.dtype)
            loss = tf.reduce_mean(tf.square((x + noise) @ weight - 1.0))
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    return in_one_process.capture(step, np.zeros((4, 3)), is_global=True).step


def _evaluation() -> Step:
    """Rows, means and metrics of the whole batch, in a step that trains nothing."""
    weight = tf.Variable(np.linspace(-0.5, 1.0, 12).reshape(4, 3), name="weight")
    metrics = [
        keras.metrics.Mean(dtype="float64"),
        keras.metrics.AUC(num_thresholds=5, dtype="float64"),
        keras.metrics.R2Score(dtype="float64"),
    ]

    def step(x: tf.Tensor) -> tuple[object, ...]:
        made = tf.sigmoid(x @ weight)
        metrics[0].update_state(tf.reduce_mean(x), sample_weight=tf.shape(x)[0])
        for metric in metrics[1:]:
            metric.update_state(tf.cast(x[:, :3] > 0.3, tf.float64), made)
        loss = tf.reduce_mean(tf.square(made), 0)
        chosen = tf.argmax(made, 1)
        results = [metric.result() for metric in metrics]
        return made, loss, chosen, tf.strings.as_string(chosen), tf.reduce_max(made, 0), results

    return in_one_process.capture(step, np.zeros((4, 4)), is_global=True, is_whole=True).step


def _joined_rows() -> Step:
    """A step with tables whose rows are the same for every example, distinct, or both."""
    rng = np.random.default_rng(0)
    tables = [keras.Variable(rng.normal(size=(9, 3)), dtype="float64", name=f"table_{k}") for k in range(3)]
    optimizer = keras.optimizers.Adagrad(0.1)
    optimizer.build(tables)

    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            alike, once, both = (table.value for table in tables)
            different, places = tf.unique(tf.reshape(ids, [-1]))
            found = tf.reshape(tf.gather(tf.gather(once, different), places), [-1, 2, 3])
            found = found + tf.gather(alike, tf.constant([2, 5])) + tf.gather(both, tf.constant([7, 8]))
            loss = tf.reduce_mean(tf.square(tf.sin(found + tf.gather(both, ids)) - 0.5))
        gradients = tape.gradient(loss, [table.value for table in tables])
        optimizer.apply_gradients(zip(gradients, tables, strict=True))
        return loss

    return in_one_process.capture(step, np.zeros((4, 2), np.int32)).step


def _clipped_rows() -> Step:
    """A step with a table whose rows are clipped with all others by their norm."""
    return table_step(keras.optimizers.SGD(0.1, global_clipnorm=0.01))[0].step


def _descending(variables: Sequence[tf.Variable], loss_of: Callable[..., Any], *examples: Any) -> Step:
    """Returns a step of gradient descent on the mean of `loss_of(examples)`."""

    def step(*batch: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss, *more = tf.nest.flatten(loss_of(*batch))
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss, *more

    return in_one_process.capture(step, *examples).step


def _of_layers(inputs: Sequence[int], *made: keras.layers.Layer) -> Step:
    """Layers one after the other."""
    model = keras.Sequential([keras.Input(inputs), *made])
    variables = [v.value for v in model.trainable_variables]
    return _descending(variables, lambda x: tf.reduce_mean(tf.square(model(x, training=True))), np.zeros((4, *inputs)))


def _attention() -> Step:
    """A step on sequences whose positions attend to one another."""
    layers = keras.layers
    sequence = keras.Input([6, 4])
    seen = layers.LayerNormalization()(layers.MultiHeadAttention(2, 3)(sequence, sequence))
    model = keras.Model(sequence, layers.GRU(3, unroll=True)(seen))
    variables = [v.value for v in model.trainable_variables]
    return _descending(variables, lambda x: tf.reduce_mean(tf.square(model(x))), np.zeros((4, 6, 4)))


def _images() -> Step:
    layers = keras.layers
    return _of_layers(
        [8, 8, 2],
        layers.DepthwiseConv2D(3, padding="same"),
        layers.MaxPooling2D(2),
        layers.Conv2DTranspose(3, 3, strides=2),
        layers.UpSampling2D(2, interpolation="bilinear"),
        layers.GroupNormalization(3),
        layers.AveragePooling2D(3),
        layers.GlobalMaxPooling2D(),
    )


def _many_ops() -> Step:
    """Values that are made of the batch by ops which reorder it, count it, cut it or put it together."""
    weight = tf.Variable(np.linspace(-0.5, 1.0, 12).reshape(4, 3), name="weight")

    def values(x: tf.Tensor, ids: tf.Tensor) -> Any:
        made = tf.tanh(x @ weight)
        count = tf.shape(x)[0]
        places = tf.stack([tf.range(count), ids], 1)
        totals = [
            tf.gather_nd(made, places),
            tf.one_hot(ids, 3, dtype=x.dtype) * made,
            tf.cumsum(made, axis=1),
            tf.sort(made, axis=1),
            tf.math.top_k(made, 2)[0],
            tf.concat([made, made * 2.0], 1),
            tf.stack([made, -made], 1),
            tf.tile(made[:, None], [1, 2, 1]),
            tf.pad(made, [[0, 0], [1, 1]]),
            tf.split(made, 3, 1)[1],
            tf.einsum("bi,bj->bij", made, made),
            tf.linalg.matvec(tf.einsum("bi,bj->bij", made, made) + tf.eye(3, dtype=x.dtype), made),
            tf.reverse(made, [1]),
            tf.repeat(made, 2, axis=1),
            tf.map_fn(lambda row: row * tf.reduce_sum(row), made),
            tf.where(made > 0.1, made, tf.zeros_like(made)),
            tf.reshape(made, [count, 3, 1]),
            tf.transpose(made),
            tf.nn.softmax_cross_entropy_with_logits(tf.one_hot(ids, 3, dtype=x.dtype), made),
        ]
        loss = tf.add_n([tf.reduce_mean(tf.square(value)) for value in totals])
        loss += tf.reduce_sum(tf.math.unsorted_segment_sum(made, ids, 3)) / tf.cast(count, x.dtype)
        used = tf.cast(ids > 0, x.dtype)
        masked = tf.math.divide_no_nan(tf.reduce_sum(made[:, 0] * used), tf.reduce_sum(used))
        return (
            loss + 0.1 * masked, masked, tf.reduce_max(made), tf.reduce_min(made, 0), tf.reduce_any(made > 0.3),
            tf.math.bincount(ids, minlength=3, maxlength=3), tf.norm(made), count, totals[0], tf.transpose(made),
        )  # fmt: skip

    return _descending([weight], values, np.zeros((4, 4)), np.zeros(4, np.int32))


def _aggregations() -> Step:
    """A step that writes state with declared aggregations."""
    weight = tf.Variable(np.linspace(-0.5, 1.0, 6).reshape(3, 2), name="weight")
    kinds = tf.VariableAggregation
    states = [
        tf.Variable(np.zeros(2), name=kind.name.lower(), trainable=False, aggregation=kind)
        for kind in (kinds.NONE, kinds.MEAN, kinds.SUM, kinds.ONLY_FIRST_REPLICA)
    ]

    def values(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        made = x @ weight
        for state in states:
            state.assign(0.5 * state + tf.math.reduce_std(made, 0))
        states[2].assign_add(made[0])
        return tf.reduce_mean(tf.square(made)), *(state.read_value() for state in states)

    return _descending([weight], values, np.zeros((4, 3)))


def _update_by_loss() -> Step:
    """The update takes more of the batch than a gradient: it is as long as the loss is large."""
    weight = tf.Variable(np.linspace(-0.5, 1.0, 6).reshape(3, 2), name="weight")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight - 1.0))
        weight.assign_sub(0.1 * loss * tape.gradient(loss, weight))
        return loss

    return in_one_process.capture(step, np.zeros((4, 3))).step


def _scattered_state() -> Step:
    """State whose rows are written: counts of classes, and a queue of the last rows of all replicas."""
    weight = tf.Variable(np.linspace(-0.5, 1.0, 6).reshape(3, 2), name="weight")
    counts = tf.Variable(np.zeros(4), trainable=False, name="counts")
    queue = tf.Variable(np.zeros([8, 2]), trainable=False, name="queue")
    place = tf.Variable(0, trainable=False, name="place")

    def step(x: tf.Tensor) -> tf.Tensor:
        classes = tf.cast(tf.clip_by_value(tf.floor(x[:, 0] + 2.0), 0, 3), tf.int32)
        counts.scatter_add(tf.IndexedSlices(tf.ones_like(x[:, 0]), classes))
        rows = tf.distribute.get_replica_context().all_gather(x @ tf.stop_gradient(weight), 0)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weight @ tf.transpose(queue + 1.0)))
        count = tf.shape(rows)[0]
        queue.scatter_update(tf.IndexedSlices(rows, (place + tf.range(count)) % 8))
        place.assign((place + count) % 8)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    return in_one_process.capture(step, np.zeros((4, 3))).step


def _whole_sums(make: Callable[[], Callable[..., object]]) -> Step:
    return in_one_process.capture(make(), np.zeros((4, 3)), is_global=True).step


def _sampled_classes() -> StoredStep:
    """word2vec, as scripts for TensorFlow 1 have it: a run of a session that draws classes for itself."""
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, recording_gradients(in_functions=False) as notes:
        words = v1.placeholder(tf.int32, [None], "words")
        labels = v1.placeholder(tf.int64, [None, 1], "labels")
        embeddings, matrix = (v1.get_variable(name, [20, 4]) for name in ("embeddings", "matrix"))
        bias = v1.get_variable("bias", [20])
        seen = tf.nn.embedding_lookup(embeddings, words)
        loss = tf.reduce_mean(v1.nn.nce_loss(matrix, bias, labels, seen, 6, 20))
        train = v1.train.AdagradOptimizer(0.5).minimize(loss)
    captured = CapturedGraph.of(graph, notes.calls)
    step = captured.step([loss.name], [train.name], {words.name: 0, labels.name: 0})
    return StoredStep(step, reduces_outputs=False)


OF_TESTS: Mapping[str, Callable[[], Step | StoredStep]] = {
    "adamw": _adamw,
    "aggregations": _aggregations,
    "attention": _attention,
    "clipped_rows": _clipped_rows,
    "evaluation": _evaluation,
    "generator": _generator,
    "images": _images,
    "joined_rows": _joined_rows,
    "many_ops": _many_ops,
    "momentum_and_counter": _momentum_and_counter,
    "rmsprop": _rmsprop,
    "sampled_classes": _sampled_classes,
    "scattered_state": _scattered_state,
    "sums_asked_of_distribute": lambda: _whole_sums(whole_sum_steps.asked_of_distribute),
    "sums_in_adversaries": lambda: _whole_sums(whole_sum_steps.adversaries),
    "sums_in_masked_loss": lambda: _whole_sums(whole_sum_steps.masked_loss),
    "update_by_loss": _update_by_loss,
}
"""Functions that return the other stored steps."""


def capture(name: str) -> dict[str, StoredStep]:
    """Returns the stored steps of a program or of a test, by the names of their files."""
    if name in OF_PROGRAMS:
        return captured_by_program(name)
    keras.config.set_floatx("float64")
    keras.utils.clear_session()
    keras.utils.set_random_seed(SEED)
    made = OF_TESTS[name]()
    return {name: made if isinstance(made, StoredStep) else StoredStep(undecided(made))}
