"""How many threads a worker's session has."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

log = logging.getLogger("autodist")

COLLECTIVE_LEADER = "/job:worker/replica:0/task:0"


class NodeLike(Protocol):
    @property
    def address(self) -> str: ...


class WorkerLike(Protocol):
    """The part of resources.Worker that is used here."""

    @property
    def node(self) -> NodeLike: ...


def session_config(workers: Sequence[WorkerLike], index: int) -> tf.compat.v1.ConfigProto:
    """The session of worker `index`: the cores of its machine are shared out among the workers there."""
    beside = sum(w.node.address == workers[index].node.address for w in workers)
    cores = max(1, len(os.sched_getaffinity(0)) // beside)
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=cores, inter_op_parallelism_threads=max(2, cores), allow_soft_placement=True
    )
    config.gpu_options.allow_growth = True
    if len(workers) > 1:
        config.experimental.collective_group_leader = COLLECTIVE_LEADER
    return config


def share_cores(workers: Sequence[WorkerLike], index: int) -> None:
    """Gives TensorFlow's eager operations the same share of the cores, where they have not run yet."""
    config = session_config(workers, index)
    try:
        tf.config.threading.set_intra_op_parallelism_threads(config.intra_op_parallelism_threads)
        tf.config.threading.set_inter_op_parallelism_threads(config.inter_op_parallelism_threads)
    except RuntimeError:
        log.debug("TensorFlow runs already; its eager operations keep their threads.")
