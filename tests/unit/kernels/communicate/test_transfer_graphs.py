"""No order of events blocks the workers, and no queue fills up: a model of their messages (`tests/transfers`).

`test_replay.py` applies the model to all replayed steps.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from autodist.graph.editor import GraphEditor
from autodist.graph.index import GraphIndex
from autodist.graph.parts import ReduceOp
from autodist.graph.subgraph import SubgraphBuilder, subgraph
from autodist.kernels import Context
from autodist.kernels.communicate.codec import Codec
from autodist.kernels.communicate.communicator import CAPACITY, Communicator
from autodist.kernels.communicate.subgroup_communicator import SubgroupCommunicator
from autodist.placement.group import Group
from autodist.proto import strategy_pb2
from autodist.synchronizers import Subgroups
from tests.replay.cases import STRATEGIES, Case
from tests.replay.rewriting import rewritten
from tests.transfers.graphs import Event, Queue, Run, Transfers, changed, faults_of, in_flight, with_queue, without
from tests.transfers.search import explore
from tests.transfers.steps import Reader, transfers_of
from tests.unit.kernels.without_stacks import without_stacks

SMALL = "momentum_and_counter"
"""A stored step with rows, a dense gradient and a counter."""

LOCKED = ("asynchronous", "asynchronous_bounded", "asynchronous_proxies")
STAGED = ("pipeline", "pipeline_anew", "pipeline_calls", "pipeline_mesh")
ON_MESH = [s for s, given in STRATEGIES.items() if given["builder"] in ("Mesh", "Megatron")]
"""Their transfers are checked in test_replay.py, with the steps that they divide."""
ALIKE = (
    "small_groups", "bfloat16", "ps_last", "parallax_float16", "partitioned_proxies", "uneven_partitioned_ps",
    "random_axis_ar",
)  # fmt: skip
"""Their messages on the small step are of the same kinds as those of another strategy."""
NOT_SMALL = (*LOCKED, *STAGED, *ON_MESH, "nccl", "overridden", "recomputed", "fsdp_recomputed", "two_paces")
OTHERS = [s for s in STRATEGIES if s not in (*NOT_SMALL, *ALIKE)]


@functools.cache
def transfers(strategy: str, cluster: str, *steps: str) -> Transfers:
    """The transfers of stored steps, which all workers run in turns."""
    return transfers_of([rewritten(Case(step, strategy, cluster)) for step in steps or (SMALL,)])


# -- rewritten steps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "cluster"), [*((s, "3x1") for s in OTHERS), ("hierarchical", "4x1"), ("partitioned_ps", "4x1")]
)
def test_workers_never_block(strategy, cluster, monkeypatch):
    monkeypatch.setattr("autodist.kernels.communicate.communicator.DIRECT_BYTES", 8)
    found = transfers.__wrapped__(strategy, cluster)
    assert faults_of(found) == []
    assert math.inf not in in_flight(found).values()


@pytest.mark.parametrize("strategy", [s for s in OTHERS if s != "ring"][::4])
def test_only_its_queues_slow_a_worker_down_that_nobody_waits_for(strategy):
    found = transfers(strategy, "server")
    assert faults_of(found) == []
    endless = [name for name, most in in_flight(found).items() if most == math.inf]
    assert all(name.endswith("2 at 2") for name in endless)  # the worker without replicas


@pytest.mark.parametrize("strategy", STAGED)
def test_the_stages_of_a_pipeline_never_block(strategy):
    assert faults_of(transfers(strategy, "4x1", "keras_mlp_adam_float32")) == []


@pytest.mark.parametrize(
    ("strategy", "cluster"),
    [("asynchronous", "3x1"), ("asynchronous_bounded", "2x1"), ("asynchronous_proxies", "3x1")],
)
def test_workers_that_take_locks_never_block(strategy, cluster):
    found = transfers(strategy, cluster)
    assert any(queue.is_lock for queue in found.queues.values())
    assert faults_of(found) == []
    assert explore(found, 2, is_reduced=True).faults == ()


@pytest.mark.parametrize("strategy", ["ps_load_balancing", "shuffle", "sharded"])
def test_different_steps_in_turns_never_block(strategy):
    steps = [f"graph_alternating_optimizers.{k}" for k in (1, 2, 3, 2)]
    found = transfers(strategy, "2x1", *steps)
    assert faults_of(found) == []
    assert any(len(runs) > 1 for runs in found.programs.values())


@pytest.mark.parametrize("strategy", ["shuffle", "ps", "sharded", "proxies", "stale", "ring"])
def test_all_orders_of_a_small_step_end_with_the_first_messages(strategy):
    found = transfers(strategy, "2x1")
    explored = explore(found, 3)
    assert explored.faults == ()
    assert explored.states > explore(found, 3, is_reduced=True).states
    for name, most in in_flight(found).items():
        assert explored.fullest[name] <= most <= found.queues[name].capacity


def test_queues_of_stale_variables_have_a_place_for_each_step_ahead():
    found = transfers("stale", "3x1")
    gradients = {name: most for name, most in in_flight(found).items() if "/gradient/" in name}
    assert set(gradients.values()) == {3}  # two steps ahead, and the one of the update
    assert {queue.initial for name, queue in found.queues.items() if "/done/2/2" in name} == {2}
    values = {name: most for name, most in in_flight(found).items() if name.startswith("completion_signal/")}
    assert values.keys() & found.loops.keys()
    assert set(values.values()) == {3}


# -- faults on purpose -------------------------------------------------------------------------------------------------


def first(found: Transfers, program: str, attribute: str) -> Event:
    return next(event for run in found.programs[program] for event in run if getattr(event, attribute))


def receiving_first(found: Transfers) -> Transfers:
    """Both workers send a tensor only once they have the other one's."""
    for program in ("worker 0", "worker 1"):
        (run,) = found.programs[program]
        takes = frozenset(k for k, event in enumerate(run) if event.takes)
        for event in run:
            if event.puts:
                found = changed(found, program, event.name, after=event.after | takes)
    return found


