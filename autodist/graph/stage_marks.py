"""Stage marks: nodes say themselves of which pipeline stage the script has made them."""

from __future__ import annotations

import tensorflow as tf

from autodist.graph.step import Step

STAGE_MARK = "_autodist_stage"
"""Attribute of a node; TensorFlow passes by attributes that begin so, and copies of a node have it, too."""


def marked_stage(node: tf.compat.v1.NodeDef) -> int | None:
    """The pipeline stage to which the script gives a node; None: it does not say."""
    return node.attr[STAGE_MARK].i if STAGE_MARK in node.attr else None


def has_stage_marks(item: Step) -> bool:
    """Whether the script gives a variable or an operation of the step to a pipeline stage."""
    return any(v.stage is not None for v in item.variables) or any(STAGE_MARK in n.attr for n in item.graph_def.node)
