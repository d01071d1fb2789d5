"""The ways of training a task: alone on one device, under AutoDist, and under three strategies of `tf.distribute`.

Each is the same custom loop over the same global batches. Each returns a function that makes one step and returns the
loss.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bench.models import Task
from bench.turns import Training, parts

PASSES = 4
"""Number of passes of an evaluation over a task's batches."""

OPTIONS = {
    "Pipeline 1F1B": {"builder": "Pipeline", "schedule": "1F1B", "micro_batches": 8},
    "PS in shards": {"builder": "PS", "max_shards": None},
    "DiLoCo of 6 steps": {"builder": "DiLoCo", "local_steps": 6},
    "AllReduce in small groups": {"builder": "AllReduce", "chunk_size": 8},
    "FSDP without prefetch": {"builder": "FSDP", "prefetch": 0},
    "Mesh": {
        "builder": "Mesh",
        "mesh": {"data": 2, "model": 2},
        "variables": {
            "dense(_2)?/kernel|.*/up/kernel": {"sharding": [None, "model"]},
            "dense_[13]/kernel|.*/down/kernel": {"sharding": ["model", None]},
            ".*/(query|key|value)/kernel": {"sharding": [None, "model", None]},
            ".*/attention_output/kernel": {"sharding": ["model", None, None]},
        },
    },
}
"""The strategy sections of builders that are not measured with their default options."""


def _replica_step(task: Task, scope: AbstractContextManager[Any], examples: int) -> Callable[..., tf.Tensor]:
    """Forward, backward and update for a loss that is divided by `examples`."""
    with scope:
        model = task.make_model()
        optimizer = task.optimizer()
        optimizer.build(model.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = task.loss(y, model(x, training=True), examples)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def alone(task: Task) -> Training:
    """Trains the script without any distribution."""
    step = tf.function(_replica_step(task, nullcontext(), task.batch))
    batches = parts(task, 0, 1)
    return Training(lambda: float(step(*next(batches))))


def autodist(
    task: Task,
    workers: int,
    replicas: int,
    builder: str,
    apart: bool = False,
    cluster: str = "",
    on_gpus: bool = False,
) -> Training:
    """Trains the same script with AutoDist's two lines: `replicas` on each of `workers` of this machine."""
    ad = _autodist(workers, replicas, builder, apart, cluster, on_gpus)
    with ad.scope():
        step = ad.function(_replica_step(task, nullcontext(), task.batch))
    batches = parts(task, ad.worker_index, ad.num_workers)
    return Training(lambda: float(step(*next(batches))), ad.is_chief, lambda: _choice(ad))


def _choice(ad: Any) -> dict[str, Any]:
    """Returns the plan that the strategy `Auto` has chosen, and its predicted parts in seconds; empty: another one."""
    strategy = ad._run.steps.strategy
    if strategy is None or not strategy.HasField("choice"):
        return {}
    choice = strategy.choice
    terms = {term.name: term.seconds for term in choice.terms}
    return {
        "chosen": choice.alternatives[0].name,
        "predicted": choice.alternatives[0].seconds,
        "terms": terms,
        "alternatives": {one.name: one.seconds for one in choice.alternatives},
    }


def mesh(task: Task, workers: int, replicas: int, builder: str) -> Training:
    """Trains with AutoDist on whole batches, of which each place takes its part."""
    ad = _autodist(workers, replicas, builder)
    with ad.scope():
        step = ad.function(_replica_step(task, nullcontext(), task.batch), batch="global")
    batches = parts(task, 0, 1)
    return Training(lambda: float(step(*next(batches))), ad.is_chief)


def dtensor(task: Task, workers: int, index: int) -> Training:
    """Trains dense layers with DTensor; the addresses of its clients are in `TF_CONFIG`."""
    from bench.dtensor_way import Dense, join

    join(workers, index, json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
    dense = Dense(task)
    batches = parts(task, 0, 1)
    return Training(lambda: dense.step(*next(batches)), index == 0)


def _autodist(
    workers: int, replicas: int, builder: str, apart: bool = False, cluster: str = "", on_gpus: bool = False
) -> Any:
    """Makes the AutoDist of a way.

    Args:
        workers: number of workers.
        replicas: the number of replicas of each.
        builder: the builder of the strategy, or a key of `OPTIONS`.
        apart: True if each worker is on a machine of its own, as for slow links.
        cluster: path of a JSON file with other machines, "" for none. The chief reads it, with its strategy.
        on_gpus: True if each replica is on a GPU, False if all are on the CPU.
    """
    from autodist import AutoDist, ResourceSpec

    strategy = OPTIONS.get(builder, {"builder": builder})
    if cluster:
        machines = json.loads(pathlib.Path(cluster).read_text())
        return AutoDist(resource_spec=ResourceSpec.from_dict({**machines, "strategy": strategy}))
    if apart:
        nodes = [{"address": f"127.0.0.{k + 1}", "cpus": list(range(replicas)), "chief": not k} for k in range(workers)]
    else:
        kind = "gpus" if on_gpus else "cpus"
        nodes = [{"address": "localhost", kind: list(range(workers * replicas)), "workers": workers}]
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": nodes, "strategy": strategy}))


def evaluation_alone(task: Task) -> Training:
    """An evaluation of all batches, some times over, is a step."""
    return Training(_evaluation(task, nullcontext()))


def evaluation(task: Task, workers: int, replicas: int, builder: str) -> Training:
    """Evaluates with AutoDist, as `fit` validates."""
    ad = _autodist(workers, replicas, builder)
    return Training(_evaluation(task, ad.scope()), ad.is_chief)


def _evaluation(task: Task, scope: AbstractContextManager[Any]) -> Callable[[], float]:
    x, y = (np.concatenate([whole] * PASSES) for whole in task.make_data())
    loss_type = keras.losses.BinaryCrossentropy if task.is_binary else keras.losses.SparseCategoricalCrossentropy
    with scope:
        model = task.make_model()
        model.compile(task.optimizer(), loss_type(from_logits=True))
        model.fit(x[: task.batch], y[: task.batch], task.batch, verbose=0)
    return lambda: float(model.evaluate(x, y, task.batch, verbose=0))


def mirrored(task: Task, replicas: int, on_gpus: bool = False) -> Training:
    """Trains with `MirroredStrategy` on GPUs, or on logical CPU devices of one process."""
    if not on_gpus:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    strategy = tf.distribute.MirroredStrategy([f"/{'gpu' if on_gpus else 'cpu'}:{k}" for k in range(replicas)])
    return Training(_step_of_strategy(task, strategy, replicas))


def multi_worker(task: Task, workers: int, index: int) -> Training:
    """Trains with `MultiWorkerMirroredStrategy` and its ring; the cluster is in `TF_CONFIG`."""
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    return Training(_step_of_strategy(task, strategy, workers), index == 0)


def _step_of_strategy(task: Task, strategy: tf.distribute.Strategy, replicas: int) -> Callable[[], float]:
    replica_step = _replica_step(task, strategy.scope(), task.batch)

    @tf.function
    def step(data: Any) -> tf.Tensor:
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica_step, args=data), axis=None)

    def pipeline(context: Any) -> tf.data.Dataset:
        here = replicas // context.num_input_pipelines
        first = context.input_pipeline_id * here
        return _pipeline(task, replicas, range(first, first + here))

    batches = iter(strategy.distribute_datasets_from_function(pipeline))
    return lambda: float(step(next(batches)))


