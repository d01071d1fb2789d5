"""A replicated step for tests that start from one."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from autodist.graph.find_stages import find_stages
from autodist.graph.step import CapturedStep, ReplicatedStep


def replicated(graph_def: tf.compat.v1.GraphDef, **known: Any) -> ReplicatedStep:
    """Returns a step in which all nodes run on every replica, with these fields."""
    return ReplicatedStep(graph_def, stages=find_stages(CapturedStep(tf.compat.v1.GraphDef())), **known)
