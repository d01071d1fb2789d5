"""Local steps: as if the workers trained one after the other on one device, and averaged their changes at times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist.batch.examples import share_of
from autodist.compressors import Int8
from autodist.errors import StrategyError
from autodist.graph.step import EXAMPLES
from autodist.kernels import Context, rewrite
from autodist.proto import strategy_pb2
from autodist.runs.memory_needs import held_bytes
from autodist.synchronizers import LocalSteps
from tests.unit.kernels.drawn_steps import OPTIMIZERS, Choices, make_batches, make_step
from tests.unit.kernels.in_one_process import Batch, Session, Trained, capture, one_device, plan, rewritten, train
from tests.unit.kernels.pairs import pairs

TRAINED = ("table", "kernel", "gain")
AVERAGE, DILOCO = LocalSteps(2), LocalSteps(2, 0.7, 0.9)
EACH_STEP = LocalSteps(1)


def one_after_the_other(
    make, batches: Sequence[Batch], layout: Sequence[int], local: LocalSteps
) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """Trains a copy of the model for each worker of `layout` on its part of the batches, on one device.

    Returns the shared values of the trained variables, and the values of all variables by worker.
    """
    workers = dict.fromkeys(layout)
    steps = {worker: make() for worker in workers}
    sources = {}
    for worker, step in steps.items():
        captured = capture(step, *batches[0])
        names = [v.name for v in captured.step.variables]
        sources[worker] = dict(zip(names, captured.sources, strict=True))
    shared = {name: sources[0][name].numpy() for name in TRAINED}
    velocity = {name: np.zeros_like(value) for name, value in shared.items()}
    examples = dict.fromkeys(workers, 0)
    for number, batch in enumerate(batches, 1):
        for worker, step in steps.items():
            share = share_of(len(batch[0]), layout, worker)
            if share.size:
                step(*(tf.constant(value[share.start : share.start + share.size]) for value in batch))
            examples[worker] += share.size
        if number % local.steps == 0:
            for name in TRAINED:
                changes = [sources[w][name].numpy() - shared[name] for w in workers]
                mean = np.average(changes, 0, [examples[w] for w in workers])
                velocity[name] = local.outer_momentum * velocity[name] + mean
                step = mean + local.outer_momentum * velocity[name]
                shared[name] = shared[name] + local.outer_learning_rate * step
                for w in workers:
                    sources[w][name].assign(shared[name])
            examples = dict.fromkeys(workers, 0)
    return shared, [{name: v.numpy() for name, v in sources[w].items()} for w in workers]


def trained(make, batches, workers=2, replicas=1, local: Mapping[str, LocalSteps] | None = None, **options) -> Trained:
    captured = capture(make(), *batches[0])
    return train(captured, plan(captured.step, workers, replicas, local=local, **options), batches)


def assert_close(values: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(values[name], value, rtol=1e-11, atol=1e-11, err_msg=name)


LAYOUTS = {
    "2 workers": {"workers": 2},
    "3 workers, one more without replicas": {"workers": 3, "servers": 1},
    "2 workers with 2 replicas each": {"workers": 2, "replicas": 2},
}


@pytest.mark.parametrize("optimizer, layout", pairs(sorted(OPTIMIZERS), LAYOUTS))
def test_equals_workers_that_train_one_after_the_other(optimizer, layout):
    options = LAYOUTS[layout]
    choices = Choices("mean", optimizer, is_tied=True, is_frozen=True, counts_steps=True)
    batches = make_batches(3, [12, 9, 12, 7, 12])
    make = lambda: make_step(choices)  # noqa: E731
    layout = [w for w in range(options["workers"]) for _ in range(options.get("replicas", 1))]
    shared, _ = one_after_the_other(make, batches, layout, DILOCO)
    result = trained(make, batches, local=dict.fromkeys(TRAINED, DILOCO), **options)
    assert_close({name: result.variable(name) for name in TRAINED}, shared)


def test_slots_and_outputs_are_those_of_each_worker():
    make = lambda: make_step(Choices("mean", "adam", False, False, True))  # noqa: E731
    batches = make_batches(3, [8, 8, 8])
    _, values = one_after_the_other(make, batches, [0, 1], AVERAGE)
    result = trained(make, batches, local=dict.fromkeys(TRAINED, AVERAGE))
    for worker, expected in enumerate(values):
        own = result.variables[worker]  # optimizers are numbered in their order
        slots = {name: value for name, value in zip(own, expected.values(), strict=True) if name not in TRAINED}
        assert len(slots) > len(TRAINED)
        assert_close(own, slots)
    assert result.outputs[0][0] != result.outputs[0][1]


@pytest.mark.parametrize("loss, sizes", [("mean", [8, 5, 7, 1]), ("weighted", [6, 6])])
def test_one_local_step_of_sgd_is_one_devices(loss, sizes):
    choices = Choices(loss, "sgd", is_tied=True, is_frozen=False, counts_steps=True)
    batches = make_batches(5, sizes)
    step = make_step(choices)
    captured = capture(step, *batches[0])
    strategy = plan(captured.step, 3, local=dict.fromkeys(TRAINED, EACH_STEP))
    result, expected = train(captured, strategy, batches), one_device(captured, step, batches)
    assert_close({name: result.variable(name) for name in TRAINED}, {n: expected.variable(n) for n in TRAINED})


@pytest.mark.parametrize("owners", [{}, {"table": 1}])
def test_mixes_with_variables_that_are_synchronized_in_each_step(owners):
    """With an outer step after each step of SGD, both are one device's."""
    choices = Choices("mean", "sgd", is_tied=False, is_frozen=False, counts_steps=True)
    batches = make_batches(5, [8, 5, 7])
    step = make_step(choices)
    captured = capture(step, *batches[0])
    strategy = plan(captured.step, 2, 2, owners=owners, local={"kernel": EACH_STEP, "gain": EACH_STEP})
    result, expected = train(captured, strategy, batches), one_device(captured, step, batches)
    assert_close({name: result.variable(name) for name in TRAINED}, {n: expected.variable(n) for n in TRAINED})
    for worker in range(2):
        for one, other in zip(result.outputs, expected.outputs, strict=True):
            np.testing.assert_allclose(one[worker], other[0], rtol=1e-11)


