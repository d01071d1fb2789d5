"""Batch axis: the axis along which an input of a step is split over the replicas, as the script declares it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from autodist.errors import CaptureError


def is_array(value: Any) -> bool:
    """Returns True if an argument is fed to each step; other arguments are part of the step."""
    return isinstance(value, np.ndarray | np.generic | tf.Tensor)


_KERAS_PARTS = ("x", "y", "sample_weight")


def require_mapping(batch_axis: Any, keys: str) -> dict[Any, Any]:
    """Returns a copy of the argument `batch_axis`; an empty mapping for None.

    Raises:
        CaptureError: the argument is not a mapping.
    """
    if batch_axis is None:
        return {}
    if not isinstance(batch_axis, Mapping):
        raise CaptureError(f"batch_axis is {batch_axis!r}; it maps {keys} to axes, such as {{'x': 1}}.")
    return dict(batch_axis)


def require_axis(axis: Any, name: str) -> int | None:
    """Returns an axis as an integer, or None if every replica gets the complete input.

    Raises:
        CaptureError: the axis is something else, including `True` and `1.0`.
    """
    if axis is None:
        return None
    try:
        if isinstance(axis, bool):
            raise TypeError
        return int(axis.__index__())
    except (AttributeError, TypeError):
        raise CaptureError(
            f"batch_axis of {name} is {axis!r}, a {type(axis).__name__}; it must be an integer (negative ones count "
            "from the last axis), or None if every replica is to get all of it."
        ) from None


def keras_name(_: str, path: Sequence[Any]) -> str:
    """Returns the name of a leaf in a batch of `fit`, from its path in the argument of `train_step`.

    >>> keras_name("data", (0, "image")), keras_name("data", (1,)), keras_name("data", ())
    ('x/image', 'y', 'x')
    """
    if path and isinstance(path[0], int) and path[0] < len(_KERAS_PARTS):
        return "/".join(map(str, (_KERAS_PARTS[path[0]], *path[1:])))
    return "/".join(map(str, ("x", *path)))


def name_by_path(parameter: str, path: Sequence[Any]) -> str:
    """Returns the name of a leaf of an argument, from its path: `data/image`, `pair/0`."""
    return "/".join(map(str, (parameter, *path)))


def matching_key(batch_axis: Mapping[str, int | None], name: str) -> str | None:
    """Returns the key of `batch_axis` that applies to a leaf: the name of the leaf, or its longest prefix."""
    parts = name.split("/")
    names = ("/".join(parts[:k]) for k in range(len(parts), 0, -1))
    return next((key for key in names if key in batch_axis), None)


def axis_within(axis: int, rank: int, name: str) -> int:
    """Returns the axis counted from 0.

    Args:
        axis: axis of the input; as in NumPy, negative axes count from the last.
        rank: rank of the input.
        name: name of the input.

    Raises:
        CaptureError: the input has no such axis.
    """
    if -rank <= axis < rank:
        return axis % rank
    allowed = f"{name} has {rank} {'axis' if rank == 1 else 'axes'}, {-rank} to {rank - 1}" if rank else ""
    raise CaptureError(
        f"batch_axis of {name} is {axis}, but {allowed or f'{name} is a scalar, which has no axes'}; set it to the "
        "axis of its examples, or to None if every replica is to get all of it."
    )
