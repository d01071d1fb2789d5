"""Reductions and collections of the workers' values: the same result, or the same error, for all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import ReductionError
from autodist.runtime.arrays import combine_parts, pack_part, pack_value, require_reduction, unpack, unpack_values


def reduced(how: str, *values: Any) -> np.ndarray:
    return unpack(combine_parts([pack_part(value, how) for value in values]))


@pytest.mark.parametrize(
    ("how", "values", "expected"),
    [
        ("mean", (1, 2), np.float64(1.5)), ("sum", (1, 2), np.int64(3)), ("max", (3, 2), np.int64(3)),
        ("min", (3.5, 2.0, 7.0), np.float64(2.0)), ("mean", (True, False), np.float64(0.5)),
        ("sum", (True, True), np.int64(2)), ("max", (False, True), np.bool_(True)),
        ("min", (np.array([True, False]), np.array([True, True])), np.array([True, False])),
        ("max", (np.array([[1, 5]]), np.array([[4, 2]])), np.array([[4, 5]])),
        ("sum", (np.zeros((0, 2)),) * 2, np.zeros((0, 2))),
        ("mean", (tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])), np.array([2.0, 3.0], np.float32)),
        ("sum", (1 + 2j, 1j), np.complex128(1 + 3j)), ("max", (np.float32("nan"), np.float32(1)), np.float32("nan")),
    ],
)  # fmt: skip
def test_values_become_one(how: str, values: tuple[Any, ...], expected: Any) -> None:
    found = reduced(how, *values)
    np.testing.assert_array_equal(found, expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)


@pytest.mark.parametrize("how", ["mean", "sum", "max", "min"])
def test_bfloat16_stays_what_it_is(how: str) -> None:
    values = [tf.constant([1.5, 2.0], tf.bfloat16), tf.constant([1.5, 2.0], tf.bfloat16)]
    found = reduced(how, *values)
    assert found.dtype == tf.bfloat16.as_numpy_dtype
    np.testing.assert_array_equal(found.astype(float), [3.0, 4.0] if how == "sum" else [1.5, 2.0])


@pytest.mark.parametrize("how", ["avg", "MEAN", None, tf.distribute.ReduceOp.SUM])
def test_other_reductions_are_refused_with_those_that_there_are(how: Any) -> None:
    with pytest.raises(ReductionError, match="'mean', 'sum', 'max', 'min'"):
        require_reduction(how)


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([("mean", np.zeros(2)), ("mean", np.zeros(3))], r"different shapes: \[2\] on worker 0, \[3\] on worker 1"),
        ([("mean", np.zeros(2)), ("mean", np.zeros(2, "f"))], "different types: float64 on worker 0, float32"),
        ([("mean", np.zeros(2)), ("max", np.zeros(2))], "different calls: mean on worker 0, max on worker 1"),
        ([("sum", 1.0), ("sum", "text")], "worker 1 cannot be reduced: it is of type <U4"),
        ([("sum", None), ("sum", 1.0)], "worker 0 cannot be reduced: it is of type object"),
        ([("sum", [[1], [2, 3]]), ("sum", 1.0)], "worker 0 cannot be reduced"),
        ([("max", 1j), ("max", 2j)], "complex numbers have no max"),
    ],
)
def test_arrays_that_do_not_fit_are_reported_to_all_workers(parts: list[tuple[str, Any]], told: str) -> None:
    answer = combine_parts([pack_part(value, how) for how, value in parts])
    for _ in parts:
        with pytest.raises(ReductionError, match=told):
            unpack(answer)


@pytest.mark.parametrize("how", ["gather", "broadcast", "barrier"])
def test_all_workers_get_the_python_values_of_all(how: str) -> None:
    values = [{"name": "a\nb", "rows": np.arange(2)}, (None, tf.constant([1.0])), "text"]
    found = unpack_values(combine_parts([pack_value(value, how) for value in values]))
    assert (found[0]["name"], found[1][0], found[2]) == ("a\nb", None, "text")
    np.testing.assert_array_equal(found[0]["rows"], [0, 1])
    np.testing.assert_array_equal(found[1][1], [1.0])


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        (
            [pack_value(1, "gather"), pack_value(lambda: 1, "gather")],
            "value of worker 1 cannot be sent: function cannot be pickled",
        ),
        ([pack_value(None, "barrier"), pack_value([1], "gather")], "barrier on worker 0, gather on worker 1. Make the"),
        ([pack_value(1, "gather"), pack_value(None, "broadcast")], "gather on worker 0, broadcast on worker 1. Make"),
        ([pack_value(1, "gather"), pack_part(1, "mean")], "gather on worker 0, mean on worker 1. Make the same"),
    ],
)
def test_values_that_do_not_fit_are_reported_to_all_workers(parts: list[bytes], told: str) -> None:
    answer = combine_parts(parts)
    for unpacked in (unpack, unpack_values):
        with pytest.raises(ReductionError, match=told):
            unpacked(answer)


class OfTheChief:
    """A class that is defined on the chief only, as in a script's `if ad.is_chief:`."""


def test_a_value_of_a_class_that_this_worker_lacks_is_reported_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker raised an AttributeError, or whatever the import raised."""
    answer = combine_parts([pack_value(value, "gather") for value in (1, OfTheChief())])
    assert isinstance(unpack_values(answer)[1], OfTheChief)
    monkeypatch.delattr(f"{__name__}.OfTheChief")
    with pytest.raises(ReductionError, match="worker 1 cannot be unpickled .*OfTheChief.*a module that every worker"):
        unpack_values(answer)
