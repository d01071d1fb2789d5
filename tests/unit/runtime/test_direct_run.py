"""DirectRun: feeds and fetches, in the formats of `Session.run`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import ClusterError
from autodist.runtime.graph_runner import DirectRun


@pytest.fixture
def session() -> Iterator[tf.compat.v1.Session]:
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        yield session


def _given(dtype: tf.DType, shape: Sequence[int | None] | None = None) -> tf.Tensor:
    return tf.raw_ops.Placeholder(dtype=dtype, shape=shape)


def _run(session: tf.compat.v1.Session, outputs: list[tf.Tensor], feeds: list[tf.Tensor], *values: Any) -> Any:
    return DirectRun(session, outputs, [], feeds, tf.compat.v1.RunOptions())(*values)


@pytest.mark.parametrize(
    "dtype, value",
    [
        (tf.float32, np.arange(6, dtype=np.float32).reshape(2, 3).T),  # not contiguous
        (tf.float64, np.zeros([0, 3])),
        (tf.bfloat16, np.ones([2], tf.bfloat16.as_numpy_dtype)),
        (tf.bool, np.array([True, False])),
        (tf.int64, np.int64(3)),
        (tf.string, np.array(["a", "bc"], object)),
        (tf.string, np.array([b"a", b"bc"])),
        (tf.complex64, np.array([1 + 2j], np.complex64)),
    ],
)
def test_a_value_arrives_as_session_run_gives_it(session: Any, dtype: tf.DType, value: Any) -> None:
    given = _given(dtype)
    out = tf.identity(given)
    [found] = _run(session, [out], [given], value)
    expected = session.run(out, {given: value})
    np.testing.assert_array_equal(found, expected)
    assert np.asarray(found).dtype == np.asarray(expected).dtype


def test_a_value_is_converted_to_the_dtype_that_is_fed(session: Any) -> None:
    given = _given(tf.float32, [])
    assert _run(session, [given + 1.0], [given], 2) == [3.0]


def test_a_tensor_that_is_asked_for_twice_comes_twice_and_in_order(session: Any) -> None:
    given = _given(tf.int32, [])
    a, b = given + 1, given * 10
    assert _run(session, [b, a, b], [given], 2) == [20, 3, 20]


def test_operations_run_without_being_returned(session: Any) -> None:
    v = tf.compat.v1.get_variable("v", [], tf.int32, tf.compat.v1.zeros_initializer(), use_resource=True)
    session.run(v.initializer)
    count = DirectRun(session, [], [v.assign_add(1, read_value=False)], [], tf.compat.v1.RunOptions())
    assert (count(), count()) == ([], [])
    assert session.run(v) == 2


def test_a_run_of_nothing_gives_nothing(session: Any) -> None:
    given = _given(tf.float32, [])
    assert _run(session, [], [given], 1.0) == []


def test_a_value_of_another_shape_is_refused_also_after_one_that_fits(session: Any) -> None:
    given = _given(tf.float32, [None, 2])
    run = DirectRun(session, [tf.reduce_sum(given)], [], [given], tf.compat.v1.RunOptions())
    assert run(np.ones([3, 2])) == [6.0]
    assert run(np.ones([4, 2])) == [8.0]
    with pytest.raises(ValueError, match=r"cannot take a value of \(4, 3\)"):
        run(np.ones([4, 3]))


def test_errors_of_operations_have_the_types_of_tensorflow(session: Any) -> None:
    given = _given(tf.float32, [])
    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        _run(session, [tf.debugging.check_numerics(given, "not finite")], [given], np.nan)


def test_a_run_after_the_end_says_so(session: Any) -> None:
    given = _given(tf.float32, [])
    run = DirectRun(session, [given + 1.0], [], [given], tf.compat.v1.RunOptions())
    session.close()
    with pytest.raises(ClusterError, match="The run has ended"):
        run(2.0)