def with_other_tag(found: Transfers) -> Transfers:
    event = first(found, "worker 0", "puts")
    found = replace(found, queues={**found.queues, "other/0/1 at 0": Queue(CAPACITY)})
    return changed(found, "worker 0", event.name, puts=("other/0/1 at 0",))


def with_one_tag_twice(found: Transfers) -> Transfers:
    for program, attribute in (("worker 0", "puts"), ("worker 1", "takes")):
        run = found.programs[program][0]
        ends = [event for event in run if getattr(event, attribute)]
        (queue,) = getattr(ends[0], attribute)
        found = changed(found, program, ends[1].name, **{attribute: (queue,)})
    return found


def inbox(found: Transfers, part: str) -> str:
    return next(name for name in found.loops if part in name)


def prefilled(found: Transfers) -> str:
    return next(name for name, queue in found.queues.items() if queue.initial)


FAULTS = {
    "receive before send": ("shuffle", receiving_first, "the workers wait for each other"),
    "no place": ("shuffle", lambda t: with_queue(t, inbox(t, "/whole/"), capacity=0), "fills up"),
    "one place": ("shuffle", lambda t: with_queue(t, inbox(t, "/whole/"), capacity=1), "fills up"),
    "few places": ("stale", lambda t: with_queue(t, inbox(t, "/gradient/"), capacity=2), "fills up"),
    "first messages": ("stale", lambda t: with_queue(t, prefilled(t), capacity=1), "for its 2 first messages"),
    "no receive": ("ps", lambda t: without(t, "worker 1", first(t, "worker 1", "takes").name), "0 are received"),
    "no send": ("sharded", lambda t: without(t, "worker 0", first(t, "worker 0", "puts").name), "0 messages are sent"),
    "other tag": ("shuffle", with_other_tag, "0 messages are sent in a round, 1 are received"),
    "one tag twice": ("ps", with_one_tag_twice, "the order of its messages varies"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name):
    strategy, change, text = FAULTS[name]
    assert any(text in fault for fault in faults_of(change(transfers(strategy, "2x1"))))


@pytest.mark.parametrize("name", ["receive before send", "no place", "no receive", "no send", "other tag"])
def test_some_order_of_events_shows_a_fault(name):
    strategy, change, _ = FAULTS[name]
    assert explore(change(transfers(strategy, "2x1")), 3).faults


def test_locks_that_are_held_together_are_taken_in_one_order():
    found = transfers("asynchronous", "2x1", "keras_mlp_adam_float32")
    locks = ("autodist/lock/0", "autodist/lock/1")
    other = dict(zip(locks, reversed(locks), strict=True))

    def hold_together(run: Run) -> Run:
        takes = frozenset(k for k, event in enumerate(run) if event.takes)
        return tuple(replace(event, after=event.after | takes) if event.puts else event for event in run)

    def swap(run: Run) -> Run:
        return tuple(
            replace(e, takes=tuple(other.get(q, q) for q in e.takes), puts=tuple(other.get(q, q) for q in e.puts))
            for e in run
        )

    standing = {name: tuple(map(hold_together, runs)) for name, runs in found.programs.items() if "standing" in name}
    assert len(standing) == 2
    held = {**found.programs, **standing}
    assert explore(replace(found, programs=held), 2).faults == ()
    swapped = replace(found, programs={**held, "standing 0": tuple(map(swap, held["standing 0"]))})
    assert explore(swapped, 2).faults
    assert set(explore(swapped, 2, is_reduced=True).faults) == set(explore(swapped, 2).faults)


# -- drawn graphs ------------------------------------------------------------------------------------------------------


@st.composite
def drawn_transfers(draw: st.DrawFn) -> Transfers:
    """Two or three workers, up to four queues between them, and any order of each worker's events."""
    workers = draw(st.integers(2, 3))
    ends = st.tuples(st.integers(0, workers - 1), st.integers(0, workers - 1))
    queues, events = {}, {worker: [] for worker in range(workers)}
    for number, (source, reader) in enumerate(draw(st.lists(ends, min_size=1, max_size=4))):
        capacity = draw(st.integers(0, 2))
        queues[str(number)] = Queue(capacity, draw(st.integers(0, capacity)))
        events[source].append(Event(f"put {number}", puts=(str(number),)))
        events[reader].append(Event(f"take {number}", takes=(str(number),)))
    programs = {f"worker {w}": (draw(ordered(tuple(run))),) for w, run in events.items() if run}
    return Transfers(programs, queues)


@st.composite
def ordered(draw: st.DrawFn, run: Run) -> Run:
    found: list[Event] = []
    for event in draw(st.permutations(run)):
        before = draw(st.sets(st.integers(0, len(found) - 1))) if found else set()
        found.append(replace(event, after=frozenset(before).union(*(found[k].after for k in before))))
    return tuple(found)


@given(drawn_transfers())
def test_circuits_and_all_orders_of_events_show_the_same(drawn):
    blocks = [fault for fault in faults_of(drawn) if "fills up" not in fault]
    explored = explore(drawn, 3)
    assert bool(blocks) == bool(explored.faults), explored.faults
    assert bool(explored.faults) == bool(explore(drawn, 3, is_reduced=True).faults)


@given(drawn_transfers())
def test_the_most_messages_in_flight_are_those_of_some_order_of_events(drawn):
    unlimited = replace(drawn, queues={name: replace(q, capacity=9) for name, q in drawn.queues.items()})
    if faults_of(unlimited):
        return
    fullest = explore(unlimited, 4).fullest
    for name, most in in_flight(unlimited).items():
        assert fullest[name] == min(most, 4 + drawn.queues[name].initial)


# -- the Communicator --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """An operation of a group.

    Attributes:
        kind: of the operation.
        group: its workers, in rank order.
        source: the earlier operation whose results are sent; -1 if there is none.
        in_subgroups: True if workers of even and of odd numbers are subgroups.
    """

    kind: str
    group: tuple[int, ...]
    source: int
    in_subgroups: bool = False

    def communicator(self, f: SubgraphBuilder, context: Context, key: str) -> Communicator:
        group = Group.of_workers(self.group)
        subgroups = Subgroups.of([worker % 2 for worker in range(context.workers)], group)
        if self.in_subgroups and subgroups is not None:
            return SubgroupCommunicator(f, context, key, group, subgroups=subgroups)
        return Communicator(f, context, key, group)

    def add(self, exchange: Communicator, own: tf.Tensor) -> list[tf.Tensor]:
        """Adds a worker's part; returns the received tensors."""
        root, like = self.group[0], [own]
        match self.kind:
            case "all_gather":
                return [t for part in exchange.all_gather("x", [own]) for t in part]
            case "gather":
                return [t for part in exchange.gather(root, "x", [own]) for t in part]
            case "broadcast" | "scatter" if exchange.me != root:
                return exchange.receive(root, "x", like)
            case "broadcast":
                exchange.broadcast("x", [own])
            case "scatter":
                exchange.scatter("x", {worker: [own] for worker in self.group[1:]})
            case "all_reduce":
                return [exchange.all_reduce([own, own[0]], ReduceOp.ADD)]
            case "reduce_scatter":
                sums = exchange.reduce_scatter(dict.fromkeys(exchange.owners, own), Codec())
                return [summed.whole for summed in sums.values()]
        return []


KINDS = ("all_gather", "gather", "broadcast", "scatter", "all_reduce", "reduce_scatter")
LENGTH = 64


def communicated(operations: Sequence[Operation], workers: int) -> Transfers:
    """The transfers of workers that all add the same operations in the same order."""
    devices = [strategy_pb2.Replica(worker=w, device="cpu:0") for w in range(workers)]
    strategy = strategy_pb2.Strategy(graph_config=strategy_pb2.GraphConfig(replicas=devices))
    found = Reader()
    with without_stacks():
        for worker in range(workers):
            context = Context(strategy, worker)
            graph, targets = _program(operations, context)
            found.add_run(f"worker {worker}", worker, GraphIndex(graph), targets)
    return found.transfers()


def _program(operations: Sequence[Operation], context: Context) -> tuple[tf.compat.v1.GraphDef, list[str]]:
    editor = GraphEditor(tf.compat.v1.GraphDef())
    results: list[list[str]] = []
    targets: list[str] = []
    for number, operation in enumerate(operations):
        received: list[str] = []
        if context.worker in operation.group:
            with subgraph(editor, f"operation_{number}") as f:
                own = _own(f, results[operation.source] if operation.source >= 0 else [])
                exchange = operation.communicator(f, context, str(number))
                received = [f.name(t) for t in operation.add(exchange, own)]
            targets += exchange.effects
        results.append(received)
    return editor.to_graph_def(), targets


def _own(f: SubgraphBuilder, names: Sequence[str]) -> tf.Tensor:
    return tf.add_n([tf.ones([LENGTH]), *(f.input(name, tf.float32, [LENGTH]) for name in names)])


@pytest.fixture(scope="module")
def in_pieces() -> Iterator[None]:
    """Vectors are reduced in pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autodist.kernels.communicate.communicator.DIRECT_BYTES", 8)
        yield


def test_any_two_operations_of_the_communicator_in_all_orders_of_events():
    one = [Operation(kind, (0, 1), -1) for kind in KINDS]  # which worker is the root of the first does not matter
    two = [Operation(kind, group, source) for kind in KINDS for group in ((0, 1), (1, 0)) for source in (-1, 0)]
    for operations in itertools.product(one, two):
        found = communicated(operations, 2)
        assert faults_of(found) == [], operations
        assert explore(found, 1).faults == (), operations


@st.composite
def drawn_operations(draw: st.DrawFn) -> tuple[list[Operation], int]:
    workers = draw(st.integers(2, 5))
    found = []
    for number in range(draw(st.integers(2, 5))):
        group = draw(st.lists(st.integers(0, workers - 1), min_size=2, unique=True))
        kind, in_subgroups = draw(st.sampled_from(KINDS)), draw(st.booleans())
        found.append(Operation(kind, tuple(group), draw(st.integers(-1, number - 1)), in_subgroups))
    return found, workers


@settings(max_examples=30)
@given(drawn_operations())
def test_drawn_operations_of_the_communicator_never_block(in_pieces, drawn):
    """Queues may fill up if groups form a chain, whose first worker can be several steps ahead of the last one."""
    operations, workers = drawn
    found = communicated(operations, workers)
    assert [fault for fault in faults_of(found) if "fills up" not in fault] == []
    assert explore(found, 3, is_reduced=True).faults == ()
