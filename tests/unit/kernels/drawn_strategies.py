"""Random strategies: a placement and a synchronizer for each variable, or for each shard of a partitioned one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from autodist.graph.step import Step
from autodist.proto import strategy_pb2

AllReduce = strategy_pb2.AllReduce


@dataclass(frozen=True)
class Way:
    """The synchronizer of one variable or shard.

    Attributes:
        owner: of a parameter server, taken modulo the number of workers; None: all-reduce.
        group: of an all-reduce.
        has_proxy: True if a parameter server's variable has a cached copy on every worker.
    """

    owner: int | None = None
    group: int = 0
    has_cached_copy: bool = False

    def write(self, said: strategy_pb2.VariableNode | strategy_pb2.Shard, workers: int) -> None:
        if self.owner is None:
            said.all_reduce.CopyFrom(AllReduce(spec=AllReduce.SHUFFLE, group=self.group))
        else:
            server = strategy_pb2.ParameterServer(owner=self.owner % workers, local_proxy=self.has_cached_copy)
            said.parameter_server.CopyFrom(server)


@dataclass(frozen=True)
class Kept:
    """The placement of one variable.

    Attributes:
        ways: one for an unpartitioned variable, else one for each shard, if the variable is long enough.
        axis: of the partition, modulo the variable's rank.
        weights: relative lengths of the shards.
    """

    ways: tuple[Way, ...]
    axis: int
    weights: tuple[int, ...]

    def node(self, name: str, shape: Sequence[int], workers: int) -> strategy_pb2.VariableNode:
        node = strategy_pb2.VariableNode(variable=name)
        axis = self.axis % len(shape) if shape else 0
        count = min(len(self.ways), shape[axis]) if shape else 1
        if count < 2:
            self.ways[0].write(node, workers)
            return node
        node.partition.axis = axis
        node.partition.sizes.extend(sizes_of(shape[axis], self.weights[:count]))
        for way in self.ways[:count]:
            way.write(node.shards.add(), workers)
        return node


def sizes_of(length: int, weights: Sequence[int]) -> list[int]:
    """Sizes from 1 that add up to `length`, and otherwise are as the weights are.

    >>> sizes_of(7, [1, 1, 4])
    [1, 1, 5]
    """
    free, total = length - len(weights), sum(weights)
    ends = [free * sum(weights[: k + 1]) // total for k in range(len(weights))]
    return [1 + end - start for start, end in zip([0, *ends], ends, strict=False)]


def ways(can_be_proxies: bool = True) -> st.SearchStrategy[Way]:
    proxies = st.booleans() if can_be_proxies else st.just(False)
    return st.builds(Way, owner=st.none() | st.integers(0, 2), group=st.integers(0, 1), has_cached_copy=proxies)


def kept() -> st.SearchStrategy[Kept]:
    return st.integers(1, 3).flatmap(
        lambda count: st.builds(
            Kept,
            ways=st.tuples(*[ways()] * count),
            axis=st.integers(0, 1),
            weights=st.tuples(*[st.integers(1, 3)] * count),
        )
    )


def strategy_of(
    step: Step, workers: int, replicas: int, kept_by_name: Mapping[str, Kept], servers: int = 0
) -> strategy_pb2.Strategy:
    """The strategy that keeps each variable as drawn; those that are not named are all-reduced.

    Args:
        step: the captured step.
        workers: with replicas.
        replicas: of each of them.
        kept_by_name: for variables with a gradient.
        servers: workers behind these, without replicas.
    """
    whole = Kept((Way(),), 0, (1,))
    nodes = [
        kept_by_name.get(name, whole).node(name, step.by_name[name].shape, workers + servers)
        for name in dict.fromkeys(g.variable for g in step.gradients)
    ]
    devices = [strategy_pb2.Replica(worker=w, device=f"cpu:{k}") for w in range(workers) for k in range(replicas)]
    config = strategy_pb2.GraphConfig(replicas=devices, workers=workers + servers)
    return strategy_pb2.Strategy(nodes=nodes, graph_config=config)
