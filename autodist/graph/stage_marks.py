"""Stage marks: an attribute that records the pipeline stage in which the script created a node."""

from __future__ import annotations

import tensorflow as tf

from autodist.graph.step import CapturedStep

STAGE_MARK = "_autodist_stage"
"""Attribute of a node; TensorFlow ignores attributes with this first character, and copies of a node keep it."""


def marked_stage(node: tf.compat.v1.NodeDef) -> int | None:
    """Returns the pipeline stage that the script assigns to a node; None: unspecified."""
    return node.attr[STAGE_MARK].i if STAGE_MARK in node.attr else None


def has_stage_marks(step: CapturedStep) -> bool:
    """Returns True if the script assigns a variable or an operation of the step to a pipeline stage."""
    return any(v.stage is not None for v in step.variables) or any(STAGE_MARK in n.attr for n in step.graph_def.node)
