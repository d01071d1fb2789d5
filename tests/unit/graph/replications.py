"""What steps say that were replicated, for tests that begin with such a step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from autodist.graph.find_stages import find_stages
from autodist.graph.step import Replication, Step


def replication(**known: Any) -> Replication:
    """That of a step in which nothing runs once, with the fields that are given."""
    return Replication(find_stages(Step(tf.compat.v1.GraphDef())), **known)
