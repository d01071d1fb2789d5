"""Programs that read, write and differentiate two owned variables, and the order that their rewritten steps guarantee.

The check treats the graphs of all workers as one, with an edge from each message's sender to its receiver. An order in
this graph holds in every run, and a cycle is a deadlock.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from autodist.capture.function import CapturedFunction
from autodist.graph.names import is_control, node_of, output_index, tensor
from autodist.graph.step import Step
from autodist.graph.walks import reach
from autodist.kernels import Context, Fetching, rewrite
from autodist.kernels.pipeline import KERNELS
from autodist.proto import strategy_pb2
from tests.unit.kernels.in_one_process import capture, plan, rewritten
from tests.unit.kernels.without_stacks import without_stacks

NAMES = ("first", "second")
KINDS = ("read", "write", "gradient")

BATCH = np.linspace(-1.0, 1.0, 18).reshape(6, 3)


@dataclass(frozen=True)
class Line:
    """One line of a program: its access, and the variable."""

    kind: str
    variable: int

    def __str__(self) -> str:
        return f"{self.kind} {NAMES[self.variable]}"


Program = tuple[Line, ...]


@dataclass(frozen=True)
class Layout:
    """The owners of both variables, how many workers compute, how many have no replica, and if they cache copies."""

    owners: tuple[int, int]
    computing: int = 3
    servers: int = 0
    proxies: bool = False


def programs(length: int) -> list[Program]:
    """Returns all programs of `length` lines that access the first variable first, and write at least one."""
    lines = [Line(kind, variable) for kind in KINDS for variable in range(len(NAMES))]
    found = itertools.product(lines, repeat=length)
    return [p for p in found if p[0].variable == 0 and any(line.kind == "write" for line in p)]


def make(
    program: Program, is_chained: bool, fetches: bool | None = None
) -> tuple[CapturedFunction, Callable[..., object]]:
    """Returns a step that runs the lines, and trains a third variable by all read values: rows of the second variable.

    If `fetches` is set, only a fetch can use the read values: they are returned, or unused.

    If `is_chained`, each line waits for the one before, as in a TensorFlow 1 script. Otherwise only lines of the same
    variable are ordered, as by `tf.function`.
    """
    owned = [tf.Variable(np.linspace(0.5 + k, 1.0, 3), name=name) for k, name in enumerate(NAMES)]
    other = tf.Variable(np.ones(3), name="other")

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        seen: list[tf.Tensor] = []
        gradients: dict[int, tf.Tensor] = {}
        last: list[tf.Tensor] = []
        for line in program:
            with tf.control_dependencies(last) if is_chained else contextlib.nullcontext():
                last = [_run(line, x, owned, seen, gradients)]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.reduce_sum(x * other, 1) - 1.0))
        used = seen if fetches is None else []
        other.assign_sub(0.1 * tape.gradient(loss, other) * (1.0 + tf.add_n([tf.zeros([], tf.float64), *used])))
        return [loss, *(seen if fetches else [])]

    return capture(step, BATCH), step


@tf.autograph.experimental.do_not_convert
def _run(
    line: Line,
    x: tf.Tensor,
    owned: Sequence[tf.Variable],
    seen: list[tf.Tensor],
    gradients: dict[int, tf.Tensor],
) -> tf.Tensor:
    variable = owned[line.variable]
    match line.kind:
        case "read":
            seen.append(tf.norm(tf.gather(variable, [0, 2]) if line.variable else variable))
            return seen[-1]
        case "gradient":
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.reduce_sum(x * owned[0] * owned[1], 1) - 1.0))
            gradients[line.variable] = tape.gradient(loss, variable)
            return gradients[line.variable]
    change = gradients.get(line.variable, tf.constant(0.3, tf.float64, [3]))
    return variable.assign_sub(0.1 * change, read_value=False)


def strategy_of(captured: CapturedFunction, layout: Layout) -> strategy_pb2.Strategy:
    """Both variables at their owners, whether the program trains them or not."""
    made = plan(captured.step, layout.computing, 1, servers=layout.servers)
    others = [node for node in made.nodes if node.variable not in NAMES]
    del made.nodes[:]
    for name, owner in zip(NAMES, layout.owners, strict=True):
        server = strategy_pb2.ParameterServer(owner=owner, local_proxy=layout.proxies)
        made.nodes.append(strategy_pb2.VariableNode(variable=name, parameter_server=server))
    made.nodes.extend(others)
    return made


def rewritten_by_each(captured: Sequence[CapturedFunction], strategy: strategy_pb2.Strategy) -> list[Step]:
    """Returns the step of every worker with fetches of its own: worker k makes the k-th of these steps, cyclically."""
    workers = range(Context(strategy, 0).workers)
    with without_stacks():
        return [
            rewrite(captured[k % len(captured)].step, Context(strategy, k, Fetching.BY_EACH), kernels=KERNELS)
            for k in workers
        ]


def unordered(
    captured: CapturedFunction, strategy: strategy_pb2.Strategy, items: Sequence[Step] | None = None
) -> list[str]:
    """Returns the unordered accesses of the rewritten step: reads that may see another version than in the captured
    step.

    Args:
        captured: the step.
        strategy: of the rewriting.
        items: each worker's; None: they all fetch the same.
    """
    items = rewritten(captured, strategy) if items is None else items
    graph = Union(captured, items)
    order = graph.order()
    if order is None:
        return ["the workers wait for each other"]
    touched = [(n, e) for n, e in captured.step.graph_index.effects.items()]
    handles = {captured.step.by_name[name].handle for name in NAMES if name in captured.step.by_name}
    found = []
    for handle in handles:
        events = [(name, handle in effect.writes) for name, effect in touched if handle in effect.reads | effect.writes]
        for (name, is_write), (other, is_other_write) in itertools.combinations(events, 2):
            if is_write == is_other_write:
                continue
            for before in graph.touching(name, handle):
                for after in graph.touching(other, handle):
                    if not graph.is_before(before, after):
                        found.append(f"{before} before {after}")
    return found


class Union:
    """The graphs of all workers as one.

    Args:
        captured: the step.
        items: the rewritten step of each worker.
    """

    def __init__(self, captured: CapturedFunction, items: Sequence[Step]) -> None:
        self._captured, self._items = captured.step.graph_index, items
        self._sources: dict[str, list[str]] = {}
        self._touching: dict[tuple[str, str], list[str]] = {}
        senders: dict[str, str] = {}
        receivers: dict[str, str] = {}
        for worker, step in enumerate(items):
            nodes = step.graph_index.nodes
            for name, sources in step.graph_index.sources.items():
                self._sources[f"{worker}/{name}"] = [f"{worker}/{source}" for source in sources]
                if nodes[name].op in ("QueueEnqueueV2", "QueueDequeueV2"):
                    queue = nodes[node_of(nodes[name].input[0])].attr["shared_name"].s.decode()
                    ends = senders if nodes[name].op == "QueueEnqueueV2" else receivers
                    assert queue not in ends, queue
                    ends[queue] = f"{worker}/{name}"
            used = _used(step)
            for name, effect in step.graph_index.effects.items():
                for handle in effect.reads | effect.writes if name in used else ():
                    self._touching.setdefault((name, handle), []).append(f"{worker}/{name}")
        assert senders.keys() == receivers.keys()
        self._sender_of = {receiver: senders[queue] for queue, receiver in receivers.items()}
        for receiver, sender in self._sender_of.items():
            self._sources[receiver].append(sender)
        for worker, name in itertools.product(range(len(items)), captured.step.graph_index.effects):
            for handle in captured.step.graph_index.effects[name].reads:
                self._touching.setdefault((name, handle), []).extend(self._reads_elsewhere(worker, name))

    def _reads_elsewhere(self, worker: int, read: str) -> Iterator[str]:
        """Yields the owner's nodes whose values a worker uses in place of those of a captured read."""
        nodes, used = self._items[worker].graph_index.nodes, _used(self._items[worker])
        for consumer in used.intersection(self._captured.consumers[read]):
            for position, i in enumerate(self._captured.nodes[consumer].input):
                if not is_control(i) and tensor(i) == tensor(read):
                    yield from self._made_at_owner(worker, nodes[consumer].input[position])

    def _made_at_owner(self, worker: int, value: str) -> Iterator[str]:
        nodes = self._items[worker].graph_index.nodes
        while nodes[node_of(value)].op in ("Reshape", "SplitV"):
            value = nodes[node_of(value)].input[0]
        sender = self._sender_of.get(f"{worker}/{node_of(value)}")
        if sender is not None:
            owner, _, enqueue = sender.partition("/")
            sent = self._items[int(owner)].graph_index.nodes[enqueue].input[1 + output_index(value)]
            yield f"{owner}/{node_of(sent)}"

    def touching(self, name: str, handle: str) -> list[str]:
        """A captured node in the graphs of the workers that use its value, or write by it; reads also at the owner."""
        return self._touching.get((name, handle), [])

    def order(self) -> list[str] | None:
        """A topological order; None if there is a cycle."""
        self._before: dict[str, int] = {}
        self._bit: dict[str, int] = {}
        left = {name: len(set(sources)) for name, sources in self._sources.items()}
        consumers: dict[str, list[str]] = {}
        for name, sources in self._sources.items():
            for source in set(sources):
                consumers.setdefault(source, []).append(name)
        ready = [name for name, count in left.items() if not count]
        found = []
        while ready:
            name = ready.pop()
            found.append(name)
            self._bit[name] = 1 << len(found)
            self._before[name] = self._bit[name]
            for source in self._sources[name]:
                self._before[name] |= self._before[source]
            for consumer in consumers.get(name, ()):
                left[consumer] -= 1
                if not left[consumer]:
                    ready.append(consumer)
        return found if len(found) == len(self._sources) else None

    def is_before(self, first: str, second: str) -> bool:
        return bool(self._before[second] & self._bit[first])


def _used(step: Step) -> set[str]:
    """Returns the nodes that write, send or return values, and their ancestors."""
    sent = {node.name for node in step.graph_index.of_op("QueueEnqueueV2")}
    written = {name for name, effect in step.graph_index.effects.items() if effect.writes}
    return reach([*sent, *written, *map(node_of, step.outputs)], step.graph_index.data.__getitem__)
