"""Whether a strategy can be carried out on this step and these machines, told before any process starts."""

from __future__ import annotations

from collections import Counter

from autodist.errors import StrategyError
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies.base import graph_config
from autodist.strategies.nearest import did_you_mean, listed
from autodist.strategies.specs import effective_spec
from autodist.strategies.variables import GraphLike, synced_variables

Spec = strategy_pb2.AllReduce.Spec


def check_strategy(strategy: strategy_pb2.Strategy, graph_item: GraphLike, resource_spec: ResourceSpec) -> None:
    """Passes what the kernels can carry out.

    Raises:
        StrategyError: names the variable, the reason and the mend.
    """
    check_nodes(strategy, graph_item, resource_spec)
    _check_replicas(strategy, resource_spec)
    _check_one_collective_alone(strategy)
    _check_nccl_has_gpus(strategy, resource_spec)


def check_nodes(strategy: strategy_pb2.Strategy, graph_item: GraphLike, resource_spec: ResourceSpec) -> None:
    """Passes a strategy with one complete node for each variable that has a gradient.

    Raises:
        StrategyError: names the variable, the reason and the mend.
    """
    known = [variable.name for variable in graph_item.variables]
    synced = [variable.name for variable in synced_variables(graph_item)]
    counts = Counter(node.variable for node in strategy.nodes)
    for name, count in counts.items():
        if name not in known:
            raise StrategyError(
                f"{strategy.builder} has a node for {name!r}, and the captured step has no such variable."
                f"{did_you_mean(name, known)} Variables with gradients are {listed(synced)}."
            )
        if name not in synced:
            raise StrategyError(f"{strategy.builder} has a node for {name}, which has no gradient; leave it out.")
        if count > 1:
            raise StrategyError(f"{strategy.builder} has {count} nodes for {name}; keep one of them.")
    for name in synced:
        if name not in counts:
            raise StrategyError(
                f"{strategy.builder} has no node for {name}, which has a gradient: its copies would drift apart. "
                "Add one that says AllReduce or PS."
            )
    for node in strategy.nodes:
        _check_synchronizer(node, resource_spec)


def _check_synchronizer(node: strategy_pb2.VariableNode, resource_spec: ResourceSpec) -> None:
    if node.HasField("partition") or node.shards:
        raise StrategyError(
            f"{node.variable} is to be partitioned, which this version cannot do; leave its partition and shards empty."
        )
    if node.WhichOneof("synchronizer") is None:
        raise StrategyError(f"{node.variable} has a node without a synchronizer; set all_reduce or parameter_server.")
    if node.HasField("parameter_server"):
        _check_owner(node, resource_spec)
    elif node.all_reduce.spec not in Spec.values():
        raise StrategyError(
            f"{node.variable} is to be reduced by spec {node.all_reduce.spec}, which does not exist; "
            f"take one of {listed(Spec.keys())}."
        )


def _check_owner(node: strategy_pb2.VariableNode, resource_spec: ResourceSpec) -> None:
    owner, workers = node.parameter_server.owner, len(resource_spec.workers)
    if not 0 <= owner < workers:
        raise StrategyError(
            f"{node.variable} is to be owned by worker {owner}, and there are {workers} workers; "
            f"name one from 0 (the chief) to {workers - 1}."
        )


def _check_replicas(strategy: strategy_pb2.Strategy, resource_spec: ResourceSpec) -> None:
    wanted = graph_config(resource_spec)
    if strategy.graph_config != wanted:
        raise StrategyError(
            f"{strategy.builder} runs on the replicas {_replica_names(strategy.graph_config)}, and the resource spec "
            f"has {_replica_names(wanted)}; let the builder take graph_config(resource_spec)."
        )


def _replica_names(config: strategy_pb2.GraphConfig) -> str:
    return listed(f"worker {replica.worker} {replica.device}" for replica in config.replicas)


def _check_one_collective_alone(strategy: strategy_pb2.Strategy) -> None:
    """RING and NCCL need step ids that agree on all workers, and hang beside what crosses workers by queues or
    accumulators in the same session."""
    default = effective_spec(strategy)
    kinds = {node.variable: _way(node, default) for node in strategy.nodes}
    for variable, way in kinds.items():
        other = next((name for name, its_way in kinds.items() if its_way != way), None)
        if way in ("RING", "NCCL") and other is not None:
            raise StrategyError(
                f"{variable} is reduced by {way} and {other} by {kinds[other]}: TensorFlow's collectives hang in one "
                f"session with any other way between workers. Take all_reduce_spec SHUFFLE in place of {way}, which "
                f"mixes with everything, or {way} for every variable."
            )


def _way(node: strategy_pb2.VariableNode, default: strategy_pb2.AllReduce.Spec) -> str:
    if node.HasField("parameter_server"):
        return "PS"
    return Spec.Name(node.all_reduce.spec or default)


def _check_nccl_has_gpus(strategy: strategy_pb2.Strategy, resource_spec: ResourceSpec) -> None:
    reduced = [node.variable for node in strategy.nodes if node.all_reduce.spec == Spec.Value("NCCL")]
    others = [replica for replica in resource_spec.replicas if not replica.device.startswith("gpu:")]
    if reduced and others:
        raise StrategyError(
            f"{reduced[0]} is reduced by NCCL, which needs a GPU for every replica, and {others[0].worker.name} has "
            f"one on {others[0].device}; take all_reduce_spec SHUFFLE, or give it a GPU."
        )
