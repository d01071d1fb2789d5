"""Floating point operations of a step."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Mapping, Sequence

import tensorflow as tf

from autodist.graph.gradient_rows import with_shapes
from autodist.graph.item import GraphItem
from autodist.graph.ops import Trait, having

_GIVEN = having(Trait.FED | Trait.ITERATOR_GET)


def count_flops(item: GraphItem, shapes: Mapping[str, Sequence[int]]) -> int | None:
    """What TensorFlow's profiler counts in a step: not ops without a formula, nor loops' later turns.

    Args:
        item: the captured step.
        shapes: of its inputs, by name.

    Returns:
        None where the shape of something that is fed, or that an iterator gives, is not known.
    """
    definition = with_shapes(item, sorted(item.named), shapes)
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(definition, name="")
    given = [t for op in graph.get_operations() if op.type in _GIVEN for t in op.outputs]
    if not all(tensor.shape.is_fully_defined() for tensor in given):
        return None
    builder = tf.compat.v1.profiler.ProfileOptionBuilder
    options = builder(builder.float_operation()).with_empty_output().build()
    log = logging.getLogger("tensorflow")
    before = log.level
    log.setLevel(logging.ERROR)  # the profiler calls what TensorFlow has deprecated
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it tells which ops it leaves out
            return int(tf.compat.v1.profiler.profile(graph, options=options).total_float_ops)
    finally:
        log.setLevel(before)
