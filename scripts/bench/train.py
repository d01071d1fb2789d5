"""One process of a timed training run; started by `scripts/bench.py`, and by AutoDist on its other workers.

The leading process reports when it is ready. It then reads numbers of steps on its standard input, runs so many, and
prints their times. The others run the same number of steps and wait for it in each.
"""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import json
import os
import pathlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf

from bench.models import TASKS, Task
from bench.relay import Relay
from bench.transfer import transfer
from bench.turns import Training, parse_arguments, run
from bench.ways import (
    alone,
    autodist,
    dtensor,
    evaluation,
    evaluation_alone,
    mesh,
    mirrored,
    multi_worker,
    parameter_server,
)


def main() -> None:
    arguments = parse_arguments(
        *("alone", "autodist", "mesh", "evaluation", "evaluation-alone"),
        *("dtensor", "mirrored", "multi-worker", "parameter-server", "transfer"),
    )
    # A hard time limit for any wait.
    faulthandler.dump_traceback_later(arguments.limit, exit=True)
    if arguments.of_cores > 1:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[: max(1, len(cores) // arguments.of_cores)])
    if arguments.way not in ("autodist", "mesh", "evaluation"):
        tf.config.threading.set_intra_op_parallelism_threads(arguments.intra)
        tf.config.threading.set_inter_op_parallelism_threads(arguments.inter)
    if arguments.role in ("ps", "worker") and arguments.way == "parameter-server":
        _serve(arguments)
        return
    if arguments.delay or arguments.rate:
        _use_relay(arguments, Relay(arguments.delay, arguments.rate, pathlib.Path(arguments.reports)))
    training = _training(arguments, TASKS[arguments.model])
    run(arguments, replace(training, about=partial(_with_gpus, training)) if arguments.on_gpus else training)


def _with_gpus(training: Training) -> dict[str, Any]:
    """Returns the report of a training on GPUs, with the peak of their memory in bytes."""
    gpus = tf.config.list_logical_devices("GPU")
    peak = sum(int(tf.config.experimental.get_memory_info(gpu.name)["peak"]) for gpu in gpus)
    return {**training.about(), "gpu_bytes": peak}


def _training(arguments: argparse.Namespace, task: Task) -> Training:
    match arguments.way:
        case "alone":
            return alone(task)
        case "autodist":
            apart = bool(arguments.delay or arguments.rate)
            about = arguments.replicas, arguments.builder, apart, arguments.cluster, bool(arguments.on_gpus)
            return autodist(task, arguments.workers, *about)
        case "mesh":
            return mesh(task, arguments.workers, arguments.replicas, arguments.builder)
        case "dtensor":
            return dtensor(task, arguments.workers, arguments.index)
        case "evaluation":
            return evaluation(task, arguments.workers, arguments.replicas, arguments.builder)
        case "evaluation-alone":
            return evaluation_alone(task)
        case "mirrored":
            return mirrored(task, arguments.replicas, bool(arguments.on_gpus))
        case "multi-worker":
            return multi_worker(task, arguments.workers, arguments.index)
        case "transfer":
            config, transport = _session_config(arguments), arguments.builder
            step = transfer(arguments.workers, arguments.index, arguments.bytes, transport, config)
            return Training(step, arguments.index == 0)
    return parameter_server(task, arguments.workers)


def _use_relay(arguments: argparse.Namespace, relay: Relay) -> None:
    """Makes this process connect to the other workers through a relay, until the end of AutoDist."""
    atexit.register(relay.close)  # before AutoDist registers its end, which therefore runs first
    if arguments.way == "multi-worker":
        config = json.loads(os.environ["TF_CONFIG"])
        config["cluster"]["worker"] = relay.through(config["cluster"]["worker"], arguments.index)
        os.environ["TF_CONFIG"] = json.dumps(config)
        return
    from autodist.runs import peers

    start_server = peers.start_server

    def start(addresses: Sequence[str], index: int, *others: Any) -> tf.distribute.Server:
        return start_server(relay.through(addresses, index), index, *others)

    peers.start_server = start


def _session_config(arguments: argparse.Namespace) -> tf.compat.v1.ConfigProto:
    return tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=arguments.intra, inter_op_parallelism_threads=arguments.inter
    )


def _serve(arguments: argparse.Namespace) -> None:
    config = _session_config(arguments)
    cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster),
        job_name=arguments.role,
        task_index=arguments.index,
        config=config,
        protocol="grpc",
    )
    server.join()


if __name__ == "__main__":
    main()
