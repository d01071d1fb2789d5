"""Strategies that partition variables, and training with them against one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autodist.capture.function import CapturedFunction
from autodist.graph.step import Step
from autodist.kernels import KERNELS, Context
from autodist.kernels.base import run_pipeline
from autodist.kernels.place.partition.partition_variables import PartitionVariables, partition
from autodist.placement.partitioning import Partitioning
from autodist.proto import strategy_pb2
from tests.unit.kernels.in_one_process import Batch, Trained, assert_same, one_device, plan, train

SHUFFLE = None
"""In place of an owner: the shard is at every worker, and its gradient is reduced."""

Owners = Sequence[int | None]


def cut_in_strategy(strategy: strategy_pb2.Strategy, variable: str, cut: Partitioning, owners: Owners) -> None:
    """Cuts a variable, each shard with an owner or `SHUFFLE`."""
    (node,) = [node for node in strategy.nodes if node.variable == variable]
    node.ClearField("synchronizer")
    node.partition.axis = cut.axis
    node.partition.sizes.extend(cut.sizes)
    for owner in owners:
        node.shards.add().CopyFrom(_shard(owner))


def _shard(owner: int | None) -> strategy_pb2.Shard:
    if owner is SHUFFLE:
        return strategy_pb2.Shard(all_reduce=strategy_pb2.AllReduce(spec=strategy_pb2.AllReduce.SHUFFLE))
    return strategy_pb2.Shard(parameter_server=strategy_pb2.ParameterServer(owner=owner))


def sharded_plan(
    step: Step, cuts: Mapping[str, Partitioning], workers: int = 2, replicas: int = 1, by_server: bool = True
) -> strategy_pb2.Strategy:
    """A strategy that cuts variables; owners of shards go round, or every shard is reduced."""
    strategy = plan(step, workers, replicas)
    for position, (name, cut) in enumerate(cuts.items()):
        owners = [(k + position) % workers if by_server else SHUFFLE for k in range(len(cut.sizes))]
        cut_in_strategy(strategy, name, cut, owners)
    return strategy


def in_thirds(length: int) -> tuple[int, ...]:
    """Up to three uneven shards of an axis."""
    return {1: (1,), 2: (1, 1), 3: (1, 2)}.get(length, (2, 1, length - 3))


def every_cut(step: Step, axis: int = 0) -> dict[str, Partitioning]:
    """A cut of every variable that has a gradient, along `axis` or its last."""
    shapes = {g.variable: step.by_name[g.variable].shape for g in step.gradients}
    found = {}
    for name, shape in shapes.items():
        at = min(axis, len(shape) - 1)
        if shape and shape[at] > 1:
            found[name] = Partitioning(at, in_thirds(shape[at]))
    return found


def partitioned(step: Step, strategy: strategy_pb2.Strategy) -> tuple[Step, tuple[str, ...]]:
    """Returns the partitioned step, before any other kernel, and the logged parts that are not computed by shard."""
    before = itertools.takewhile(lambda kernel: kernel != PartitionVariables(), KERNELS)
    made = partition(run_pipeline(tuple(before), step, Context(strategy, 0)))
    return made.step, made.log_lines


def assert_trains_alike(
    captured: CapturedFunction,
    step: Callable[..., object],
    strategy: strategy_pb2.Strategy,
    batches: Sequence[Batch],
    rtol: float = 1e-12,
) -> Trained:
    """Checks that shards train as one device does."""
    found = train(captured, strategy, batches)
    assert_same(found, one_device(captured, step, batches), rtol)
    return found


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)
