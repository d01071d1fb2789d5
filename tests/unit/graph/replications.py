"""A `Replication` for tests that start from a replicated step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from autodist.graph.find_stages import find_stages
from autodist.graph.step import Replication, Step


def replication(**known: Any) -> Replication:
    """Returns the replication of a step in which all nodes run on every replica, with the given fields."""
    return Replication(find_stages(Step(tf.compat.v1.GraphDef())), **known)
