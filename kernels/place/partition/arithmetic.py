"""Arithmetic on pieces: elementwise ops, and reductions that are completed over the pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from autodist.graph.editor import NodeDef
from autodist.graph.ops import Trait, having
from autodist.graph.placement import Partitioning
from autodist.kernels.place.partition.layouts import Alike, Along, Layout, Places, Routed, RowIds
from autodist.kernels.place.partition.work import Work
from autodist.kernels.sums import ordered_sum

FOLLOWED = having(Trait.ELEMENTWISE) | {"CheckNumerics"}
"""Ops applied to pieces: each element of the output is a function of the inputs' elements at the same position."""


def elementwise(work: Work, node: NodeDef) -> bool:
    """Rewrites an elementwise op to run on the pieces of its inputs."""
    inputs = work.data(node)
    layouts = {layout for name in inputs if (layout := work.layout(name)) is not None}
    if not layouts or any(isinstance(layout, RowIds | Places | Alike) for layout in layouts):
        return False
    out = f"{node.name}:0"
    layout = _common(work, inputs, out, layouts)
    if layout is None:
        return False
    operands = [_operand(work, name, out, layout) for name in inputs]
    if any(names is None for names in operands):
        return False
    count = max(len(names or ()) for names in operands)
    by_shard = [[names[k] if len(names) > 1 else names[0] for names in operands if names] for k in range(count)]
    copies = work.clones(node, by_shard)
    work.know(out, layout, copies)
    work.order_after(node.name, copies)
    return True


def _common(work: Work, inputs: Sequence[str], out: str, layouts: set[Layout]) -> Layout | None:
    """Returns the layout of the output if those of the inputs agree after broadcasting."""
    shape = work.spec(out).shape
    if shape.rank is None:
        return None
    if all(isinstance(layout, Routed) for layout in layouts):
        return next(iter(layouts)) if len(layouts) == 1 else None
    cuts = set()
    for name in inputs:
        layout, rank = work.layout(name), work.rank(name)
        if isinstance(layout, Along) and rank is not None:
            cuts.add(Partitioning(shape.rank - rank + layout.cut.axis, layout.cut.sizes))
        elif layout is not None:
            return None
    cut = cuts.pop()
    total = sum(cut.sizes)
    fits = shape[cut.axis] == total or (shape[cut.axis] is None and total > 1)  # a length of 1 may be broadcast
    return Along(cut) if fits and not cuts else None


def _operand(work: Work, name: str, out: str, layout: Layout) -> Sequence[str] | None:
    """Returns each output piece's operand from an input: its pieces, or the whole if broadcast; None if unknown."""
    shape, rank = work.spec(name).shape, work.rank(out)
    if isinstance(layout, Routed):
        if work.layout(name) == layout:
            return work.pieces(name) if shape.rank == rank else None
        is_broadcast = shape.rank is not None and rank is not None and (shape.rank < rank or shape[0] == 1)
        return (name,) if is_broadcast else None
    if shape.rank is None or rank is None or not isinstance(layout, Along):
        return None
    axis = layout.cut.axis - rank + shape.rank
    if axis < 0 or shape[axis] == 1:
        return (name,)
    cut = Partitioning(axis, layout.cut.sizes)
    return work.along(name, cut) if work.layout(name) == Along(cut) or shape[axis] == sum(cut.sizes) else None


Combine = Callable[[Sequence[tf.Tensor]], tf.Tensor]

COMPLETED: Mapping[str, Combine] = {
    "Sum": ordered_sum,
    "L2Loss": ordered_sum,
    "Prod": lambda parts: tf.reduce_prod(tf.stack(parts), 0),
    "Max": lambda parts: tf.reduce_max(tf.stack(parts), 0),
    "Min": lambda parts: tf.reduce_min(tf.stack(parts), 0),
    "Any": lambda parts: tf.reduce_any(tf.stack(parts), 0),
    "All": lambda parts: tf.reduce_all(tf.stack(parts), 0),
    "EuclideanNorm": lambda parts: tf.sqrt(ordered_sum([tf.square(part) for part in parts])),
}
"""Reductions whose result follows from the results on the pieces, such as a norm over a sharded variable."""

REDUCTIONS = frozenset({*COMPLETED, "Mean"})


def reduction(work: Work, node: NodeDef) -> bool:
    """Rewrites a reduction: partial results over the cut axis are combined; over other axes, pieces remain."""
    source = work.data(node)[0]
    layout, rank = work.layout(source), work.rank(source)
    if rank is None or not isinstance(layout, Along | Routed):
        return False
    axes = _axes(work, node, rank)
    if axes is None:
        return False
    cut_axis = layout.cut.axis if isinstance(layout, Along) else 0
    out = f"{node.name}:0"
    if cut_axis in axes and node.op == "Mean" and not (isinstance(layout, Along) and work.spec(out).dtype.is_floating):
        return False  # the number of rows of each piece is known only at run time; means of integers are rounded
    copies = work.clones(node, [[piece, *work.data(node)[1:]] for piece in work.pieces(source)])
    work.order_after(node.name, copies)
    if cut_axis not in axes:
        work.know(out, _reduced(layout, axes, keeps=node.attr["keep_dims"].b), copies)
        return True
    spec, combine = work.spec(out), _combination(node.op, layout)
    work.becomes(node.name, lambda f: combine([f.input(name, spec.dtype, spec.shape) for name in copies]))
    return True


def _combination(op: str, layout: Along | Routed) -> Combine:
    if op == "Mean" and isinstance(layout, Along):
        return functools.partial(_mean, layout.cut.sizes)
    return COMPLETED[op]


def _mean(sizes: Sequence[int], parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the mean over all pieces, from the mean of each."""
    return ordered_sum([part * (size / sum(sizes)) for part, size in zip(parts, sizes, strict=True)])


def _axes(work: Work, node: NodeDef, rank: int) -> set[int] | None:
    """Returns the axes that a reduction removes; None if unknown."""
    if node.op == "L2Loss":
        return set(range(rank))
    value = work.constant(work.data(node)[1])
    return None if value is None or rank == 0 else {int(axis) % rank for axis in value.reshape(-1)}


def _reduced(layout: Along | Routed, axes: set[int], *, keeps: bool) -> Layout:
    if isinstance(layout, Routed) or keeps:
        return layout
    return Along(Partitioning(layout.cut.axis - sum(axis < layout.cut.axis for axis in axes), layout.cut.sizes))
