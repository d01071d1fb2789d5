"""The gradients that a graph trains by: of its own variables, of another network's, gathered or fed."""

from __future__ import annotations

import pytest
import tensorflow as tf
import tf_keras

from autodist.capture.gradients import recording_gradients
from autodist.capture.graph_mode import CapturedGraph
from autodist.capture.training_requirements import require_training, warn_unordered_updates
from autodist.errors import CaptureError
from autodist.graph.applied import find_fed_updates

v1 = tf.compat.v1


def build(reduce=tf.reduce_mean, also_trains=False, gathers=True, sparse=False, differentiates=False):
    """The graph, with a run that gathers ("gather") and one that applies ("apply")."""
    with tf.Graph().as_default() as graph, recording_gradients(in_functions=False) as notes:
        x = v1.placeholder(tf.float64, [None, 2], "x")
        weight = v1.get_variable("weight", [2, 1], tf.float64)
        rows = tf.gather(weight, tf.cast(x[:, 0], tf.int32)) if sparse else x @ weight
        loss = reduce(tf.square(rows))
        optimizer = v1.train.GradientDescentOptimizer(0.1)
        if gathers:
            kept = v1.get_variable("kept", [2, 1], tf.float64, trainable=False)
            [gradient] = tf.gradients(loss, weight)
            kept.assign_add(tf.convert_to_tensor(gradient), name="gather")
            optimizer.apply_gradients([(kept, weight)], name="apply")
            kept.assign(tf.zeros_like(kept), name="empty")
        if differentiates:
            tf.gradients(loss, weight)
        if also_trains:
            optimizer.minimize(loss, name="train")
    return CapturedGraph.of(graph, notes.calls)


def test_a_graph_without_any_gradient_is_refused():
    captured = build(gathers=False)
    with pytest.raises(CaptureError, match="the graph makes no gradient, so there is nothing to synchronise"):
        require_training(captured, captured.whole())


def test_a_graph_whose_gradients_nothing_is_written_of_is_refused_with_the_mend():
    captured = build(gathers=False, differentiates=True)
    with pytest.raises(CaptureError, match=r"makes gradients \(weight\) and writes no variable.*apply_gradients"):
        require_training(captured, captured.whole())


def test_training_in_a_loop_is_refused_with_the_variable_and_the_fix():
    with tf.Graph().as_default() as graph, recording_gradients(in_functions=False) as notes:
        x = v1.placeholder(tf.float64, [None, 2])
        weight = v1.get_variable("weight", [2, 1], tf.float64)

        def body(k):
            with tf.control_dependencies([weight.assign_sub(tf.gradients(tf.reduce_mean(x @ weight), weight)[0])]):
                return k + 1

        tf.while_loop(lambda k: k < 3, body, [tf.constant(0)])
    captured = CapturedGraph.of(graph, notes.calls)
    with pytest.raises(CaptureError, match=r"trains weight inside a tf.while_loop or tf.cond.*once for each batch"):
        require_training(captured, captured.whole())


def test_an_optimizer_that_synchronises_by_itself_is_refused_by_name():
    with tf.Graph().as_default() as graph, recording_gradients(in_functions=False) as notes:
        weight = v1.get_variable("weight", [2, 1], tf.float64)
        loss = tf.reduce_mean(v1.placeholder(tf.float64, [None, 2]) @ weight)
        inner = v1.train.GradientDescentOptimizer(0.1)
        v1.train.SyncReplicasOptimizer(inner, 2).minimize(loss, v1.train.get_or_create_global_step())
    captured = CapturedGraph.of(graph, notes.calls)
    with pytest.raises(CaptureError, match="accumulators.*SyncReplicasOptimizer.*Use the optimizer that it wraps"):
        require_training(captured, captured.whole())


@pytest.mark.parametrize("options", [{"gathers": False, "also_trains": True}, {"also_trains": True}, {"sparse": True}])
def test_a_graph_that_writes_variables_of_gradients_passes(options, caplog):
    captured = build(**options)
    require_training(captured, captured.whole())
    warn_unordered_updates(captured.whole())
    assert not caplog.records


