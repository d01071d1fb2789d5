"""WorkerPart: this worker's nodes of the part that runs once, and the tensors that owners exchange for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from autodist.graph.editor import GraphEditor
from autodist.graph.effects import Effect
from autodist.graph.execution_order import count_rounds
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.parts import PendingReduction
from autodist.graph.step import ReplicatedStep
from autodist.graph.subgraph import subgraph
from autodist.graph.walks import reach
from autodist.kernels.communicate.buckets import key_of_tensors
from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.communicate.node_assignment import (
    EVERYWHERE,
    NOBODY,
    Owners,
    Workers,
    assign_nodes,
    once,
    only_other,
)
from autodist.kernels.communicate.results import Results
from autodist.kernels.context import Context
from autodist.placement.group import Group


@dataclass(frozen=True)
class Transfer:
    """A tensor that `source` has and `reader` needs.

    Attributes:
        name: name of the tensor in the captured graph.
        level: the update round in which it is computed.
        round: the number of transfers that precede it. Tensors of one message are sent once all of them are computed.
            So tensors of different rounds never share one: two owners would wait for each other.
    """

    source: int
    reader: int
    name: str
    level: int
    round: int = 0


@dataclass(frozen=True)
class WorkerPart:
    """One worker's share of the part that runs once.

    Attributes:
        step: the step.
        private: for a node that depends on gradients or on reads of variables, the workers that have these: owners, and
            `EVERYWHERE` for values that are the same everywhere. A node whose inputs a single owner has runs only
            there. A node with inputs of several owners runs on each worker that needs it, from tensors that the owners
            send.
        computed: those nodes that this worker runs.
        runs: for each node of `private`, the workers that run it.
        transfers: the tensors that this worker sends and receives, in the same order on both sides.
        me: this worker.
        brought: shape and dtype of the gradients that were sent to owners, by the tensor that stands for them.
    """

    step: ReplicatedStep
    private: Mapping[str, Owners]
    transfers: tuple[Transfer, ...]
    me: int
    brought: Mapping[str, tf.TensorSpec]
    computed: frozenset[str]
    runs: Mapping[str, Workers]

    @classmethod
    def find(
        cls,
        step: ReplicatedStep,
        context: Context,
        effects: Mapping[str, Effect],
        owner: Mapping[str, int],
        reductions: Sequence[PendingReduction],
    ) -> WorkerPart:
        """Analyzes the graph after gradients were sent to their owners.

        Args:
            step: the step before that; the results of its pending reductions stand for the gradients on every worker.
            owner: the owner of each owned variable, by handle.
        """
        brought = {t: step.owners[j.variable or ""] for j in reductions for t in j.result}
        private = _find_private(step, effects, owner, _holders(step, brought))
        assignment = assign_nodes(step, effects, owner, private, brought, context)
        me = context.worker
        transfers = [
            Transfer(source, reader, name, _level(step, name))
            for name, source, readers in assignment.tensors
            for reader in (readers if source == me else [me] if me in readers else [])
        ]
        transfers.sort(key=lambda t: (t.reader, t.name))
        runs = {name: assignment.runs.get(name, 0) for name in private}
        transferred = frozenset(name for name, _, _ in assignment.tensors)
        specs = {t: _spec_of_result(j, t) for j in reductions for t in j.result}
        return cls(step, private, _in_rounds(step, transfers, transferred), me, specs, assignment.by(me), runs)

    def needed(self) -> set[str]:
        """Returns the nodes whose values this worker uses, in either part of the step.

        The optimizer's reads of slots belong to the part that replicas compute, since they need no gradient; yet the
        owner alone uses them.
        """
        step, data = self.step, self.step.graph_index.data
        local = [t for pending in step.reductions for t in (*pending.local, *filter(None, [pending.weight]))]
        roots = [*map(node_of, [*local, *step.outputs]), *step.targets, *self.computed]
        return reach(
            (r for r in roots if not self.is_others(r)), lambda n: (s for s in data[n] if not self.is_others(s))
        )

    def exchange_boundary(self, results: Results, context: Context) -> None:
        """Sends the tensors that other workers need from this one, and receives those that it needs."""
        groups: dict[Transfer, list[str]] = {}
        for t in self.transfers:
            groups.setdefault(replace(t, name=""), []).append(t.name)
        for together, names in groups.items():
            self._exchange(results, context, together, names)

    def _exchange(self, results: Results, context: Context, together: Transfer, names: list[str]) -> None:
        source, reader = together.source, together.reader
        place = f"{together.level}/{together.round}"
        specs = [self.brought.get(name) or self.step.spec_of(name) for name in names]
        key = f"update_input/{place}/{key_of_tensors(names, specs)}"
        readers = [self._own_readers(results.editor, name) for name in names]
        with subgraph(results.editor, f"update_input/{source}/{reader}/{place}") as f, tf.device(context.cpu(self.me)):
            exchange = Communicator(f, context, key, Group.of_workers([source, reader]))
            if self.me == source:
                values = [
                    f.input(results.now(name), spec.dtype, spec.shape) for name, spec in zip(names, specs, strict=True)
                ]
                exchange.send(reader, "needed", values)
                received = []
            else:
                received = exchange.receive(source, "needed", specs)
        for name, value, consumers in zip(names, received, readers, strict=False):
            results.replace(name, f.name(value), consumers)
        results.editor.run(exchange.effects)

    def _own_readers(self, editor: GraphEditor, name: str) -> list[str]:
        return [c for c in editor.consumers(node_of(name)) if not self.is_others(c)]

    def is_others(self, name: str) -> bool:
        """Returns True if another worker alone computes a node."""
        return only_other(self.private, name, self.me) is not None

    def drop_control(self, editor: GraphEditor) -> None:
        """Removes control dependencies of this worker's nodes on nodes that other workers run."""
        for node in editor:
            if self.is_others(node.name):
                continue
            lost = [i for i in node.input if is_control(i) and self.is_others(node_of(i))]
            if lost:
                editor.set_inputs(node.name, [i for i in node.input if i not in lost])


