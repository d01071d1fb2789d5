"""StandingProgram: nodes of a step as a program that runs in parallel with the step and waits for it in advance."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import tensorflow as tf

from autodist.graph.editor import GraphEditor, NodeDef
from autodist.graph.effects import NO_EFFECT
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.step import ReplicatedStep
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import subgraph
from autodist.graph.walks import reach, topological
from autodist.kernels.communicate.background_program import copy_nodes
from autodist.kernels.communicate.communicator import CAPACITY, known_shapes
from autodist.kernels.communicate.packed import like_packed, packed, unpacked
from autodist.kernels.context import Context
from autodist.kernels.replica_dependent import sources_of_replicas

_PREFIX = "autodist/standing/"


class StandingProgram:
    """Copies nodes of a step into a program of the same worker, which may have nodes on other workers.

    Each run of the program belongs to one step. It begins before the step, so the requests between the workers are made
    before there are tensors. The step and the program exchange tensors through queues of the worker. These have no
    shared name: each program has its own.

    Attributes:
        copies: the program's node for each copied node of the step.
        effects: the nodes that must run.
        begin: the node that completes when the step has sent its first message.
    """

    def __init__(self, editor: StepEditor[ReplicatedStep], context: Context) -> None:
        self._editor, self._cpu = editor, context.cpu(context.worker)
        self._replacements: dict[str, str] = {}
        self.copies: dict[str, str] = {}
        self.effects: list[str] = []
        self.begin = ""

    def send(self, key: str, names: Sequence[str], after: Iterable[str] = (), device: str | None = None) -> str:
        """Sends tensors of the step to the program after nodes of the step; the first message begins the run.

        Args:
            key: of the message.
            names: of the tensors.
            after: nodes of the step.
            device: the device that unpacks them; None: this worker's CPU.

        Returns:
            The node of the program that takes the message.
        """
        put, take, taken = self._message(
            key, names, [self._editor.spec(name) for name in names], after,
            [self.begin] if self.begin else [], self._cpu, device or self._cpu,
        )  # fmt: skip
        self._editor.run([put])
        self.effects.append(take)
        self.begin = self.begin or take
        self._replacements.update(zip(map(tensor, names), taken, strict=True))
        return take

    def send_back(
        self, key: str, names: Sequence[str], after: Iterable[str] = (), device: str | None = None
    ) -> tuple[str, list[str]]:
        """Sends tensors of copied nodes to the step after nodes of the program.

        Args:
            key: of the message.
            names: of the tensors of the step that the copies stand for.
            after: nodes of the program.
            device: the device that packs them; None: this worker's CPU.

        Returns:
            The node of the step that takes the message, and its tensors there.
        """
        specs = [self._editor.spec(name) for name in names]
        put, take, taken = self._message(
            key, [self.now(name) for name in names], specs, after, (), device or self._cpu, self._cpu
        )
        self.effects.append(put)
        self._editor.run([take])
        return take, taken

    def copy(self, nodes: Collection[str], waits: Mapping[str, Iterable[str]]) -> None:
        """Copies nodes, whose other inputs have been sent; a copy also waits for nodes of the program in `waits`."""
        self.copies = copy_nodes(self._editor, nodes, _PREFIX, self.now)
        for name, before in waits.items():
            self._editor.add_control(self.copies[name], before)

    def now(self, name: str) -> str:
        """Returns the tensor of the program that stands for a tensor of the step."""
        node = node_of(name)
        return self._replacements.get(tensor(name)) or name.replace(node, self.copies.get(node, node), 1)

    def _message(
        self,
        key: str,
        names: Sequence[str],
        specs: Sequence[tf.TensorSpec],
        after: Iterable[str],
        begin: Iterable[str],
        pack_at: str,
        unpack_at: str,
    ) -> tuple[str, str, list[str]]:
        """Adds a queue for a message; returns the node that sends, the one that receives, and the received tensors."""
        like = like_packed(specs) or [tf.TensorSpec([], tf.bool)]
        dtypes = [t.dtype for t in like]
        with subgraph(self._editor, f"standing/{key}/send") as f:
            with tf.device(pack_at):
                values = [f.input(name, spec.dtype, spec.shape) for name, spec in zip(names, specs, strict=True)]
                message = packed(values) or [tf.constant(True)]
            with tf.device(self._cpu):
                queue = tf.queue.FIFOQueue(CAPACITY, dtypes, known_shapes(like))
                with tf.control_dependencies([f.after(after)]):
                    put = f.name(queue.enqueue(message))
            handle = f.name(queue.queue_ref)
        with subgraph(self._editor, f"standing/{key}/receive") as f:
            with tf.device(self._cpu), tf.control_dependencies([f.after(begin)]):
                found = tf.raw_ops.QueueDequeueV2(handle=f.input(handle, tf.resource), component_types=dtypes)
                take = f.name(found[0].op)
            for t, spec in zip(found, like, strict=True):
                t.set_shape(spec.shape)
            with tf.device(unpack_at):
                taken = [f.name(t) for t in unpacked(found, specs)] if specs else []
        return put, take, taken


@dataclass(frozen=True)
class MovedNodes:
    """Nodes of a step that a program in parallel with it runs, and the edges between the two.

    Attributes:
        names: the nodes, in topological order.
        updates: those of them that writes depend on, and the writes.
        needed: the tensors of the step that they read, except gradients.
        orders: for a moved node, the nodes of the step that it waits for, as far as these have effects.
        returned: the tensors of moved nodes that the step reads, each with the update round after which it is there.
        late: the nodes that wait for an update.
    """

    names: Sequence[str]
    updates: Collection[str]
    needed: Collection[str]
    orders: Mapping[str, Collection[str]]
    returned: Mapping[str, int]
    late: Collection[str]


class FindMovedNodes:
    """Finds the nodes to move; the step keeps what depends on a batch, is fed, or reads variables of each worker.

    Args:
        step: the step.
        editor: its editor, with the gradients.
        kept: the owner of each asynchronous variable, by handle.
        gradients: the node of each gradient, with its update round.
        writes: the writes of asynchronous variables.
    """

    def __init__(
        self,
        step: ReplicatedStep,
        editor: GraphEditor,
        kept: Mapping[str, int],
        gradients: Mapping[str, int],
        writes: Sequence[str],
    ) -> None:
        self._step, self._editor, self._kept = step, editor, kept
        self._gradients, self._writes = gradients, writes
        self._effects = step.graph_index.effects
        self._names: set[str] = set()
        self._needed: dict[str, None] = {}

    def run(self) -> MovedNodes:
        level_of = self._step.stages.level_of
        for level in sorted({level_of(write) for write in self._writes}):
            computed = self._editor.ancestors(name for name, of in self._gradients.items() if of <= level)
            self._collect((write for write in self._writes if level_of(write) == level), computed)
        updates = frozenset(self._names)
        reads = [name for name in self._effects if self._reads_written(name) and self._read_outside(name)]
        self._names.update(reads)
        returned = {f"{name}:0": max(map(level_of, self._written_before(name))) for name in reads}
        returned |= {t: level_of(write) for write in self._writes for t in self._read_outside(write)}
        names = [node.name for node in self._order if node.name in self._names]
        orders = {name: tuple(filter(self._has_effects.__contains__, self._waits(name))) for name in names}
        late = reach(self._writes, self._editor.consumers)
        return MovedNodes(names, updates, tuple(self._needed), orders, returned, late)

    def _collect(self, roots: Iterable[str], computed: Collection[str]) -> None:
        front = list(roots)
        while front:
            name = front.pop()
            if name in self._names:
                continue
            self._names.add(name)
            for i in self._data(name):
                source = node_of(i)
                if source in self._gradients or source in self._names or self._editor[source].op == "VarHandleOp":
                    continue
                if self._is_of_step(source, computed):
                    self._needed[tensor(i)] = None
                else:
                    front.append(source)

    def _is_of_step(self, name: str, computed: Collection[str]) -> bool:
        """Returns True if the step computes a node: the gradients or the batch decide about its value."""
        reads = self._effects.get(name, NO_EFFECT).reads
        is_computed = name in computed and any(self._data(name))
        is_read_here = bool(reads) and not reads & self._kept.keys()
        return is_computed or is_read_here or name in self._varying or self._editor[name].op.startswith("Placeholder")

    @cached_property
    def _varying(self) -> set[str]:
        """The nodes that depend on this worker's batch other than through gradients."""

        def onward(name: str) -> list[str]:
            consumers = self._editor.consumers(name) - self._gradients.keys()
            return [c for c in consumers if any(node_of(i) == name for i in self._data(c))]

        return reach(sources_of_replicas(self._step, self._step.graph_index), onward)

    def _reads_written(self, name: str) -> bool:
        """Returns True for a read of a written variable that waits for moved nodes alone."""
        if name not in self._editor or self._editor[name].op != "ReadVariableOp":
            return False
        return bool(self._written_before(name)) and not self._waits(name)

    def _written_before(self, name: str) -> list[str]:
        """Returns the writes that a node waits for."""
        sources = {node_of(i) for i in self._editor[name].input if is_control(i)}
        return [write for write in self._writes if write in sources]

    def _read_outside(self, name: str) -> list[str]:
        """Returns the outputs of a node that the step reads."""
        consumers = [c for c in self._editor.consumers(name) if c not in self._names]
        read = [tensor(i) for c in consumers for i in self._data(c) if node_of(i) == name]
        return list(dict.fromkeys([*read, *(t for t in self._step.outputs if node_of(t) == name)]))

    def _data(self, name: str) -> list[str]:
        return [i for i in self._editor[name].input if not is_control(i)]

    def _waits(self, name: str) -> list[str]:
        sources = (node_of(i) for i in self._editor[name].input if is_control(i))
        return [source for source in sources if source not in self._names]

    @cached_property
    def _order(self) -> list[NodeDef]:
        return topological(self._editor.to_graph_def())

    @cached_property
    def _has_effects(self) -> set[str]:
        """The nodes of the step that have effects, or wait for such nodes other than through moved ones."""
        found: set[str] = set()
        for node in self._order:
            sources = (node_of(i) for i in node.input)
            if node.name in self._effects or any(s in found and s not in self._names for s in sources):
                found.add(node.name)
        return found
