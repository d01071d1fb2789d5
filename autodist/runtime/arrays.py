"""Serialization, reduction and collection of values sent between workers."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from autodist.errors import ReductionError

_REDUCTIONS: Mapping[str, Callable[[np.ndarray], Any]] = {
    "mean": lambda parts: np.sum(parts, axis=0) / len(parts),
    "sum": lambda parts: np.sum(parts, axis=0),
    "max": lambda parts: np.max(parts, axis=0),
    "min": lambda parts: np.min(parts, axis=0),
}
_ORDERED = ("max", "min")
_COLLECTIONS = ("gather", "broadcast", "barrier")


def require_reduction(how: object) -> None:
    """Checks the name of a reduction.

    Raises:
        ReductionError: there is no such reduction.
    """
    if not isinstance(how, str) or how not in _REDUCTIONS:
        raise ReductionError(f"{how!r} is not a reduction; use {', '.join(map(repr, _REDUCTIONS))}.")


def pack_part(value: Any, how: str) -> bytes:
    """Serializes one worker's value, or the reason why it cannot be reduced, for the chief."""
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        array = np.array(None)
    header: dict[str, Any] = {"how": how, "dtype": array.dtype.name, "shape": array.shape}
    fault = _fault_of(array, how)
    if fault is not None:
        return json.dumps({**header, "fault": fault}).encode() + b"\n"
    return json.dumps(header).encode() + b"\n" + array.tobytes()


def pack_value(value: Any, how: str) -> bytes:
    """Serializes one worker's Python value, or the reason why it cannot be sent, for the chief.

    Args:
        value: the value.
        how: name of the call: "gather", "broadcast" or "barrier"; all workers have to make the same.
    """
    header = {"how": how, "dtype": None, "shape": None}
    try:
        return json.dumps(header).encode() + b"\n" + pickle.dumps(value)
    except Exception as error:  # noqa: BLE001  # whatever the value's own code raises
        fault = f"{type(value).__name__} cannot be pickled ({type(error).__name__}: {error})"
        return json.dumps({**header, "fault": fault}).encode() + b"\n"


def _fault_of(array: np.ndarray, how: str) -> str | None:
    try:
        dtype = tf.as_dtype(array.dtype)
    except TypeError:
        dtype = tf.variant
    if not (dtype.is_floating or dtype.is_integer or dtype.is_complex or dtype.is_bool):
        return f"it is of type {array.dtype}, and only arrays of numbers or booleans can be reduced"
    if dtype.is_complex and how in _ORDERED:
        return f"it is {array.dtype}, and complex numbers have no {how}"
    return None


def combine_parts(parts: Sequence[bytes]) -> bytes:
    """Reduces or collects the workers' values, in their order; returns the serialized result or error for all."""
    headers = [json.loads(part.partition(b"\n")[0]) for part in parts]
    for worker, one in enumerate(headers):
        if "fault" in one:
            fate = "sent" if one["how"] in _COLLECTIONS else "reduced"
            return _refusal(f"the value of worker {worker} cannot be {fate}: {one['fault']}.")
    for key, name in (("how", "make different calls"), ("shape", "have values of different shapes")):
        if len({str(one[key]) for one in headers}) > 1:
            return _refusal(
                f"the workers {name}: {_listed(headers, key)}. Make the same call on all, in the same order."
            )
    if len({one["dtype"] for one in headers}) > 1:
        return _refusal(f"the workers have values of different types: {_listed(headers, 'dtype')}. Cast them to one.")
    if headers[0]["how"] in _COLLECTIONS:
        return json.dumps(headers[0]).encode() + b"\n" + pickle.dumps([part.partition(b"\n")[2] for part in parts])
    arrays = [unpack(part) for part in parts]
    result = np.asarray(_REDUCTIONS[headers[0]["how"]](np.stack(arrays)))
    header = {"dtype": result.dtype.name, "shape": result.shape}
    return json.dumps(header).encode() + b"\n" + result.tobytes()


def _listed(headers: Sequence[Mapping[str, Any]], key: str) -> str:
    return ", ".join(f"{one[key]} on worker {worker}" for worker, one in enumerate(headers))


def _refusal(text: str) -> bytes:
    return json.dumps({"refusal": text}).encode() + b"\n"


def unpack(content: bytes) -> np.ndarray:
    """Deserializes the array in a message.

    Raises:
        ReductionError: the message holds an error instead.
    """
    header, body = _opened(content)
    dtype = tf.as_dtype(header["dtype"]).as_numpy_dtype
    return np.frombuffer(body, dtype).reshape(header["shape"]).copy()


def unpack_values(content: bytes) -> list[Any]:
    """Deserializes the values of all workers, in their order.

    Raises:
        ReductionError: the message holds an error instead; or a value cannot be unpickled on this worker.
    """
    return [_unpickled(value, worker) for worker, value in enumerate(pickle.loads(_opened(content)[1]))]


def _unpickled(value: bytes, worker: int) -> Any:
    try:
        return pickle.loads(value)
    except Exception as error:  # whatever the value's own code raises
        raise ReductionError(
            f"the value of worker {worker} cannot be unpickled on this worker ({type(error).__name__}: {error}). "
            "Define the classes of values that workers exchange in a module that every worker imports."
        ) from error


def _opened(content: bytes) -> tuple[dict[str, Any], bytes]:
    head, _, body = content.partition(b"\n")
    header = json.loads(head)
    if "refusal" in header:
        raise ReductionError(header["refusal"])
    return header, body