def _in_rounds(
    step: ReplicatedStep, transfers: Sequence[Transfer], transferred: Collection[str]
) -> tuple[Transfer, ...]:
    """Returns the transfers with their rounds, which depend on all tensors sent between workers."""
    if not transfers:
        return ()
    rounds = count_rounds(step.graph_index, dict.fromkeys(transferred, 0))
    return tuple(replace(t, round=rounds[node_of(t.name)]) for t in transfers)


def _level(step: ReplicatedStep, name: str) -> int:
    return step.stages.level_of(node_of(name))


def _spec_of_result(pending: PendingReduction, result: str) -> tf.TensorSpec:
    is_indices = pending.is_sparse and result == pending.result[0]
    return tf.TensorSpec([None], pending.index_dtype) if is_indices else tf.TensorSpec(pending.shape, pending.dtype)


def _holders(step: ReplicatedStep, brought: Mapping[str, int]) -> dict[str, int]:
    """Maps the tensors that the part that runs once reads of each gradient to the worker that has the gradient."""
    return {**dict.fromkeys(step.reduced_gradients, EVERYWHERE), **brought}


def _find_private(
    step: ReplicatedStep, effects: Mapping[str, Effect], owner: Mapping[str, int], brought: Mapping[str, int]
) -> dict[str, Owners]:
    nodes = step.graph_index.nodes
    private: dict[str, Owners] = {}
    for name in once(step):
        if name not in nodes:
            continue
        found = NOBODY
        for i in nodes[name].input:
            if not is_control(i):
                found |= private.get(node_of(i), NOBODY)
                found |= {brought[tensor(i)]} if tensor(i) in brought else NOBODY
        effect = effects.get(name)
        if effect:
            found |= {owner.get(h, EVERYWHERE) for h in effect.reads}
            if effect.writes & owner.keys():
                found = frozenset(owner[h] for h in effect.writes if h in owner)
            elif effect.writes:
                found |= {EVERYWHERE}  # each worker writes its own copy, whoever has the inputs of the value
        if found:
            private[name] = found
    return private
