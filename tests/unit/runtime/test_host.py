"""What is small runs beside the steps, on the same variables."""

from __future__ import annotations

import tensorflow as tf

from autodist.runtime.host import Host


def _write_beside_and_read_in_a_step(host: Host) -> float:
    def handle() -> tf.Tensor:
        return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="v")

    with host.beside().graph.as_default():
        write = tf.raw_ops.AssignVariableOp(resource=handle(), value=tf.constant(3.0))
    with host.graph.as_default():
        read = tf.raw_ops.ReadVariableOp(resource=handle(), dtype=tf.float32)
    host.beside().session.run(write)
    return float(host.session.run(read))


def test_a_server_has_two_sessions_that_share_variables() -> None:
    server = tf.distribute.Server.create_local_server()
    host = Host(server.target, tf.compat.v1.ConfigProto())
    assert host.beside().graph is not host.graph
    assert _write_beside_and_read_in_a_step(host) == 3.0
    assert not [op.name for op in host.graph.get_operations() if op.type == "AssignVariableOp"]
    host.close()
    host.close()


def test_without_a_server_one_session_has_all() -> None:
    host = Host("", tf.compat.v1.ConfigProto())
    assert host.beside() is host
    assert _write_beside_and_read_in_a_step(host) == 3.0
    host.close()


def test_what_is_small_is_run_as_it_stands_and_steps_are_not() -> None:
    config = tf.compat.v1.ConfigProto()
    host = Host(tf.distribute.Server.create_local_server().target, config)
    assert host.beside().session._config.graph_options.rewrite_options.disable_meta_optimizer
    assert not host.session._config.graph_options.rewrite_options.disable_meta_optimizer
    host.close()
