"""Remote reads: the accesses of a step's replicas to variables of another worker, in groups that share messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from autodist.graph.effects import NO_EFFECT, QUERIES
from autodist.graph.execution_order import ExecutionOrder
from autodist.graph.names import node_of
from autodist.graph.step import ReplicatedStep
from autodist.kernels.communicate.node_assignment import Workers
from autodist.kernels.communicate.read_cached_copies import CachedReads
from autodist.kernels.context import Context
from autodist.kernels.replica_dependent import sources_of_replicas


class Access(NamedTuple):
    """A node of the compute part that reads a variable, by its captured name, and the handle of the variable."""

    node: str
    handle: str


@dataclass(frozen=True)
class ReadGroup:
    """Accesses to variables of one owner that share messages, since they are ready at the same time.

    Attributes:
        owner: the worker that reads the variables.
        readers: the workers that need the value of each access.
    """

    owner: int
    readers: Mapping[Access, Workers]

    def of(self, reader: int) -> list[Access]:
        """Returns the accesses whose values a worker needs."""
        return sorted(access for access, workers in self.readers.items() if workers >> reader & 1)


def group_reads(
    step: ReplicatedStep, owner: Mapping[str, int], context: Context, runs: Mapping[str, Workers]
) -> list[ReadGroup]:
    """Returns the groups of a step, in the same order on all workers.

    Between two accesses of a group, the execution order has no message and no write of an owned variable, and neither
    access depends on the other. So a group never waits for itself.

    Args:
        step: the step, with the pending reductions of parameter servers.
        owner: the owner of each owned variable, by handle.
        context: the worker for which the step is rewritten.
        runs: for nodes whose inputs not all workers have, the workers that run them.
    """
    order = step.order
    assert order is not None, "set by SetSyncMode"
    waits = {name for name, effect in order.graph_index.effects.items() if effect.writes & owner.keys()}
    waits.update(order.messages)
    if not waits:
        return []  # each worker runs such a step on its own
    accesses = _find_accesses(step, order, owner, context, runs)
    found: dict[tuple[int, tuple[int, int]], dict[Access, Workers]] = {}
    places: dict[str, tuple[int, int]] = {}  # number of messages and writes before, and of accesses since
    passed = 0
    for name in order.names:
        passed += name in waits
        since = [places[s][1] + (s in accesses) for s in order.sources[name] if places[s][0] == passed]
        places[name] = passed, max(since, default=0)
        for access, workers in accesses.get(name, {}).items():
            found.setdefault((owner[access.handle], places[name]), {})[access] = workers
    return [ReadGroup(holder, readers) for (holder, _), readers in sorted(found.items(), key=lambda item: item[0])]


def _find_accesses(
    step: ReplicatedStep, order: ExecutionOrder, owner: Mapping[str, int], context: Context, runs: Mapping[str, Workers]
) -> dict[str, dict[Access, Workers]]:
    """Returns, by node, the accesses whose values other workers than the owner need, with these workers.

    Workers with replicas have the values of cached copies and of gathered layers already.
    """
    graph_index, cached = order.graph_index, CachedReads(step, context)
    readers = _find_readers(step, order, owner, context, runs)
    computing = _mask(context.group.workers)
    found: dict[str, dict[Access, Workers]] = {}
    for handle, holder in owner.items():
        local_reads = step.gathered_reads.union(cached.of(step.by_handle[handle]))
        for name in graph_index.consumers[handle]:
            writes = graph_index.effects.get(name, NO_EFFECT).writes
            if writes or name in step.stages.once or graph_index.nodes[name].op in QUERIES:
                continue
            workers = readers[name] & ~(1 << holder) & ~(computing if name in local_reads else 0)
            if workers and step.replica_of(name)[1] == name:
                found.setdefault(name, {})[Access(name, handle)] = workers
    return found


def _find_readers(
    step: ReplicatedStep, order: ExecutionOrder, owner: Mapping[str, int], context: Context, runs: Mapping[str, Workers]
) -> Mapping[str, Workers]:
    """Returns, by node, the workers that need its value whatever they fetch."""
    graph_index = order.graph_index
    every, computing = _mask(context.group.everyone), _mask(context.group.workers)
    differs = _find_replica_dependent(step, order)
    needed: dict[str, Workers] = {}
    for message in order.messages:
        needed.update(dict.fromkeys(order.sources[message], computing))
    if context.reduces_outputs:  # otherwise workers may fetch different outputs
        needed.update(dict.fromkeys([*map(node_of, step.outputs), *step.targets], every))
    found: dict[str, Workers] = {}
    for name in reversed(graph_index.order):
        writes = graph_index.effects.get(name, NO_EFFECT).writes
        if writes:
            workers = _mask({owner[handle] for handle in writes & owner.keys()}) or every
        else:
            workers = runs[name] if name in runs else needed.get(name, 0)
        found[name] = workers = workers & computing if name in differs else workers
        for source in graph_index.data[name]:
            needed[source] = needed.get(source, 0) | workers
    return found


def _find_replica_dependent(step: ReplicatedStep, order: ExecutionOrder) -> set[str]:
    """Returns the nodes that differ between replicas; tensors that a message brings are the same for all."""
    graph_index, messages = order.graph_index, set(order.messages)
    found = set(sources_of_replicas(step, graph_index))
    for name in graph_index.order:
        if not found.isdisjoint(graph_index.data[name]) and messages.isdisjoint(order.sources[name]):
            found.add(name)
    return found


def _mask(workers: Collection[int]) -> Workers:
    return sum(1 << worker for worker in workers)
