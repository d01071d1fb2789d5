"""Work: the state of a partitioning: the edited graph, and the pieces of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from autodist.graph.editor import NodeDef
from autodist.graph.effects import Effect
from autodist.graph.names import as_input, data_inputs, is_control, node_of, tensor
from autodist.graph.ops import OpView
from autodist.graph.parts import Variable
from autodist.graph.step import PlacedStep
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import SubgraphBuilder
from autodist.kernels.place.partition.layouts import Alike, Along, Layout
from autodist.layout.folding import Constants
from autodist.placement.partitioning import Partitioning, shard_name

Build = Callable[[SubgraphBuilder], tf.Tensor]


@dataclass(frozen=True)
class PartitionedVariable:
    """A variable, its partitioning, and its shards as variables."""

    variable: Variable
    cut: Partitioning
    shards: tuple[Variable, ...]

    @classmethod
    def of(cls, variable: Variable, cut: Partitioning) -> PartitionedVariable:
        shards = tuple(
            replace(
                variable, name=shard_name(variable.name, k), handle=shard_name(variable.handle, k),
                shape=tuple(n or 0 for n in cut.shape(variable.shape, k)),
            )
            for k in range(len(cut.sizes))
        )  # fmt: skip
        return cls(variable, cut, shards)

    def within_rows(self, rank: int | None) -> Partitioning:
        """Returns the partitioning of rows of a variable that is partitioned along another axis than the first.

        Args:
            rank: rank of the tensor of rows; None if unknown: the axis is then counted from the end.
        """
        from_end = self.cut.axis - len(self.variable.shape)
        return Partitioning(from_end if rank is None else rank + from_end, self.cut.sizes)


@dataclass(frozen=True)
class _Pieces:
    layout: Layout
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Replacement:
    names: tuple[str, ...]
    by_shard: bool


class _NodeView(OpView):
    def __init__(self, work: Work, node: NodeDef) -> None:
        self.node, self.inputs, self._work = node, data_inputs(node), work

    def shape(self, index: int) -> tf.TensorShape:
        return self._work.spec(self.inputs[index]).shape

    def constant(self, index: int) -> np.ndarray | None:
        return self._work.constant(self.inputs[index])


class Work:
    """The state that the rules of `PartitionVariables` read and change.

    A node keeps its name if its whole value is still needed; its copies for the shards are named `name/shard_k`. Unused
    nodes are pruned after all rules have been applied.

    Attributes:
        step: the original step.
        editor: the editor of its graph.
        effects: the reads and writes of each of its nodes.
        variables: the partitioned variables, by handle.
        copies: unpartitioned copies of variables, for nodes that take a handle and cannot use shards.
        written_whole: by name, the partitioned variables that are written as a whole, with the op.
        label: of new nodes.
    """

    def __init__(
        self, step: PlacedStep, editor: StepEditor[PlacedStep], effects: Mapping[str, Effect], label: str = "partition"
    ) -> None:
        self.step, self.editor, self.effects, self.label = step, editor, effects, label
        self.variables = {
            step.by_name[name].handle: PartitionedVariable.of(step.by_name[name], cut)
            for name, cut in step.partitionings.items()
            if name in step.by_name
        }
        self.copies: list[Variable] = []
        self.written_whole: dict[str, str] = {}
        self._constants = Constants(lambda name: editor[node_of(name)], lambda name: self.spec(tensor(name)).shape)
        self._captured = {node.name for node in step.graph_def.node}
        self._pieces: dict[str, _Pieces] = {}
        self._split: dict[tuple[str, Partitioning], tuple[str, ...]] = {}
        self._sliced_from: dict[str, str] = {}
        self._replacements: dict[str, _Replacement] = {}
        self._removed: set[str] = set()
        self._later: list[tuple[str, Build]] = []
        self._subgraphs = 0
        self._log_lines: list[str] = []

    # -- tensors ---------------------------------------------------------------------------------------------------

    def spec(self, name: str) -> tf.TensorSpec:
        """Returns the shape and dtype of an original or new tensor."""
        return self.editor.spec(name)

    def rank(self, name: str) -> int | None:
        return self.spec(name).shape.rank

    def constant(self, name: str) -> np.ndarray | None:
        """Returns the value of a tensor that depends only on constants, or None."""
        return self._constants.value(name)

    def view(self, node: NodeDef) -> OpView:
        """Returns a node with the static knowledge of its operands."""
        return _NodeView(self, node)

    def variable(self, name: str) -> PartitionedVariable | None:
        """Returns the partitioned variable whose handle a tensor is, or None."""
        node = self.editor[node_of(name)]
        while node.op == "Identity":
            node = self.editor[node_of(node.input[0])]
        return self.variables.get(node.name)

    # -- pieces ----------------------------------------------------------------------------------------------------

    def layout(self, name: str) -> Layout | None:
        """Returns the layout of a tensor's pieces; None if it has none."""
        return self._pieces[name].layout if name in self._pieces else None

    def pieces(self, name: str) -> tuple[str, ...]:
        """Returns the pieces of a tensor that has a layout."""
        return self._pieces[name].names

    def register(self, name: str, layout: Layout, pieces: Sequence[str]) -> None:
        """Registers the pieces of a tensor."""
        self._pieces[name] = _Pieces(layout, tuple(map(tensor, pieces)))
        if isinstance(layout, Along | Alike):
            self._sliced_from.update((one, name) for one in self.pieces(name) if not self.is_captured(one))
        spec = self.spec(name)
        for k, piece in enumerate(pieces):
            shape = list(spec.shape) if spec.shape.rank is not None else None
            if shape is not None and isinstance(layout, Along):
                shape = list(layout.cut.shape(shape, k))
            elif shape and not isinstance(layout, Alike):
                shape[0] = None
            self.editor.note({tensor(piece): tf.TensorSpec(shape, spec.dtype)})

    def along(self, name: str, cut: Partitioning) -> tuple[str, ...]:
        """Returns the pieces of a tensor along an axis: existing ones, or slices of the whole tensor."""
        if self.layout(name) == Along(cut):
            return self.pieces(name)
        if (name, cut) not in self._split:
            with self.subgraph("split") as f:
                made = tf.split(f.input(name), list(cut.sizes), cut.axis)
            self._split[name, cut] = tuple(map(f.name, made))
            self._sliced_from.update(dict.fromkeys(self._split[name, cut], name))
        return self._split[name, cut]

    def alike(self, name: str, count: int) -> tuple[str, ...]:
        """Returns the whole tensor once for each of `count` shards."""
        return self.pieces(name) if isinstance(self.layout(name), Alike) else (name,) * count

    def clones(self, node: NodeDef, inputs: Sequence[Iterable[str]]) -> tuple[str, ...]:
        """Copies a node for each shard, with other data inputs; returns the names of the copies."""
        return tuple(self._clone(node, shard, len(inputs), one) for shard, one in enumerate(inputs))

    def _clone(self, node: NodeDef, shard: int, count: int, inputs: Iterable[str]) -> str:
        copy = NodeDef()
        copy.CopyFrom(node)
        copy.name = shard_name(node.name, shard)
        copy.attr.pop("_class", None)
        before = [c for i in node.input if is_control(i) for c in self._control(i, shard, count)]
        copy.input[:] = [*map(as_input, inputs), *dict.fromkeys(before)]
        self.editor.add(copy)
        for index in range(len(op_def_registry.get(node.op).output_arg)):
            self.editor.note({f"{copy.name}:{index}": self.spec(f"{node.name}:{index}")})
        return copy.name

    def _control(self, spelling: str, shard: int, count: int) -> list[str]:
        """Returns the control inputs of a node's copy for one shard that replace one control input of the node.

        If the source has copies for as many shards, the copy for the same shard is enough. Later nodes for this shard
        wait for this copy in turn, and later nodes for the whole wait for all copies.
        """
        replacement = self._replacements.get(node_of(spelling))
        if replacement is None:
            return [spelling]
        is_same = replacement.by_shard and len(replacement.names) == count
        return [f"^{name}" for name in (replacement.names[shard : shard + 1] if is_same else replacement.names)]

    def waits(self, node: NodeDef) -> list[str]:
        """Returns the nodes that a node waits for, with copies in place of nodes that have any."""
        return [node_of(c) for i in node.input if is_control(i) for c in self._control(i, shard=0, count=0)]

    def sliced_from(self, name: str) -> str:
        """Returns the tensor that a slice or a piece is part of, or the tensor itself."""
        return self._sliced_from.get(name, name)

    def is_captured(self, name: str) -> bool:
        """Returns True if a tensor belongs to the original step."""
        return node_of(name) in self._captured

    # -- changes ---------------------------------------------------------------------------------------------------

    @contextmanager
    def subgraph(self, what: str) -> Iterator[SubgraphBuilder]:
        """Adds nodes (see `autodist.graph.subgraph`), and registers the shapes and dtypes of their tensors."""
        self._subgraphs += 1
        with self.editor.subgraph(f"{self.label}/{what}/{self._subgraphs}") as f:
            yield f

    def order_after(self, node: str, names: Sequence[str], *, removed: bool = False, by_shard: bool = True) -> None:
        """Orders successors of a node in the original step after other nodes instead.

        Args:
            node: a node of the original step.
            names: the nodes to wait for.
            removed: True if the node is removed.
            by_shard: True if there is one for each shard, so that a successor's copy for a shard waits only for that
                one.
        """
        self._replacements[node] = _Replacement(tuple(names), by_shard)
        if removed:
            self._removed.add(node)

    def becomes(self, node: str, build: Build) -> None:
        """Replaces a node's only output by another value, which is built after all rules have been applied."""
        self._later.append((node, build))

    def finish(self) -> None:
        """Builds the values deferred by `becomes` and applies the new order."""
        with self.subgraph("whole") as f:
            made = [(node, build(f)) for node, build in self._later]
        for node, value in made:
            self.editor.pass_on(node, f.name(value), value.dtype)
        for node, replacement in self._replacements.items():
            # Copies and nodes added for them already have their final control inputs.
            self.editor.replace_control(node, replacement.names, filter(self.is_captured, self.editor.consumers(node)))
        self.editor.replace_targets(
            {node: tuple(replacement.names) for node, replacement in self._replacements.items()}
        )
        self.editor.remove(self._removed)

    def log(self, line: str) -> None:
        """Adds a log line about an op that does not run on pieces."""
        self._log_lines.append(line)

    def put_together(self, once: Collection[str]) -> Iterator[str]:
        """Yields log lines about tensors that nodes which run once read as a whole, at the cost of concatenation."""
        yield from self._log_lines
        for name in self._pieces:
            readers = self.editor.consumers(node_of(name)) if node_of(name) in self.editor else frozenset()
            for reader in sorted(readers & set(once) - self._replacements.keys()):
                op = self.editor[reader].op
                yield f"{name} is partitioned, and is concatenated for {op} ({reader}), which does not run on shards"