def test_variables_may_have_different_numbers_of_local_steps():
    make = lambda: make_step(Choices("mean", "sgd", False, False, False))  # noqa: E731
    batches = make_batches(3, [8] * 6)
    local = {"table": LocalSteps(3), "kernel": LocalSteps(2), "gain": LocalSteps(2)}
    captured = capture(make(), *batches[0])
    session = Session(captured, plan(captured.step, 2, local=local))
    assert sorted(one.every for one in session.steps[0].outer_steps.values()) == [2, 3]
    result = session.train(batches)
    for name in TRAINED:
        result.variable(name)  # equal on both workers after six steps


def test_a_variable_belongs_to_the_outer_step_of_the_first_program_that_trains_it():
    captured = capture(make_step(Choices("mean", "sgd", False, False, False)), *make_batches(1, [2])[0])
    strategy = plan(captured.step, 2, local={"table": DILOCO, "kernel": DILOCO, "gain": DILOCO})
    first = rewrite(captured.step, Context(strategy, 0))
    [(key, outer)] = first.outer_steps.items()
    assert len(outer.variables) == 3
    of_kernel = dict.fromkeys(outer.variables[1:2], key)
    later = rewrite(captured.step, Context(strategy, 0, outer_steps=of_kernel))
    [(other, rest)] = later.outer_steps.items()
    assert other != key and rest.variables == (outer.variables[0], outer.variables[2])
    counts = {name for name in later.initializers if name.endswith("/examples")}
    assert counts == {f"local_steps/{one}/examples" for one in (key, other)}  # its examples count for both
    last = rewrite(captured.step, Context(strategy, 0, outer_steps=dict.fromkeys(outer.variables, key)))
    assert not last.outer_steps and f"local_steps/{key}/examples" in last.initializers


def test_steps_send_nothing_and_outer_steps_send_the_variables():
    step = make_step(Choices("mean", "adam", True, False, True))
    captured = capture(step, *make_batches(1, [4])[0])
    for item in rewritten(captured, plan(captured.step, 2, local=dict.fromkeys(TRAINED, DILOCO))):
        index = item.graph_index
        runs = {"step": [*item.targets, *(name.partition(":")[0] for name in item.outputs)]}
        [outer] = item.outer_steps.values()
        runs["outer"] = list(outer.nodes)
        sent = {}
        for name, roots in runs.items():
            seen, front = set(), list(roots)
            while front:
                node = front.pop()
                if node not in seen:
                    seen.add(node)
                    front += index.sources[node]
            sent[name] = [node for node in seen if index.nodes[node].op == "QueueEnqueueV2"]
        assert not sent["step"] and len(sent["outer"]) == 1


