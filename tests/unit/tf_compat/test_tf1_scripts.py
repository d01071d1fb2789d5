"""Branches and loops are TensorFlow 2's inside, and have the script's setting outside."""

from __future__ import annotations

import pytest
import tensorflow as tf

from autodist.tf_compat.tf1_scripts import newer_control_flow

v1 = tf.compat.v1


def ops():
    with tf.Graph().as_default() as graph:
        tf.cond(v1.placeholder(tf.bool, []), lambda: 1.0, lambda: 2.0)
    return {op.type for op in graph.get_operations()}


@pytest.mark.parametrize("enabled", [False, True])
def test_what_the_script_has_switched_off_is_on_inside_alone(enabled):
    before = v1.control_flow_v2_enabled()
    (v1.enable_control_flow_v2 if enabled else v1.disable_control_flow_v2)()
    try:
        with newer_control_flow():
            with newer_control_flow():
                pass
            assert "StatelessIf" in ops()
        assert ("StatelessIf" in ops()) is enabled
        with pytest.raises(KeyError), newer_control_flow():
            raise KeyError
        assert v1.control_flow_v2_enabled() is enabled
    finally:
        (v1.enable_control_flow_v2 if before else v1.disable_control_flow_v2)()
