"""`ad.constrain` and `ad.alike`: shardings that the script requests for tensors of a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import tensorflow as tf

from autodist.capture.local_steps import line_of_script
from autodist.graph.sharding_marks import mark, mark_group
from autodist.sharding import Dim, Layout, Sharding

_groups = itertools.count()


def constrain(x: tf.Tensor, layout: Layout) -> tf.Tensor:
    """Returns a tensor whose readers see it divided by a layout, and whose gradient is divided alike.

    Raises:
        ValueError: the layout has more dimensions than the tensor, or the rank of the tensor is unknown.
    """
    x = tf.convert_to_tensor(x)
    if tf.executing_eagerly():
        return x
    if x.shape.rank is None or len(layout) > x.shape.rank:
        raise ValueError(
            f"ad.constrain: the layout {tuple(layout)} has {len(layout)} dimensions, and the tensor {x.name} has the "
            f"shape {x.shape}: name an axis or None for each dimension of a tensor whose rank is known."
        )
    dims = [Dim.of(entry) for entry in layout] + [Dim()] * (x.shape.rank - len(layout))
    sharding, line = Sharding(tuple(dims)), line_of_script()
    return _marked(x, lambda node: mark(node, sharding, f"ad.constrain in {line}"))


def alike(*tensors: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Returns tensors of one shape that are divided alike.

    Raises:
        ValueError: their shapes differ.
    """
    found = [tf.convert_to_tensor(x) for x in tensors]
    if any(x.shape.as_list() != found[0].shape.as_list() for x in found[1:]):
        raise ValueError(f"ad.alike: the tensors have different shapes: {', '.join(str(x.shape) for x in found)}.")
    if tf.executing_eagerly():
        return tuple(found)
    group, line = f"{next(_groups)}", line_of_script()
    return tuple(_marked(x, lambda node: mark_group(node, group, f"ad.alike in {line}")) for x in found)


def _marked(x: tf.Tensor, add: Callable[[tf.Operation], None]) -> tf.Tensor:
    """Returns a marked identity of a tensor, whose gradient is a marked identity too."""

    @tf.custom_gradient
    def identity(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return _identity(value, add), lambda cotangent: _identity(cotangent, add)

    made: tf.Tensor = identity(x)
    return made


def _identity(x: tf.Tensor, add: Callable[[tf.Operation], None]) -> tf.Tensor:
    made = tf.raw_ops.Identity(input=x)
    add(made.op)
    return made
