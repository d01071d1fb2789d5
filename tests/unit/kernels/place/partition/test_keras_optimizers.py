"""Keras optimizers on shards: equal to one device, and computed shard by shard."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.capture.function import CapturedFunction
from autodist.graph.find_stages import find_stages, nodes_for
from autodist.placement.partitioning import shard_name
from autodist.proto import strategy_pb2
from tests.unit.kernels.in_one_process import Trained, assert_same, capture, one_device, train
from tests.unit.kernels.pairs import pairs
from tests.unit.kernels.place.partition.shards import every_cut, partitioned, sharded_plan

optimizers = keras.optimizers

EVERY: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.01),
    "amsgrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "adadelta": lambda: optimizers.Adadelta(0.1),
    "adamax": lambda: optimizers.Adamax(0.01),
    "nadam": lambda: optimizers.Nadam(0.01),
    "ftrl": lambda: optimizers.Ftrl(0.1),
    "rmsprop": lambda: optimizers.RMSprop(0.01),
    "rmsprop, centered": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "lion": lambda: optimizers.Lion(0.01),
    "lamb": lambda: optimizers.Lamb(0.01),
    "adafactor": lambda: optimizers.Adafactor(0.01),
    "muon": lambda: optimizers.Muon(0.01),
    "clipped by global norm": lambda: optimizers.Adam(0.01, global_clipnorm=0.1),
    "clipped by norm": lambda: optimizers.SGD(0.1, clipnorm=0.05),
    "clipped by value": lambda: optimizers.SGD(0.1, clipvalue=0.01),
    "weight decay": lambda: optimizers.SGD(0.1, weight_decay=0.1),
    "average": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    "loss scale": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=8.0, dynamic_growth_steps=2),
    "accumulation": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
}


IN_PART = {
    "adafactor": "AssignVariableOp",  # of a slot that holds one number for each row
    "muon": "Transpose",
    "average": "If",
    "loss scale": "If",
    "accumulation": "If",
}
"""Optimizers with a part that is not computed shard by shard, and the op that needs the whole variable."""

PART_OF_ANOTHER = {"sgd", "momentum", "adam", "rmsprop", "weight decay"}
"""Optimizers whose update is a part of another's: of clipped by value, nesterov, amsgrad, rmsprop, centered and adamw.
"""

LIKE_ANOTHER = {"nesterov", "amsgrad", "adadelta", "adamax", "ftrl", "lion", "clipped by value"}
"""Optimizers that compute each element by itself, as adamw, adagrad and nadam do: for each of them,
`test_the_update_is_done_shard_by_shard` checks that nothing is put together.
"""


pytestmark = pytest.mark.usefixtures("keras_in_float64")


@dataclass(frozen=True)
class Case:
    """A captured step, and on which batches one device trains by it."""

    captured: CapturedFunction
    step: Callable[..., list[tf.Tensor]]
    batches: list

    @cached_property
    def alone(self) -> Trained:
        return one_device(self.captured, self.step, self.batches)

    def check(self, strategy: strategy_pb2.Strategy) -> None:
        assert_same(train(self.captured, strategy, self.batches), self.alone)


@cache
def step_with(name: str) -> Case:
    """Of a table, a matrix and a vector."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"), layers.Embedding(7, 5), layers.GlobalAveragePooling1D(),
            layers.Dense(4, activation="tanh"),
        ]
    )  # fmt: skip
    rng = np.random.default_rng(0)
    return _made(model, EVERY[name](), [rng.integers(0, 7, (6, 3)).astype(np.int32) for _ in range(3)])


@cache
def dense_step(name: str) -> Case:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
    rng = np.random.default_rng(0)
    return _made(model, EVERY[name](), [rng.normal(size=(6, 5)) for _ in range(3)])


@cache
def updated_twice(name: str) -> Case:
    """The second loss of a step reads what the first one has updated, as that of a generator does."""
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
    rng = np.random.default_rng(0)
    return _made(model, EVERY[name](), [rng.normal(size=(6, 5)) for _ in range(2)], updates=2)


