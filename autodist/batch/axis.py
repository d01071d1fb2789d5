"""The axis along which the script says that an input of a step is split over the replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from autodist.errors import CaptureError


def is_array(value: Any) -> bool:
    """Whether an argument is given to each step anew; all else is part of it."""
    return isinstance(value, np.ndarray | np.generic | tf.Tensor)


_KERAS_PARTS = ("x", "y", "sample_weight")


def require_mapping(batch_axis: Any, keys: str) -> dict[Any, Any]:
    """What is given as `batch_axis`, copied; an empty mapping for None.

    Raises:
        CaptureError: it is no mapping.
    """
    if batch_axis is None:
        return {}
    if not isinstance(batch_axis, Mapping):
        raise CaptureError(f"batch_axis is {batch_axis!r}; it maps {keys} to axes, such as {{'x': 1}}.")
    return dict(batch_axis)


def require_axis(axis: Any, name: str) -> int | None:
    """An axis as a whole number, or None where every replica gets the whole.

    Raises:
        CaptureError: it is something else; `True` and `1.0` are, too.
    """
    if axis is None:
        return None
    try:
        if isinstance(axis, bool):
            raise TypeError
        return int(axis.__index__())
    except (AttributeError, TypeError):
        raise CaptureError(
            f"batch_axis of {name} is {axis!r}, a {type(axis).__name__}; it may be a whole number (negative ones count "
            "from the last axis), or None, where every replica is to get the whole."
        ) from None


def keras_name(_: str, path: Sequence[Any]) -> str:
    """What a leaf of a batch of `fit` is called, by its place in what `train_step` is given.

    >>> keras_name("data", (0, "image")), keras_name("data", (1,)), keras_name("data", ())
    ('x/image', 'y', 'x')
    """
    if path and isinstance(path[0], int) and path[0] < len(_KERAS_PARTS):
        return "/".join(map(str, (_KERAS_PARTS[path[0]], *path[1:])))
    return "/".join(map(str, ("x", *path)))


def name_by_path(parameter: str, path: Sequence[Any]) -> str:
    """What a leaf of an argument is called, by its place in it: `data/image`, `pair/0`."""
    return "/".join(map(str, (parameter, *path)))


def said_of(batch_axis: Mapping[str, int | None], name: str) -> str | None:
    """The key of `batch_axis` that holds for a leaf: its name or, shorter, that of what it is part of."""
    parts = name.split("/")
    names = ("/".join(parts[:k]) for k in range(len(parts), 0, -1))
    return next((key for key in names if key in batch_axis), None)


def axis_within(axis: int, rank: int, name: str) -> int:
    """The axis counted from 0.

    Args:
        axis: of the input; as in NumPy, negative ones count from the last.
        rank: of the input.
        name: of the input.

    Raises:
        CaptureError: the input has no such axis.
    """
    if -rank <= axis < rank:
        return axis % rank
    allowed = f"{name} has {rank} {'axis' if rank == 1 else 'axes'}, {-rank} to {rank - 1}" if rank else ""
    raise CaptureError(
        f"batch_axis of {name} is {axis}, and {allowed or f'{name} is a scalar, which has no axes'}; give the axis "
        "along which its examples lie, or None, where every replica is to get the whole."
    )
