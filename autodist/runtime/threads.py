"""How a worker's session is set up: its threads."""

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

    @property
    def devices(self) -> Sequence[str]: ...

    @property
    def cores(self) -> int | None: ...


def session_config(workers: Sequence[WorkerLike], index: int) -> tf.compat.v1.ConfigProto:
    """The session of worker `index`: the cores of its machine are shared out among the workers there.

    Replicas on a worker's CPU run side by side, and one operation gets the threads of one replica: with more, two that
    run at the same time take turns on the same cores (a third more time for a step of dense layers, twice as much for
    one of small convolutions, on two cores).

    Args:
        workers: all of them.
        index: whose session it is.
    """
    beside = sum(w.node.address == workers[index].node.address for w in workers)
    cores = workers[index].cores or max(1, len(os.sched_getaffinity(0)) // beside)
    on_cpu = sum(device.startswith("cpu:") for device in workers[index].devices)
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=max(1, cores // max(1, on_cpu)),
        inter_op_parallelism_threads=max(2, cores),
        allow_soft_placement=True,
    )
    # Else half of what a call takes of a core, where the step computes next to nothing, are threads that look for work.
    config.experimental.disable_thread_spinning = True
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
