"""BackgroundProgram: the updates of stale variables and of their cached copies, in parallel with the steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import tensorflow as tf

from autodist.errors import StrategyError
from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.effects import NO_EFFECT, Effect
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.parts import PendingReduction
from autodist.graph.step import ReplicatedStep
from autodist.graph.subgraph import subgraph
from autodist.graph.waiting import nearest_before
from autodist.kernels.communicate.buckets import key_of_tensors
from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.communicate.completion_signals import WriteGroup
from autodist.kernels.communicate.value_messages import ValueMessages
from autodist.kernels.communicate.worker_part import Transfer, WorkerPart
from autodist.kernels.context import Context
from autodist.placement.group import Group

_PREFIX = "autodist/background/"


class BackgroundProgram:
    """Copies the updates of this worker's variables into a background program, which shares no run with the steps.

    Values that an update needs of its step (a step count, a learning rate) come through a queue from the step of its
    gradients. Values that updates of several owners share (a global norm) are sent between the owners. The new values
    are sent to the background programs of all workers, which refresh the cached copies there.

    Attributes:
        effects: the nodes that must run.
    """

    def __init__(
        self,
        step: ReplicatedStep,
        context: Context,
        editor: GraphEditor,
        effects: Mapping[str, Effect],
        owner: Mapping[str, int],
        reductions: Sequence[PendingReduction],
    ) -> None:
        self.step, self.context, self.editor, self.owner = step, context, editor, owner
        self.touches, self.reductions = effects, reductions
        self.effects: list[str] = []
        self._replacements: dict[str, str] = {}
        self._copies: dict[str, str] = {}
        self._capacity = 0
        self._values = ValueMessages(step, context, editor, owner, lambda write: self._copies[write])

    def register(self, tensors: Mapping[str, str], effects: Iterable[str]) -> None:
        """Registers the background program's tensors for tensors of the step, and nodes that must run for them."""
        self._replacements.update(tensors)
        self.effects += effects

    def build(self, ahead: int, targets: Sequence[str]) -> list[str]:
        """Builds the updates; returns the nodes that the step must run for them.

        Args:
            ahead: the number of steps that may have ended before the update of the first of them runs.
            targets: nodes that depend on gradients and must run, mostly checks.
        """
        self._capacity = ahead + 1
        part = WorkerPart.find(
            replace(self.step, outputs=(), targets=tuple(targets)),
            self.context, self.touches, self.owner, self.reductions,
        )  # fmt: skip
        self._receive(part)
        readers = set(self.owner.values())
        sent = [t for t in part.transfers if t.source == self.context.worker and t.reader in readers]
        roots = [n for n, e in self.touches.items() if any(self._is_mine(h) for h in e.writes)]
        roots += [name for name in targets if name in part.computed and name not in roots]
        members, needed = self._collect([*roots, *(node_of(t.name) for t in sent if t.name not in self._replacements)])
        pushed = self._send_from_step(sorted(needed))
        self._copies = copy_nodes(self.editor, members, _PREFIX, self._now)
        self.effects += [self._copies[name] for name in roots]
        self._send(part, sent)
        return pushed

    def complete(self, group: WriteGroup, capacity: int) -> None:
        """Exchanges the written values of a group of writes and refreshes the cached copies; then signals the step."""
        me = self.context.worker
        with subgraph(self.editor, f"background_{group.key}") as f, self._local_cpu():
            exchange = Communicator(f, self.context, group.key, group.readers, capacity)
            if group.owner == me:
                done = [*(self._copies[w] for w in group.writes), *self._values.send(f, exchange, group)]
            else:
                done = [*self._values.receive(f, exchange, group), *exchange.effects]
            exchange.send(me, "done", [tf.constant(True)], done)
        self.effects += exchange.effects

    def _is_mine(self, handle: str) -> bool:
        return self.owner.get(handle) == self.context.worker

    def _local_cpu(self) -> tf.device:
        return tf.device(self.context.cpu(self.context.worker))

    # -- inputs of the updates -------------------------------------------------------------------------------------

    def _collect(self, roots: Iterable[str]) -> tuple[set[str], set[str]]:
        """Returns the nodes to copy, and the tensors that the step has to send."""
        members: set[str] = set()
        needed: set[str] = set()
        front = list(roots)
        while front:
            name = front.pop()
            if name in members:
                continue
            members.add(name)
            self._refuse_reads_in_bodies(name)
            for i in self.editor[name].input:
                source = self.editor[node_of(i)]
                if is_control(i) or tensor(i) in self._replacements or source.op == "VarHandleOp":
                    continue
                if self._is_of_step(source):
                    needed.add(tensor(i))
                else:
                    front.append(source.name)
        return members, needed

    def _refuse_reads_in_bodies(self, name: str) -> None:
        """Refuses operations with a body (an `If`) that read variables which the step writes."""
        for handle in sorted(self.touches.get(name, NO_EFFECT).reads):
            if not self._is_mine(handle) and any(handle in effect.writes for effect in self.touches.values()):
                raise StrategyError(
                    f"{self.step.by_handle[handle].name} is written by the step and read within {name} "
                    f"({self.editor[name].op}), which updates a variable with staleness some steps later. Set "
                    "staleness: 0, or remove updates under a condition from the optimizer (gradient accumulation)."
                )

    def _is_of_step(self, node: NodeDef) -> bool:
        """Returns True if only the step has a node's value: it is fed, or read from a variable that may change."""
        if node.op.startswith("Placeholder"):
            return True
        effect = self.touches.get(node.name, NO_EFFECT)
        return bool(effect.reads) and not any(self._is_mine(h) for h in effect.reads | effect.writes)

    def _send_from_step(self, names: Sequence[str]) -> list[str]:
        """Sends tensors from the step to its update; returns the nodes that the step must run for it."""
        if not names:
            return []
        specs = [self._spec(name) for name in names]
        key, me = f"received/{key_of_tensors(names, specs)}", self.context.worker
        with subgraph(self.editor, f"{key}/send") as f, self._local_cpu():
            values = [f.input(name, spec.dtype, spec.shape) for name, spec in zip(names, specs, strict=True)]
            exchange = Communicator(f, self.context, key, Group.of_workers([me]), self._capacity)
            exchange.send(me, "needed", values)
        self._receive_tensors(key, me, names, specs)
        return exchange.effects

    def _receive_tensors(self, key: str, source: int, names: Sequence[str], specs: Sequence[tf.TensorSpec]) -> None:
        with subgraph(self.editor, f"{key}/{source}/receive") as f, self._local_cpu():
            exchange = Communicator(f, self.context, key, self._pair(source), self._capacity)
            got = exchange.receive(source, "needed", specs)
        self.register(dict(zip(names, map(f.name, got), strict=True)), exchange.effects)

    def _pair(self, other: int) -> Group:
        return Group.of_workers(dict.fromkeys((self.context.worker, other)))

    def _spec(self, name: str) -> tf.TensorSpec:
        node = self.editor[node_of(name)]
        if "dtype" not in node.attr:
            raise StrategyError(
                f"an update with staleness needs {name} of its step, from an operation ({node.op}) whose value cannot "
                "be sent to it. Set staleness: 0, or read the variable as a whole before using it."
            )
        dtype = tf.as_dtype(node.attr["dtype"].type)
        if node.op == "ReadVariableOp":
            return tf.TensorSpec(self.step.by_handle[node_of(node.input[0])].shape, dtype)
        return tf.TensorSpec(None, dtype)

    # -- between owners --------------------------------------------------------------------------------------------

    def _receive(self, part: WorkerPart) -> None:
        incoming = [t for t in part.transfers if t.reader == self.context.worker]
        for source, names in _by(incoming, lambda t: t.source).items():
            specs = [self._spec_between(part, name) for name in names]
            self._receive_tensors(_boundary_key(names, specs), source, names, specs)

    def _send(self, part: WorkerPart, sent: Sequence[Transfer]) -> None:
        for reader, names in _by(sent, lambda t: t.reader).items():
            specs = [self._spec_between(part, name) for name in names]
            key = _boundary_key(names, specs)
            with subgraph(self.editor, f"{key}/{reader}/send") as f, self._local_cpu():
                exchange = Communicator(f, self.context, key, self._pair(reader), self._capacity)
                values = [f.input(self._now(n), s.dtype, s.shape) for n, s in zip(names, specs, strict=True)]
                exchange.send(reader, "needed", values)
            self.effects += exchange.effects

    def _spec_between(self, part: WorkerPart, name: str) -> tf.TensorSpec:
        return part.brought.get(name) or self.step.spec_of(name)

    def _now(self, name: str) -> str:
        """Returns the tensor of the background program that stands for a tensor of the step."""
        node = node_of(name)
        return self._replacements.get(tensor(name)) or name.replace(node, self._copies.get(node, node), 1)


