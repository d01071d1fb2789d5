"""Execution order: one total order of a replicated step that every worker can follow without deadlock."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autodist.graph.effects import group_by_handle
from autodist.graph.index import GraphIndex
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.parts import PendingReduction, PendingReductionKind, ReduceOp


@dataclass(frozen=True)
class ExecutionOrder:
    """A topological order of the nodes of a step and of the messages of its pending reductions.

    Reductions that may share a message are one entry: every consumer of one of them comes after all of their inputs.
    Writes come as late as possible, so a read that the step does not order relative to a write comes before it. The
    relative positions of reads, writes and reductions are the same on all workers, whatever their number of replicas.

    Attributes:
        names: nodes, and the messages of reductions (`message_of`).
        position: of each name.
        sources: the names that a name waits for.
        graph_index: of the replicated step.
    """

    names: tuple[str, ...]
    position: Mapping[str, int]
    sources: Mapping[str, Sequence[str]]
    graph_index: GraphIndex

    @property
    def messages(self) -> list[str]:
        """The names of the messages."""
        return [name for name in self.names if name not in self.graph_index.nodes]

    def rounds(self) -> dict[str, int]:
        """Maps each message to its communication round: the longest chain of messages before it."""
        messages = set(self.messages)
        depths: dict[str, int] = {}
        for name in self.names:
            depths[name] = max((depths.get(s, 0) + (s in messages) for s in self.sources[name]), default=0)
        return {message: depths[message] for message in messages}

    def writes_of(self, handles: Container[str]) -> dict[str, list[str]]:
        """Returns the nodes that write each variable of `handles`, in order."""
        effects = self.graph_index.effects
        names = sorted(effects, key=self.position.__getitem__)
        return group_by_handle((name, sorted(filter(handles.__contains__, effects[name].writes))) for name in names)

    def of_reduction(self, pending: PendingReduction) -> int:
        """Returns the position of the message of a pending reduction."""
        return self.position[message_of(pending)]


def message_of(pending: PendingReduction) -> str:
    """Returns the name of the message that a reduction may share with others; no node has such a name."""
    travels_alone = pending.kind is PendingReductionKind.LOSS or pending.is_sparse or pending.merge is ReduceOp.ROWS
    group = f" of {pending.group.key}" if pending.group.key else ""
    return (
        f"join {pending.kind.value} {pending.level} {pending.depth}{f' {pending.name}' if travels_alone else ''}{group}"
    )


def find_execution_order(
    graph_index: GraphIndex, reductions: Iterable[PendingReduction], late: Mapping[str, int]
) -> ExecutionOrder | None:
    """Returns the order of a step, or None if two messages would wait for each other.

    Args:
        graph_index: of the replicated step, in which each reduction leads from its local tensors to its results.
        reductions: all pending reductions of the step.
        late: the writes that come as late as possible, with their relative order.
    """
    return _Walk(graph_index, reductions, late).run()


def count_rounds(graph_index: GraphIndex, sent: Mapping[str, int]) -> dict[str, int]:
    """Maps each node to its communication round: the longest chain of sent tensors before it.

    Args:
        graph_index: of the graph.
        sent: the tensors that are sent, each with a lower bound of the round that it is sent in.
    """
    found: dict[str, int] = {}
    for name in graph_index.order:
        found[name] = 0
        for i in graph_index.nodes[name].input:
            before = found.get(node_of(i), 0)
            if not is_control(i) and tensor(i) in sent:
                before = max(before, sent[tensor(i)]) + 1
            found[name] = max(found[name], before)
    return found


def settle_depths(graph_index: GraphIndex, reductions: Sequence[PendingReduction]) -> tuple[PendingReduction, ...]:
    """Returns the reductions with depths such that none shares a message with one that it waits for.

    The levels and depths of most steps already satisfy this. Control dependencies may order one part of the step after
    another. The depth of a reduction then becomes the length of the longest chain of reductions before it.
    """
    if not reductions or find_execution_order(graph_index, reductions, {}) is not None:
        return tuple(reductions)
    local_of = {node_of(t): pending for pending in reductions for t in pending.result}
    before: dict[str, int] = {}
    depths: dict[str, int] = {}
    for name in graph_index.order:
        before[name] = max((before.get(source, 0) for source in graph_index.sources[name]), default=0)
        if name in local_of:
            pending = local_of[name]
            depths[pending.name] = max(before.get(source, 0) for source in _made_from(pending))
            before[name] = max(before[name], depths[pending.name] + 1)
    return tuple(replace(pending, depth=depths[pending.name]) for pending in reductions)


def _made_from(pending: PendingReduction) -> list[str]:
    return [node_of(t) for t in (*pending.local, *([pending.weight] if pending.weight else []))]


@dataclass
class _Walk:
    """Builds the order: takes names whose sources are taken; nodes first, then messages, then late writes."""

    graph_index: GraphIndex
    reductions: Iterable[PendingReduction]
    late: Mapping[str, int]
    names: list[str] = field(default_factory=list)

    def run(self) -> ExecutionOrder | None:
        messages = self._messages()
        position = {name: k for k, name in enumerate(self.graph_index.order)}
        sources: dict[str, Sequence[str]] = {
            name: [s for s in found if position[s] < position[name]] for name, found in self.graph_index.sources.items()
        }
        consumers: dict[str, list[str]] = {}
        for message, (made_from, results) in messages.items():
            sources[message] = list(made_from)
            for result in results:
                sources[result] = [*sources[result], message]
        for name, found in sources.items():
            for source in set(found):
                consumers.setdefault(source, []).append(name)
        waiting = {name: len(set(found)) for name, found in sources.items()}
        ready: list[str] = []
        deferred: list[tuple[int, int, str]] = []
        for name, count in waiting.items():
            if not count:
                self._enter(name, messages, ready, deferred)
        while ready or deferred:
            name = ready.pop() if ready else heapq.heappop(deferred)[-1]
            self.names.append(name)
            for consumer in consumers.get(name, ()):
                waiting[consumer] -= 1
                if not waiting[consumer]:
                    self._enter(consumer, messages, ready, deferred)
        if len(self.names) < len(sources):
            return None
        return ExecutionOrder(
            tuple(self.names), {name: k for k, name in enumerate(self.names)}, sources, self.graph_index
        )

    def _enter(
        self, name: str, messages: Mapping[str, object], ready: list[str], deferred: list[tuple[int, int, str]]
    ) -> None:
        if name in messages:
            heapq.heappush(deferred, (0, 0, name))
        elif name in self.late:
            heapq.heappush(deferred, (1, self.late[name], name))
        else:
            ready.append(name)

    def _messages(self) -> dict[str, tuple[dict[str, None], dict[str, None]]]:
        """Maps each message to the nodes that it is computed from and the nodes that its results replace."""
        result: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
        for pending in self.reductions:
            made_from, results = result.setdefault(message_of(pending), ({}, {}))
            made_from.update(dict.fromkeys(_made_from(pending)))
            results.update(dict.fromkeys(map(node_of, pending.result)))
        return result