def parameter_server(task: Task, workers: int) -> Training:
    """Trains with `ParameterServerStrategy` whose coordinator waits for all workers after each global batch."""
    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    replica_step = _replica_step(task, strategy.scope(), task.batch // workers)

    @tf.function
    def step(batches: Any) -> tf.Tensor:
        losses = strategy.run(replica_step, args=next(batches))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    # Every worker iterates over all parts of the batches, which does not affect the time.
    batches = iter(coordinator.create_per_worker_dataset(lambda _=None: _pipeline(task, workers, range(workers))))

    def one() -> float:
        losses = [coordinator.schedule(step, args=(batches,)) for _ in range(workers)]
        coordinator.join()
        return float(np.mean([loss.fetch() for loss in losses]))

    return Training(one)


def _pipeline(task: Task, replicas: int, mine: range) -> tf.data.Dataset:
    """Returns the parts of each global batch for the replicas `mine`, in turn, produced by a separate thread."""
    x, y = task.make_data()
    each = task.batch // replicas

    def cut(whole: np.ndarray) -> np.ndarray:
        by_replica = whole.reshape((-1, replicas, each, *whole.shape[1:]))[:, mine.start : mine.stop]
        return by_replica.reshape((-1, each, *whole.shape[1:]))

    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    return tf.data.Dataset.from_tensor_slices((cut(x), cut(y))).repeat().prefetch(2).with_options(options)