def copy_nodes(editor: GraphEditor, nodes: Collection[str], prefix: str, now: Callable[[str], str]) -> dict[str, str]:
    """Copies nodes of a step into a background program; copies wait for each other as the nodes do.

    Args:
        editor: the editor of the step.
        nodes: their names.
        prefix: of the copies' names.
        now: returns the tensor of the program that stands for an input which is not among the nodes.

    Returns:
        The copy of each node.
    """
    kept = set(nodes)
    copies = editor.clone(sorted(kept), prefix, lambda i: i if is_control(i) else now(i))
    found: dict[str, list[str]] = {}
    for name in sorted(kept):
        waits: dict[str, None] = {}
        for source in (node_of(i) for i in editor[name].input if is_control(i)):
            if source not in found:
                before = {source} if source in kept else nearest_before(editor, source, kept)
                found[source] = sorted(copies[b] for b in before)
            waits.update(dict.fromkeys(found[source]))
        data = [i for i in editor[copies[name]].input if not is_control(i)]
        editor.set_inputs(copies[name], [*data, *(f"^{w}" for w in waits)])
    return copies


def _by(transfers: Iterable[Transfer], worker_of: Callable[[Transfer], int]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for t in transfers:
        found.setdefault(worker_of(t), []).append(t.name)
    return found


def _boundary_key(names: Sequence[str], specs: Sequence[tf.TensorSpec]) -> str:
    return f"between_owners/{key_of_tensors(names, specs)}"