def _made(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, inputs: list[np.ndarray], updates: int = 1
) -> Case:
    rng = np.random.default_rng(1)
    batches = [(x, rng.normal(size=(6, 1))) for x in inputs]
    optimizer.build(model.trainable_variables)
    scale = getattr(optimizer, "scale_loss", lambda loss: loss)

    def step(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        losses = []
        for _ in range(updates):
            with tf.GradientTape() as tape:
                losses.append(tf.reduce_mean(tf.square(model(x) - y)))
                scaled = scale(losses[-1])
            optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        return losses

    return Case(capture(step, *batches[0]), step, batches)


@pytest.mark.parametrize("name", [name for name in EVERY if name not in PART_OF_ANOTHER | LIKE_ANOTHER])
def test_rows_at_servers_train_what_one_device_does(name):
    case = step_with(name)
    case.check(sharded_plan(case.captured.step, every_cut(case.captured.step)))


@pytest.mark.parametrize("name", ["lamb", "adafactor", "clipped by global norm", "average"])
def test_columns_that_are_reduced_train_what_one_device_does(name):
    case = step_with(name)
    case.check(sharded_plan(case.captured.step, every_cut(case.captured.step, axis=1), by_server=False))


@pytest.mark.parametrize("name", ["adamw", "clipped by global norm"])
def test_a_second_update_in_a_step_reads_the_first_without_a_warning(name, caplog):
    """The slots of shards are reduced with their gradients, as those of whole variables are."""
    case = updated_twice(name)
    case.check(sharded_plan(case.captured.step, every_cut(case.captured.step)))
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("name", ["lamb", "average"])
def test_so_they_do_without_a_table(name):
    case = dense_step(name)
    case.check(sharded_plan(case.captured.step, every_cut(case.captured.step)))


def test_of_matrices_alone_nothing_is_put_together():
    """The branch that divides rows divides no matrix."""
    captured = dense_step("rmsprop, centered").captured
    assert partitioned(captured.step, sharded_plan(captured.step, every_cut(captured.step)))[1] == ()


@pytest.mark.parametrize("name, axis", pairs([name for name in EVERY if name not in IN_PART], [1, 0], each=5))
def test_the_update_is_done_shard_by_shard(name, axis):
    captured = step_with(name).captured
    step, told = partitioned(captured.step, sharded_plan(captured.step, every_cut(captured.step, axis)))
    is_divided_in_a_branch = name == "rmsprop, centered"  # so does Keras, with sparse rows
    assert any("StatelessIf" in line for line in told) if is_divided_in_a_branch else told == ()
    cut = every_cut(captured.step, axis)
    assert cut.keys().isdisjoint(step.by_name)
    assert {shard_name(variable, k) for variable, one in cut.items() for k in range(len(one.sizes))} <= set(
        step.by_name
    )


@pytest.mark.parametrize(
    "name",
    ["clipped by norm", "lamb", "nesterov", "adamw", "adadelta", "adamax", "ftrl", "rmsprop, centered", "lion"],
)
def test_numbers_travel_and_no_gradients_slots_or_parameters(name):
    """Also for a product of a slot and a number, or for weight decay, which depend on no gradient."""
    captured = dense_step(name).captured
    step, _ = partitioned(captured.step, sharded_plan(captured.step, every_cut(captured.step)))
    stages = find_stages(step)
    updates = nodes_for(step, {*stages.once, *stages.writes})
    assert not [node.name for node in step.graph_def.node if node.name in updates and node.op == "ConcatV2"]


@pytest.mark.parametrize("name", IN_PART)
def test_it_is_told_what_is_put_together(name):
    captured = dense_step(name).captured
    _, told = partitioned(captured.step, sharded_plan(captured.step, every_cut(captured.step)))
    assert any(f"is concatenated for {IN_PART[name]} (" in line for line in told), told
