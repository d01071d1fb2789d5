"""`ad.manual`: a part of a step that the script writes for a single place of a mesh, with collectives of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import tensorflow as tf

from autodist.capture.local_steps import line_of_script
from autodist.graph.manual_marks import INPUT_MARK, OUTPUT_MARK, mark_collective, mark_end, mark_nodes
from autodist.graph.sharding_marks import mark
from autodist.logs.formatting import listed
from autodist.sharding import OPEN, Constraint, Dim, Layout, ManualCollective, Origin, Sharding
from autodist.tf_compat.do_not_convert import ours

_regions = itertools.count()


@dataclass(frozen=True)
class _Region:
    """A manual region that is being traced."""

    name: str
    axes: tuple[str, ...]
    origin: str


_current: ContextVar[_Region | None] = ContextVar("manual region", default=None)


@ours
def manual(
    fn: Callable[..., object], inputs: Sequence[Layout], outputs: Sequence[Layout], axes: Sequence[str]
) -> Callable[..., object]:
    """Returns a function that calls `fn` in a manual region; the arguments are those of `AutoDist.manual`."""
    origin = f"ad.manual in {line_of_script()}"
    if isinstance(axes, str) or not axes:
        raise ValueError(f"{origin}: axes is {axes!r}; pass the names of the manual axes, as ('model',).")

    @ours
    def call(*tensors: object) -> object:
        if len(tensors) != len(inputs):
            raise ValueError(f"{origin}: inputs has {len(inputs)} layouts, and there are {len(tensors)} tensors.")
        if tf.executing_eagerly():
            return fn(*tensors)
        outer = _current.get()
        if outer is not None:
            raise ValueError(f"{origin} is called in a manual region ({outer.origin}); regions do not nest.")
        region = _Region(f"manual_{next(_regions)}", tuple(axes), origin)
        given = [_entering(region, x, layout) for x, layout in zip(tensors, inputs, strict=True)]
        with _tracing(region):
            made = tf.__internal__.autograph.tf_convert(fn, tf.__internal__.autograph.control_status_ctx())(*given)
            results = list(made) if isinstance(made, tuple | list) else [made]
            if len(results) != len(outputs):
                raise ValueError(f"{origin}: outputs has {len(outputs)} layouts, but {len(results)} tensors return.")
            left = [_leaving(region, y, layout) for y, layout in zip(results, outputs, strict=True)]
        return tuple(left) if isinstance(made, tuple | list) else left[0]

    return call


@ours
def all_reduce(x: tf.Tensor, axes: str | Sequence[str]) -> tf.Tensor:
    """Adds the parts of a sum that the places along some axes have."""
    x, names = _argument("all_reduce", x, axes)
    whole = replace(_undivided(x), whole=names)
    return _collective(x, "all_reduce", whole, whole)


@ours
def all_gather(x: tf.Tensor, axes: str | Sequence[str], axis: int) -> tf.Tensor:
    """Concatenates the parts of a tensor along a dimension."""
    x, names = _argument("all_gather", x, axes)
    return _collective(x, "all_gather", _divided(x, names, axis), replace(_undivided(x), whole=names))


@ours
def reduce_scatter(x: tf.Tensor, axes: str | Sequence[str], axis: int) -> tf.Tensor:
    """Adds the parts of a sum, and returns to each place its part of the result along a dimension."""
    x, names = _argument("reduce_scatter", x, axes)
    return _collective(x, "reduce_scatter", replace(_undivided(x), whole=names), _divided(x, names, axis))


@ours
def all_to_all(x: tf.Tensor, axes: str | Sequence[str], split_axis: int, concat_axis: int) -> tf.Tensor:
    """Divides a tensor along one dimension instead of another one."""
    x, names = _argument("all_to_all", x, axes)
    return _collective(x, "all_to_all", _divided(x, names, concat_axis), _divided(x, names, split_axis))


def _argument(name: str, x: tf.Tensor, axes: str | Sequence[str]) -> tuple[tf.Tensor, tuple[str, ...]]:
    """Returns the operand of a collective, and its axes.

    Raises:
        ValueError: the collective is outside of a region, an axis is not manual, or the rank is unknown.
    """
    x = tf.convert_to_tensor(x)
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    region, line = _current.get(), f"ad.{name} in {line_of_script()}"
    if tf.executing_eagerly():
        return x, names
    if region is None:
        raise ValueError(f"{line} is outside of a manual region. Call it in the function of an ad.manual.")
    unknown = [axis for axis in names if axis not in region.axes]
    if unknown:
        raise ValueError(
            f"{line} is over {listed(unknown)}, but the manual axes of the region are {listed(region.axes)} "
            f"({region.origin}). Add the axis to `axes`, or use another one."
        )
    if x.shape.rank is None:
        raise ValueError(f"{line}: the rank of the tensor {x.name} is unknown.")
    return x, names


def _undivided(x: tf.Tensor) -> Sharding:
    return Sharding.open(x.shape.rank or 0)


def _divided(x: tf.Tensor, axes: tuple[str, ...], dimension: int) -> Sharding:
    if tf.executing_eagerly():
        return _undivided(x)
    if not -x.shape.rank <= dimension < x.shape.rank:
        raise ValueError(f"{line_of_script()}: dimension {dimension} of {x.name}, which has the shape {x.shape}.")
    dims = [OPEN] * x.shape.rank
    dims[dimension] = Dim(axes, is_open=True)
    return Sharding(tuple(dims))


def _collective(x: tf.Tensor, kind: str, operand: Sharding, result: Sharding) -> tf.Tensor:
    """Returns a marked identity of a tensor, whose gradient has the sharding of the operand."""
    region = _current.get()
    if region is None or tf.executing_eagerly():
        return x
    origin = Origin(f"ad.{kind} in {line_of_script()}")
    forward = ManualCollective(kind, operand, Constraint(result, origin))
    backward = ManualCollective("", None, Constraint(operand, origin))

    def identity(value: tf.Tensor, one: ManualCollective) -> tf.Tensor:
        made = tf.raw_ops.Identity(input=value)
        mark_nodes([made.op], region.name, region.axes, region.origin)
        mark_collective(made.op, one)
        return made

    if kind == "all_reduce":  # the gradient of a sum is that of each part
        return identity(x, forward)

    @tf.custom_gradient
    def exchanged(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return identity(value, forward), lambda cotangent: identity(cotangent, backward)

    made: tf.Tensor = exchanged(x)
    return made


def _entering(region: _Region, x: object, layout: Layout) -> tf.Tensor:
    return _end(region, tf.convert_to_tensor(x), layout, INPUT_MARK)


def _leaving(region: _Region, x: object, layout: Layout) -> tf.Tensor:
    return _end(region, tf.convert_to_tensor(x), layout, OUTPUT_MARK)


def _end(region: _Region, x: tf.Tensor, layout: Layout, attribute: str) -> tf.Tensor:
    """Returns an identity of a tensor that enters or leaves a region; its gradient has the same sharding."""
    if x.shape.rank is None or isinstance(layout, str) or len(layout) > x.shape.rank:
        raise ValueError(
            f"{region.origin}: the layout {layout!r} does not fit the tensor {x.name} of the shape {x.shape}. Pass an "
            "axis or None for each dimension of a tensor whose rank is known."
        )
    sharding = Sharding(tuple([Dim.of(entry) for entry in layout] + [Dim()] * (x.shape.rank - len(layout))))

    def marked(value: tf.Tensor) -> tf.Tensor:
        made = tf.raw_ops.Identity(input=value)
        mark_nodes([made.op], region.name, region.axes, region.origin)
        mark_end(made.op, attribute, sharding)
        return made

    def constrained(cotangent: tf.Tensor) -> tf.Tensor:
        made = tf.raw_ops.Identity(input=cotangent)
        mark(made.op, sharding, region.origin)
        return made

    @tf.custom_gradient
    def identity(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return marked(value), constrained

    made: tf.Tensor = identity(x)
    return made


@contextmanager
def _tracing(region: _Region) -> Iterator[None]:
    """Makes the nodes that are created in the context a part of a region."""
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    token = _current.set(region)
    try:
        yield
    finally:
        _current.reset(token)
    own = [node for node in graph.get_operations()[before:] if node.type != "Placeholder"]
    mark_nodes(own, region.name, region.axes, region.origin)
