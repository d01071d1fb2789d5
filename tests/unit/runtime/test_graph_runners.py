"""Each step has a session of its own on a server, and all have the same variables."""

from __future__ import annotations

import threading

import pytest
import tensorflow as tf

from autodist.runtime.graph_runner import GraphRunner, GraphRunners


def _handle() -> tf.Tensor:
    return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="v")


def _reading_step() -> tf.compat.v1.GraphDef:
    with tf.Graph().as_default() as graph:
        tf.raw_ops.ReadVariableOp(resource=_handle(), dtype=tf.float32, name="value")
        tf.raw_ops.AssignVariableOp(resource=_handle(), value=7.0, name="start")
    return graph.as_graph_def()


def _read(graph_runner: GraphRunner, prefix: str) -> float:
    return float(graph_runner.session.run(f"{prefix}value:0"))


def _write_beside(graph_runners: GraphRunners) -> None:
    with graph_runners.control.graph.as_default():
        write = tf.raw_ops.AssignVariableOp(resource=_handle(), value=3.0)
    graph_runners.control.session.run(write)


def test_a_servers_steps_each_have_a_session_and_share_variables() -> None:
    graph_runners = GraphRunners(tf.distribute.Server.create_local_server().target, tf.compat.v1.ConfigProto())
    (one, first), (other, second) = graph_runners.add(_reading_step()), graph_runners.add(_reading_step())
    assert len({one.graph, other.graph, graph_runners.control.graph}) == 3
    assert (first, second) == ("step_1/", "step_2/")
    assert not [op.name for op in other.graph.get_operations() if op.name.startswith(first)]
    _write_beside(graph_runners)
    assert _read(one, first) == _read(other, second) == 3.0
    graph_runners.close(60)
    graph_runners.close(60)


def test_without_a_server_one_session_has_all() -> None:
    graph_runners = GraphRunners("", tf.compat.v1.ConfigProto())
    (one, first), (other, second) = graph_runners.add(_reading_step()), graph_runners.add(_reading_step())
    assert one is other is graph_runners.control
    _write_beside(graph_runners)
    assert _read(one, first) == _read(other, second) == 3.0
    graph_runners.close(60)


def test_state_initialized_by_one_step_stays_for_the_next() -> None:
    graph_runners = GraphRunners(tf.distribute.Server.create_local_server().target, tf.compat.v1.ConfigProto())
    (one, first), (other, second) = graph_runners.add(_reading_step()), graph_runners.add(_reading_step())
    graph_runners.initialize(one, {"v": f"{first}start"})
    assert _read(other, second) == 7.0
    _write_beside(graph_runners)
    graph_runners.initialize(other, {"v": f"{second}start"})
    assert _read(one, first) == 3.0
    graph_runners.close(60)


def test_control_graphs_run_unoptimized_and_steps_do_not() -> None:
    graph_runners = GraphRunners(tf.distribute.Server.create_local_server().target, tf.compat.v1.ConfigProto())
    step, _ = graph_runners.add(_reading_step())
    assert graph_runners.control.session._config.graph_options.rewrite_options.disable_meta_optimizer
    assert not step.session._config.graph_options.rewrite_options.disable_meta_optimizer
    graph_runners.close(60)


def test_a_session_that_cannot_be_closed_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    graph_runners, responds = GraphRunners("", tf.compat.v1.ConfigProto()), threading.Event()
    monkeypatch.setattr(graph_runners.control, "close", responds.wait)
    graph_runners.close(0.01)
    responds.set()


def test_alone_all_is_optimized() -> None:
    graph_runners = GraphRunners("", tf.compat.v1.ConfigProto())
    assert not graph_runners.control.session._config.graph_options.rewrite_options.disable_meta_optimizer
    graph_runners.close(60)