def test_declared_means_are_averaged_with_the_variables():
    def make():
        kernel = keras.Variable(np.ones(2), dtype="float64", name="kernel")
        mean = keras.Variable(np.zeros(2), dtype="float64", name="mean", trainable=False, aggregation="mean")
        total = keras.Variable(0.0, dtype="float64", name="total", trainable=False, aggregation="sum")

        def step(x):
            mean.assign(0.5 * mean + 0.5 * tf.reduce_mean(x, 0))
            total.assign_add(tf.reduce_sum(x))
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(x * kernel.value)
            kernel.assign_sub(tape.gradient(loss, kernel.value))

        return step

    batches = [(np.arange(12.0).reshape(6, 2) + k,) for k in range(2)]
    captured = capture(make(), *batches[0])
    result = train(captured, plan(captured.step, 2, local={"kernel": AVERAGE}), batches)
    halves = [[batch[0][:3], batch[0][3:]] for batch in batches]
    expected = [0.25 * halves[0][w].mean(0) + 0.5 * halves[1][w].mean(0) for w in range(2)]
    np.testing.assert_allclose(result.variable("mean"), np.mean(expected, 0))
    totals = [values["total"] for values in result.variables]
    np.testing.assert_allclose(totals, [sum(b[w].sum() for b in halves) for w in range(2)])


def test_changes_are_compressed():
    make = lambda: make_step(Choices("mean", "sgd", True, False, False))  # noqa: E731
    batches = make_batches(3, [8] * 4)
    plain = trained(make, batches, local=dict.fromkeys(TRAINED, AVERAGE))
    lossy = trained(make, batches, local=dict.fromkeys(TRAINED, AVERAGE), compressor=Int8())
    for name in TRAINED:
        np.testing.assert_allclose(lossy.variable(name), plain.variable(name), atol=2e-3)
    assert any(np.any(lossy.variable(name) != plain.variable(name)) for name in TRAINED)


def with_local_kernel(step) -> strategy_pb2.Strategy:
    """A strategy for a step without gradients, of a session whose variable "kernel" makes local steps."""
    strategy = plan(step, 2)
    shuffle = strategy_pb2.AllReduce(spec=strategy_pb2.AllReduce.SHUFFLE, local=AVERAGE.to_message())
    strategy.nodes.add(variable="kernel", all_reduce=shuffle)
    return strategy


def test_a_step_that_only_writes_a_variable_writes_the_copy_too():
    kernel = tf.Variable(np.ones(2), name="kernel")
    captured = capture(lambda: kernel.assign(0.5 * kernel))
    strategy = with_local_kernel(captured.step)
    for worker in range(2):
        item = rewrite(captured.step, Context(strategy, worker))
        written = {n.input[0] for n in item.graph_def.node if n.op == "AssignVariableOp"}
        handle = item.by_name["kernel"].handle
        assert written == {handle, f"autodist/local_copy/{handle}"}


def test_applying_summed_gradients_of_one_worker_in_another_step_is_refused():
    kernel, summed = tf.Variable(np.ones(2), name="kernel"), tf.Variable(np.ones(2), name="summed", trainable=False)
    captured = capture(lambda: kernel.assign_sub(0.1 * summed))
    with pytest.raises(StrategyError, match="summed, which each worker has updated"):
        rewrite(captured.step, Context(with_local_kernel(captured.step), 0))


def test_mixed_updates_are_refused():
    step = make_step(Choices("mean", "global norm", True, False, False))
    captured = capture(step, *make_batches(1, [4])[0])
    with pytest.raises(StrategyError, match="combined at different times.*local_steps"):
        rewritten(captured, plan(captured.step, 2, local={"kernel": AVERAGE}))


def test_no_batch_counts_replicas():
    weight = tf.Variable(np.ones(2), name="weight")

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * weight)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))

    captured = capture(step)
    strategy = plan(captured.step, 2, local={"weight": AVERAGE})
    assert EXAMPLES.partition(":")[0] not in {n.name for n in rewritten(captured, strategy)[0].graph_def.node}
    np.testing.assert_allclose(train(captured, strategy, [(), ()]).variable("weight"), 0.8**2)


@pytest.mark.parametrize("local", [DILOCO, AVERAGE])
def test_the_forecast_of_memory_counts_copies_and_momentum(local):
    captured = capture(make_step(Choices("mean", "adam", False, False, False)), *make_batches(1, [2])[0])
    strategy = plan(captured.step, 2, local=dict.fromkeys(TRAINED, local))
    for worker, step in enumerate(rewritten(captured, strategy)):
        stored = {node.attr["shared_name"].s: node.attr for node in step.graph_def.node if node.op == "VarHandleOp"}
        sizes = [
            tf.TensorShape(one["shape"].shape).num_elements() * tf.as_dtype(one["dtype"].type).size
            for name, one in stored.items() if not name.endswith(b"/examples")
        ]  # fmt: skip
        assert held_bytes(step, strategy, 2)[worker] == sum(sizes)