def test_gradients_that_one_run_gathers_are_those_of_their_variable_in_each_run():
    captured = build(also_trains=True)
    runs = {name: captured.step([], [name], {"x:0": 0} if name != "apply" else {}) for name in ("gather", "train")}
    assert {name: [g.variable for g in item.gradients] for name, item in runs.items()} == {
        "gather": ["weight"],
        "train": ["weight"],
    }
    assert not captured.step([], ["apply"], {}).gradients


def two_networks(update):
    """The whole of a graph in which the gradients by one network's weights are applied to another's."""
    with tf.Graph().as_default() as graph, recording_gradients(in_functions=False) as notes:
        x = v1.placeholder(tf.float64, [None, 3], "x")
        shapes = {"first": [3, 3], "second": [3, 3], "table": [5, 3]}
        local, shared = (
            [v1.get_variable(f"{owner}/{name}", shape, tf.float64, use_resource=True) for name, shape in shapes.items()]
            for owner in ("local", "shared")
        )
        hidden = tf.tanh(x @ local[0]) @ local[1] * tf.gather(local[2], tf.cast(x[:, 0], tf.int32))
        found = tf.gradients(tf.reduce_mean(tf.square(hidden)), local)
        update(found, local, shared)
    return CapturedGraph.of(graph, notes.calls).whole()


def clipped_adam(found, local, shared):
    clipped, _ = tf.clip_by_global_norm(found, 1.0)
    v1.train.AdamOptimizer(0.1).apply_gradients(zip(clipped, shared, strict=True))


def momentum_by_hand(found, local, shared):
    for gradient, variable in zip(found, shared, strict=True):
        slot = tf.Variable(tf.zeros(variable.shape, tf.float64), name=f"{variable.op.name}/momentum")
        moved = slot.assign(0.9 * slot + tf.convert_to_tensor(gradient))
        variable.assign_sub(0.1 * moved)


@pytest.mark.parametrize("update", [clipped_adam, momentum_by_hand])
def test_gradients_are_those_of_the_network_that_they_are_applied_to(update):
    assert [g.variable for g in two_networks(update).gradients] == ["shared/first", "shared/second", "shared/table"]


def test_gradients_that_also_update_their_own_network_stay_its_own():
    def update(found, local, shared):
        clipped_adam(found, local, shared)
        v1.train.GradientDescentOptimizer(0.1).apply_gradients(zip(found, local, strict=True))

    assert [g.variable for g in two_networks(update).gradients] == ["local/first", "local/second", "local/table"]


def test_an_update_without_order_is_told(caplog):
    with tf.Graph().as_default() as graph, recording_gradients(in_functions=False) as notes:
        x = v1.placeholder(tf.float64, [None, 2], "x")
        weight = v1.get_variable("weight", [2, 1], tf.float64, use_resource=True)
        optimizer = tf_keras.optimizers.Adam(0.1)
        optimizer.build([weight])
        optimizer.apply_gradients(zip(tf.gradients(tf.reduce_mean(x @ weight), [weight]), [weight], strict=True))
    captured = CapturedGraph.of(graph, notes.calls)
    require_training(captured, captured.whole())
    warn_unordered_updates(captured.whole())
    assert "the update of weight reads m/weight, which the gradient updates" in caplog.text
    assert "Call apply_gradients in one" in caplog.text


def assigned(weight, fed):
    return weight.assign(fed)


def applied(weight, fed):
    return v1.train.AdamOptimizer(0.1).apply_gradients([(fed, weight)])


def subtracted(weight, fed):
    return weight.assign(weight - 0.1 * fed)


@pytest.mark.parametrize("write, updates", [(assigned, set()), (applied, {"fed:0"}), (subtracted, {"fed:0"})])
@pytest.mark.parametrize("shape", [[2, 1], [None, 1], None])
def test_fed_gradients_are_distinguished_from_values_and_batches(write, updates, shape):
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float64, [None, 2], "x")
        weight = v1.get_variable("weight", [2, 1], tf.float64, use_resource=True)
        write(weight, v1.placeholder(tf.float64, shape, "fed"))
        weight.assign_add(0.1 * tf.reduce_mean(x, 0)[:, tf.newaxis])
    assert find_fed_updates(CapturedGraph.of(graph, ()).whole()).keys() == updates
