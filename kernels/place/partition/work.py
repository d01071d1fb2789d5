"""Work: a graph in which variables are being cut, and the pieces that its tensors have so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from autodist.graph.editor import NodeDef
from autodist.graph.effects import Effect
from autodist.graph.names import as_input, is_control, node_of, tensor
from autodist.graph.parts import Variable
from autodist.graph.placement import Partitioning, shard_name
from autodist.graph.propagation.folding import Constants
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import SubgraphBuilder
from autodist.kernels.place.partition.layouts import Alike, Along, Layout

Build = Callable[[SubgraphBuilder], tf.Tensor]


@dataclass(frozen=True)
class PartitionedVariable:
    """A variable, how it is cut, and its shards as variables."""

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
        """How rows are cut, where the variable is not cut along its first axis.

        Args:
            rank: of the tensor of rows; None: unknown, and the axis is counted from the end.
        """
        from_end = self.cut.axis - len(self.variable.shape)
        return Partitioning(from_end if rank is None else rank + from_end, self.cut.sizes)


@dataclass(frozen=True)
class _Pieces:
    layout: Layout
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Instead:
    names: tuple[str, ...]
    by_shard: bool


class Work:
    """What the rules of `Partition` read and change.

    A node keeps its name where its whole value is still asked for; its copies for each shard stand under
    `name/shard_k`. Whatever nothing asks for any more is pruned when all rules were applied.

    Attributes:
        item: the step before.
        editor: of its graph.
        effects: what each of its nodes reads and writes.
        variables: those that are cut, by handle.
        copies: variables that hold the whole of a cut one, for what takes a handle.
        written_whole: by name, the cut ones whose whole is written, and by which op.
    """

    def __init__(self, item: Step, editor: StepEditor, effects: Mapping[str, Effect]) -> None:
        self.item, self.editor, self.effects = item, editor, effects
        self.variables = {
            item.by_name[name].handle: PartitionedVariable.of(item.by_name[name], cut)
            for name, cut in item.cuts.items()
            if name in item.by_name
        }
        self.copies: list[Variable] = []
        self.written_whole: dict[str, str] = {}
        self._constants = Constants(lambda name: editor[node_of(name)], lambda name: self.spec(tensor(name)).shape)
        self._captured = {node.name for node in item.graph_def.node}
        self._pieces: dict[str, _Pieces] = {}
        self._split: dict[tuple[str, Partitioning], tuple[str, ...]] = {}
        self._sliced_from: dict[str, str] = {}
        self._instead: dict[str, _Instead] = {}
        self._removed: set[str] = set()
        self._later: list[tuple[str, Build]] = []
        self._fragments = 0
        self._told: list[str] = []

    # -- tensors ---------------------------------------------------------------------------------------------------

    def spec(self, name: str) -> tf.TensorSpec:
        """Shape and dtype of a tensor, old or new."""
        return self.editor.spec(name)

    def rank(self, name: str) -> int | None:
        return self.spec(name).shape.rank

    def data(self, node: NodeDef) -> list[str]:
        """The tensors that a node takes."""
        return [tensor(i) for i in node.input if not is_control(i)]

    def constant(self, name: str) -> np.ndarray | None:
        """The value of a tensor that constants make."""
        return self._constants.value(name)

    def variable(self, name: str) -> PartitionedVariable | None:
        """The cut variable whose handle a tensor is."""
        node = self.editor[node_of(name)]
        while node.op == "Identity":
            node = self.editor[node_of(node.input[0])]
        return self.variables.get(node.name)

    # -- pieces ----------------------------------------------------------------------------------------------------

    def layout(self, name: str) -> Layout | None:
        """How a tensor's pieces make it up; None: it has none."""
        return self._pieces[name].layout if name in self._pieces else None

    def pieces(self, name: str) -> tuple[str, ...]:
        """The pieces of a tensor that has a layout."""
        return self._pieces[name].names

    def know(self, name: str, layout: Layout, pieces: Sequence[str]) -> None:
        """Notes the pieces of a tensor."""
        self._pieces[name] = _Pieces(layout, tuple(map(tensor, pieces)))
        spec = self.spec(name)
        for k, piece in enumerate(pieces):
            shape = list(spec.shape) if spec.shape.rank is not None else None
            if shape is not None and isinstance(layout, Along):
                shape = list(layout.cut.shape(shape, k))
            elif shape and not isinstance(layout, Alike):
                shape[0] = None
            self.editor.note({tensor(piece): tf.TensorSpec(shape, spec.dtype)})

    def along(self, name: str, cut: Partitioning) -> tuple[str, ...]:
        """The pieces of a tensor along an axis: those that it has, or slices of the whole."""
        if self.layout(name) == Along(cut):
            return self.pieces(name)
        if (name, cut) not in self._split:
            with self.subgraph("split") as f:
                made = tf.split(f.input(name), list(cut.sizes), cut.axis)
            self._split[name, cut] = tuple(map(f.name, made))
            self._sliced_from.update(dict.fromkeys(self._split[name, cut], name))
        return self._split[name, cut]

    def alike(self, name: str, count: int) -> tuple[str, ...]:
        """The whole of a tensor for each of `count` shards."""
        return self.pieces(name) if isinstance(self.layout(name), Alike) else (name,) * count

    def clones(self, node: NodeDef, inputs: Sequence[Iterable[str]]) -> tuple[str, ...]:
        """A copy of a node for each shard, which takes other data; returns their names."""
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
        """What the copy for one shard waits for, where its node waited for another.

        If that has copies for as many shards, the one for the same shard is enough: whatever comes later for this shard
        waits for this copy in turn, and what comes later for the whole waits for all copies.
        """
        instead = self._instead.get(node_of(spelling))
        if instead is None:
            return [spelling]
        is_same = instead.by_shard and len(instead.names) == count
        return [f"^{name}" for name in (instead.names[shard : shard + 1] if is_same else instead.names)]

    def waits(self, node: NodeDef) -> list[str]:
        """The nodes that a node waits for, their copies in the place of those that have any."""
        return [node_of(c) for i in node.input if is_control(i) for c in self._control(i, shard=0, count=0)]

    def sliced_from(self, name: str) -> str:
        """The tensor of which one is a slice that `along` has made, or the tensor itself."""
        return self._sliced_from.get(name, name)

    def is_captured(self, name: str) -> bool:
        """Whether a tensor is one of the step before it was cut."""
        return node_of(name) in self._captured

    # -- changes ---------------------------------------------------------------------------------------------------

    @contextmanager
    def subgraph(self, what: str) -> Iterator[SubgraphBuilder]:
        """New arithmetic (see `autodist.graph.subgraph`), whose tensors' shapes and dtypes are noted."""
        self._fragments += 1
        with self.editor.subgraph(f"partition/{what}/{self._fragments}") as f:
            yield f

    def order_after(self, node: str, names: Sequence[str], *, removed: bool = False, by_shard: bool = True) -> None:
        """Lets what the step before ordered after a node be ordered after others.

        Args:
            node: of the step before.
            names: the others.
            removed: whether the node goes.
            by_shard: whether they are one for each shard, so that the next node's copy for a shard waits for one alone.
        """
        self._instead[node] = _Instead(tuple(names), by_shard)
        if removed:
            self._removed.add(node)

    def becomes(self, node: str, build: Build) -> None:
        """Gives a node's only output another value, which is built when all rules were applied."""
        self._later.append((node, build))

    def finish(self) -> None:
        """Builds what `becomes` has put off."""
        with self.subgraph("whole") as f:
            made = [(node, build(f)) for node, build in self._later]
        for node, value in made:
            self.editor.pass_on(node, f.name(value), value.dtype)
        for node, instead in self._instead.items():
            # Copies, and what was made for them, stand where they should already.
            self.editor.replace_control(node, instead.names, filter(self.is_captured, self.editor.consumers(node)))
        self.editor.replace_targets({node: tuple(instead.names) for node, instead in self._instead.items()})
        self.editor.remove(self._removed)

    def tell(self, line: str) -> None:
        """Notes what is to be told of parts that are not done in pieces."""
        self._told.append(line)

    def put_together(self, once: Collection[str]) -> Iterator[str]:
        """What to tell of tensors whose whole is still asked for by what runs once: it costs more than the pieces."""
        yield from self._told
        for name in self._pieces:
            readers = self.editor.consumers(node_of(name)) if node_of(name) in self.editor else frozenset()
            for reader in sorted(readers & set(once) - self._instead.keys()):
                op = self.editor[reader].op
                yield f"{name} is in shards, and is put together for {op} ({reader}), which is not done shard by shard"
