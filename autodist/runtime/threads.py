"""Session config of a worker: its threads, and the script's options of the graph optimizer."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf

from autodist.runtime.heaps import limit_heaps

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


_ON, _OFF = 1, 2
"""Values of `RewriterConfig.Toggle`, which TensorFlow does not export."""


def session_config(workers: Sequence[WorkerLike], index: int) -> tf.compat.v1.ConfigProto:
    """Returns the session config of worker `index`; the cores of a machine are divided among its workers.

    Replicas on a worker's CPU run concurrently, and one operation gets the threads of one replica. With more threads,
    concurrent operations would compete for the same cores: on two cores, a step of dense layers takes a third more
    time, one of small convolutions twice as much.
    """
    cores = _whole_cores_of(workers, index)
    on_cpu = sum(device.startswith("cpu:") for device in workers[index].devices)
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=max(1, cores // max(1, on_cpu)),
        inter_op_parallelism_threads=max(2, cores),
        allow_soft_placement=True,
    )
    # Otherwise half of a core's time in a call, if the step computes almost nothing, is spent by idle threads spinning.
    config.experimental.disable_thread_spinning = True
    config.gpu_options.allow_growth = True
    if len(workers) > 1:
        config.experimental.collective_group_leader = COLLECTIVE_LEADER
    _set_graph_options(config.graph_options)
    return config


def cores_of(workers: Sequence[WorkerLike], index: int) -> float:
    """Returns the cores of worker `index`, which runs on this machine; below 1 if it has more workers than cores."""
    on_machine = sum(w.node.address == workers[index].node.address for w in workers)
    return workers[index].cores or len(os.sched_getaffinity(0)) / on_machine


def _whole_cores_of(workers: Sequence[WorkerLike], index: int) -> int:
    return max(1, int(cores_of(workers, index)))


def _set_graph_options(graph_options: tf.compat.v1.GraphOptions) -> None:
    """Sets the options that the script has passed to `tf.config.optimizer`."""
    rewrite_options = graph_options.rewrite_options
    for name, value in tf.config.optimizer.get_experimental_options().items():
        is_toggle = rewrite_options.DESCRIPTOR.fields_by_name[name].enum_type is not None
        setattr(rewrite_options, name, (_ON if value else _OFF) if is_toggle else value)
    if tf.config.optimizer.get_jit():
        graph_options.optimizer_options.global_jit_level = tf.compat.v1.OptimizerOptions.ON_1


def share_cores(workers: Sequence[WorkerLike], index: int) -> None:
    """Limits the threads of TensorFlow's eager operations to the same cores, if no operation has run yet.

    With several workers, it also limits the heaps of the process, whose server will have about a hundred threads.
    """
    if len(workers) > 1:
        limit_heaps(_whole_cores_of(workers, index))
    config = session_config(workers, index)
    try:
        tf.config.threading.set_intra_op_parallelism_threads(config.intra_op_parallelism_threads)
        tf.config.threading.set_inter_op_parallelism_threads(config.inter_op_parallelism_threads)
    except RuntimeError:
        log.debug("TensorFlow is already initialized; its eager operations keep their threads.")
