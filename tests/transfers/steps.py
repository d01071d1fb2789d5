"""The transfers of the rewritten steps of all workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import tensorflow as tf

from autodist.graph.inboxes import SOURCE
from autodist.graph.index import GraphIndex
from autodist.graph.names import node_of
from autodist.graph.step import Step
from autodist.graph.walks import reach
from tests.transfers.graphs import Event, Queue, Run, Transfers

PUT, PUT_MANY, TAKE = "QueueEnqueueV2", "QueueEnqueueManyV2", "QueueDequeueV2"
LOCK = "autodist/lock/"
SHARED = ("QueueCloseV2", "QueueDequeueManyV2", "QueueDequeueUpToV2")
"""Ops on queues that are in no program of the model."""


def transfers_of(rounds: Sequence[Sequence[Step]]) -> Transfers:
    """Returns the transfers of a run in which all workers run the same steps in turns.

    Args:
        rounds: of each step of a round, the rewritten one of every worker.
    """
    found = Reader()
    for steps in rounds:
        for worker, step in enumerate(steps):
            graph = GraphIndex(step.graph_def)
            found.add_run(f"worker {worker}", worker, graph, [*map(node_of, step.outputs), *step.targets])
            found.add_first_messages(worker, graph, step.initializers.values())
            if step.background_nodes:
                found.add_run(f"updates {worker}", worker, graph, step.background_nodes)
                found.released[f"updates {worker}"] = f"worker {worker}"
            if step.standing_nodes:
                found.add_run(f"standing {worker}", worker, graph, step.standing_nodes)
    return found.transfers()


class Reader:
    """Collects the programs and queues of graphs."""

    def __init__(self) -> None:
        self.programs: dict[str, tuple[Run, ...]] = {}
        self.queues: dict[str, Queue] = {}
        self.loops: dict[str, str] = {}
        self.released: dict[str, str] = {}

    def transfers(self) -> Transfers:
        return Transfers(self.programs, self.queues, self.loops, self.released)

    def add_run(self, program: str, worker: int, graph: GraphIndex, roots: Iterable[str]) -> None:
        """Adds a run of a worker's program: the nodes `roots` and all that they depend on."""
        running = reach(roots, graph.sources.__getitem__)
        events: list[Event] = []
        before: dict[str, frozenset[int]] = {}
        for name in graph.order:
            if name not in running:
                continue
            node = graph.nodes[name]
            after = frozenset[int]().union(*(before.get(source, ()) for source in graph.sources[name]))
            for event in self._events_of(node, worker, graph):
                events.append(replace(event, after=after))
                after |= {len(events) - 1}
            before[name] = after
        if events:
            self.programs[program] = (*self.programs.get(program, ()), tuple(events))

    def add_first_messages(self, worker: int, graph: GraphIndex, initializers: Iterable[str]) -> None:
        """Adds the messages that initializers put into queues."""
        for node in (graph.nodes[node_of(name)] for name in initializers):
            if node.op in (PUT, PUT_MANY):
                name = self._queue(node, worker, graph)
                count = 1 if node.op == PUT else _count(graph.nodes[node_of(node.input[1])])
                self.queues[name] = replace(self.queues[name], initial=count)

    def _events_of(self, node: tf.compat.v1.NodeDef, worker: int, graph: GraphIndex) -> list[Event]:
        if node.op == PUT:
            return [Event(node.name, puts=(self._queue(node, worker, graph),))]
        if node.op == TAKE:
            return [Event(node.name, takes=(self._queue(node, worker, graph),))]
        assert node.op not in SHARED, f"{node.name} ({node.op}) is in no model"
        return self._collective(node, worker, graph) if node.op.startswith("Collective") else []

    def _queue(self, node: tf.compat.v1.NodeDef, worker: int, graph: GraphIndex) -> str:
        """Returns the name of a node's queue: a worker's own queue has its number."""
        queue = graph.nodes[node_of(node.input[0])]
        shared_name, capacity = queue.attr["shared_name"].s.decode(), queue.attr["capacity"].i
        if shared_name.startswith(LOCK):
            self.queues.setdefault(shared_name, Queue(capacity, is_lock=True))
            return shared_name
        name = f"{shared_name or queue.name} at {worker}"
        known = self.queues.setdefault(name, Queue(capacity))
        assert known.capacity == capacity, f"{name} has places for {known.capacity} and for {capacity} messages"
        if SOURCE in queue.attr:
            self.loops[name] = f"{shared_name} at {queue.attr[SOURCE].i}"
        return name

    def _collective(self, node: tf.compat.v1.NodeDef, worker: int, graph: GraphIndex) -> list[Event]:
        """Returns the events of a collective of all workers, as messages from each worker to each other one."""
        count = int(tf.make_ndarray(graph.nodes[node_of(node.input[1])].attr["value"].tensor))
        others = [other for other in range(count) if other != worker]
        to, of = ([f"{node.name}/{s}/{r}" for s, r in ends] for ends in
                  ([(worker, other) for other in others], [(other, worker) for other in others]))  # fmt: skip
        for name in (*to, *of):
            self.queues.setdefault(name, Queue(2))
        return [Event(node.name, puts=tuple(to)), Event(f"{node.name} ends", takes=tuple(of))]


def _count(messages: tf.compat.v1.NodeDef) -> int:
    """Returns the length of a stack of messages."""
    if messages.op == "Pack":
        return int(messages.attr["N"].i)
    return int(messages.attr["value"].tensor.tensor_shape.dim[0].size)
