"""Arithmetic on pieces: runs an op on the pieces of its inputs if its factor rule divides these along one factor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.names import data_inputs
from autodist.graph.ops import FactorRule, ReducedBy, Trait, factor_rule, having
from autodist.kernels.place.partition.layouts import Alike, Along, Routed
from autodist.kernels.place.partition.work import Work
from autodist.kernels.sums import ordered_sum
from autodist.placement.partitioning import Partitioning

DIVIDED = having(Trait.ELEMENTWISE | Trait.REDUCES) | {"CheckNumerics"}
"""Ops that run on pieces. Partial results of reductions are combined, such as those of a norm over a variable."""


def on_pieces(work: Work, node: NodeDef) -> bool:
    """Rewrites an op to run on the pieces of its inputs.

    Pieces that an op reduces, such as those of a sum over the cut axis, yield partial results, which are combined.
    """
    inputs, rule = data_inputs(node), factor_rule(work.view(node))
    layouts = [work.layout(name) for name in inputs]
    divided = {k: layout for k, layout in enumerate(layouts) if isinstance(layout, Along | Routed)}
    known = all(layout is None or isinstance(layout, Along | Routed | Alike) for layout in layouts)
    if rule is None or not divided or not known or len(set(map(_pieces_of, divided.values()))) > 1:
        return False
    factors = {rule.factor(k, _axis(layout)) for k, layout in divided.items()}
    layout, factor = next(iter(divided.values())), factors.pop()
    if factors or factor is None:
        return False
    result, out = rule.result_axis(factor), f"{node.name}:0"
    if result is None and not _can_combine(work, out, rule, layout):
        return False
    if result is not None and not _fits(work.spec(out).shape, result, layout):
        return False
    operands = [_operand(work, name, rule.axis(k, factor), layout) for k, name in enumerate(inputs)]
    if any(names is None for names in operands):
        return False
    count = max(len(names or ()) for names in operands)
    by_shard = [[names[k] if len(names) > 1 else names[0] for names in operands if names] for k in range(count)]
    copies = work.clones(node, by_shard)
    work.order_after(node.name, copies)
    if result is not None:
        work.register(out, _at(layout, result), copies)
        return True
    spec, combine = work.spec(out), _combination(rule, layout)
    work.becomes(node.name, lambda f: combine([f.input(name, spec.dtype, spec.shape) for name in copies]))
    return True


def _axis(layout: Along | Routed) -> int:
    """Returns the axis along which a tensor is divided into pieces."""
    return layout.cut.axis if isinstance(layout, Along) else 0


def _at(layout: Along | Routed, axis: int) -> Along | Routed:
    return Along(Partitioning(axis, layout.cut.sizes)) if isinstance(layout, Along) else layout


def _pieces_of(layout: Along | Routed) -> object:
    """Returns a key that is equal for tensors with the same pieces, whatever the axis."""
    return layout.cut.sizes if isinstance(layout, Along) else layout.key


def _fits(shape: tf.TensorShape, axis: int, layout: Along | Routed) -> bool:
    """Returns True if a result can be in pieces along an axis; a length of 1 may be broadcast."""
    if isinstance(layout, Routed):
        return axis == 0
    total, length = sum(layout.cut.sizes), None if shape.rank is None else shape[axis]
    return shape.rank is not None and (length == total or (length is None and total > 1))


def _operand(work: Work, name: str, axis: int | None, layout: Along | Routed) -> Sequence[str] | None:
    """Returns each output piece's operand from an input: its pieces, or the whole if broadcast; None if unknown.

    Args:
        work: the partitioning in progress.
        name: the input.
        axis: its axis that is divided, if any.
        layout: the layout of the op's inputs in pieces, up to the axis.
    """
    own, shape = work.layout(name), work.spec(name).shape
    if isinstance(own, Alike):
        return work.pieces(name)
    if axis is None or (own is None and shape.rank is not None and shape[axis] == 1):
        return (name,)
    if own == _at(layout, axis):
        return work.pieces(name)
    if isinstance(layout, Routed) or shape.rank is None or shape[axis] != sum(layout.cut.sizes):
        return None
    return work.along(name, Partitioning(axis, layout.cut.sizes))


# -- reductions --------------------------------------------------------------------------------------------------------

Combine = Callable[[Sequence[tf.Tensor]], tf.Tensor]


def _extreme(of_numbers: Callable[..., tf.Tensor], of_booleans: Callable[..., tf.Tensor]) -> Combine:
    return lambda parts: (of_booleans if parts[0].dtype == tf.bool else of_numbers)(tf.stack(parts), 0)


COMPLETED: Mapping[ReducedBy, Combine] = {
    ReducedBy.SUM: ordered_sum,
    ReducedBy.PRODUCT: lambda parts: tf.reduce_prod(tf.stack(parts), 0),
    ReducedBy.MAX: _extreme(tf.reduce_max, tf.reduce_any),
    ReducedBy.MIN: _extreme(tf.reduce_min, tf.reduce_all),
    ReducedBy.NORM: lambda parts: tf.sqrt(ordered_sum([tf.square(part) for part in parts])),
}
"""The result of a reduction, from its results on the pieces."""


def _can_combine(work: Work, out: str, rule: FactorRule, layout: Along | Routed) -> bool:
    """Returns True if partial results determine the result of a reduction.

    The number of rows of each routed piece is known only at run time, and means of integers are rounded.
    """
    if rule.reduced is ReducedBy.MEAN:
        return isinstance(layout, Along) and work.spec(out).dtype.is_floating
    return rule.reduced is not None


def _combination(rule: FactorRule, layout: Along | Routed) -> Combine:
    if rule.reduced is ReducedBy.MEAN and isinstance(layout, Along):
        sizes = layout.cut.sizes
        return lambda parts: ordered_sum([p * (size / sum(sizes)) for p, size in zip(parts, sizes, strict=True)])
    assert rule.reduced is not None
    return COMPLETED[rule.reduced]
