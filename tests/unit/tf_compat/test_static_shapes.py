"""Lengths are numbers inside, and have the script's setting outside."""

from __future__ import annotations

import threading

import pytest
import tensorflow as tf

from autodist.tf_compat.tf1_scripts import plain_shapes


def kind():
    return type(tf.TensorShape([1])[0])


@pytest.fixture
def dimensions():
    tf.compat.v1.disable_v2_tensorshape()
    yield
    tf.compat.v1.enable_v2_tensorshape()


@pytest.mark.usefixtures("dimensions")
def test_lengths_are_numbers_inside_and_dimensions_again_when_the_last_one_has_ended():
    with plain_shapes():
        with plain_shapes():
            assert kind() is int
        assert kind() is int
    assert kind() is tf.compat.v1.Dimension
    with pytest.raises(KeyError), plain_shapes():
        raise KeyError
    assert kind() is tf.compat.v1.Dimension


@pytest.mark.usefixtures("dimensions")
def test_a_thread_that_ends_takes_nothing_from_another():
    begun, may_end = threading.Event(), threading.Event()

    def other():
        with plain_shapes():
            begun.set()
            may_end.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert begun.wait(30)
    with plain_shapes():
        may_end.set()
        thread.join()
        assert kind() is int
    assert kind() is tf.compat.v1.Dimension


def test_nothing_is_switched_off_that_the_script_has_on():
    with plain_shapes():
        assert kind() is int
    assert kind() is int
