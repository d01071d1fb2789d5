"""Finds the regions of a step that XLA can compile as one function each: a replica's compute part, and updates."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autodist.graph.control_flow import find_maybe_dead
from autodist.graph.find_stages import find_stages
from autodist.graph.index import GraphIndex
from autodist.graph.jit_scope import is_in_jit_scope
from autodist.graph.names import node_of
from autodist.graph.op_types import RESOURCE, VARIANT, type_of, types_of_inputs
from autodist.graph.ops import Trait, having
from autodist.graph.recomputation import copied_for
from autodist.graph.split import Subgraphs, split
from autodist.graph.step import ReplicatedStep
from autodist.graph.walks import reach
from autodist.kernels.context import Context
from autodist.kernels.finish.compilable import Compilable
from autodist.proto import strategy_pb2

Key = tuple[Hashable, ...]
"""The common properties of the nodes of one region."""

COMPUTE, SHARED, UPDATE = "compute", "shared", "update"
"""The parts of a step: the computation of each replica, the computation that replicas share, and the update."""


@dataclass(frozen=True)
class PartOf:
    """Maps a node to the part of the step that it belongs to; None if a kernel created it.

    Parts may run in parallel.
    """

    step: ReplicatedStep

    def __call__(self, name: str) -> Key | None:
        stages = self.step.stages
        if not stages.order:  # a single replica
            return ("step",)
        replica, captured = self.step.replica_of(name)
        if captured not in stages.order:
            return None
        level = stages.level_of(captured)
        if captured in stages.once:
            return (UPDATE, level)
        return (COMPUTE, replica, level) if captured in self.step.copies else (SHARED, level)


def _copied(step: ReplicatedStep) -> frozenset[str]:
    """Returns the nodes that are copied to each region that reads them: constants, and empty lists shared by replicas.

    Constants created by kernels are not copied: they may differ between replicas, which should share their functions.
    """
    part_of, graph_index = PartOf(step), step.graph_index
    constants = (
        n.name for n in graph_index.of_op("Const") if not graph_index.sources[n.name] and part_of(n.name) is not None
    )
    lists = (n.name for n in graph_index.having(Trait.ZEROS) if n.op in having(Trait.LIST))
    return frozenset([*constants, *(name for name in lists if (part_of(name) or ("",))[0] == SHARED)])


@dataclass(frozen=True)
class Marks:
    """The nodes of a step that XLA is to compile, if it can."""

    step: ReplicatedStep
    compilation: strategy_pb2.Compilation

    def __contains__(self, name: str) -> bool:
        captured = self.step.replica_of(name)[1]
        is_chosen = self.compilation.updates if captured in self._once else self.is_whole
        return is_chosen or (self._takes_marks and is_in_jit_scope(name))

    @property
    def is_whole(self) -> bool:
        """True if the complete computation is compiled: only then does TensorFlow build its loops for XLA."""
        return self.compilation.computation == strategy_pb2.Compilation.WHOLE

    @property
    def _takes_marks(self) -> bool:
        return self.compilation.computation == strategy_pb2.Compilation.MARKED

    @cached_property
    def _once(self) -> Container[str]:
        """The nodes of the updates."""
        if self.compilation.updates == self.is_whole:
            return ()  # they are chosen as the computation is
        return (self.step.stages if self.step.stages.order else find_stages(self.step)).once

    def compilable(self, allows_loops: bool = True) -> Compilable:
        """Returns the check which of the nodes XLA can compile.

        Args:
            allows_loops: False if XLA must not compile loops with variables and lists, although it could.
        """
        # XLA draws other numbers, which only a script that requests XLA itself expects.
        allows_draws = self.step.jit_compile or self._takes_marks
        is_built_for_it = self.step.jit_compile or self.step.has_loops_for_xla
        allows_loops = allows_loops and self.is_whole and is_built_for_it
        return Compilable(self.step.graph_def, allows_loops, allows_draws)


def find_regions(marks: Marks, context: Context) -> Subgraphs:
    """Finds the regions of a step, each of which one node can replace.

    The nodes of a region are on one device of this worker, belong to the same runs, and wait for the same
    communication. Compilation therefore creates no deadlock, and a late message does not delay independent work.

    Args:
        marks: the nodes that XLA is to compile, on their devices.
        context: the worker that runs the graph.
    """
    parts = _find_parts(marks, context, marks.compilable())
    if marks.is_whole and _parts_of_loops_leave(marks.step.graph_index, parts):
        return _find_parts(marks, context, marks.compilable(allows_loops=False))
    return parts


def _find_parts(marks: Marks, context: Context, compilable: Compilable) -> Subgraphs:
    step = marks.step
    search = _Search(step, context, marks, PartOf(step), _copied(step), compilable)
    return split(step, search.keys().get, copied=search.copied, cut_cycles=True)


def _parts_of_loops_leave(graph_index: GraphIndex, parts: Subgraphs) -> bool:
    """Returns True if a list of tensors, or a handle that a loop outputs, enters or leaves a region."""
    passing = (name for part in parts.values() for name in (*part.takes, *part.gives))
    return any(
        type_of(graph_index, name) in (RESOURCE, VARIANT) and graph_index.nodes[node_of(name)].op != "VarHandleOp"
        for name in passing
    )


@dataclass
class _Search:
    step: ReplicatedStep
    context: Context
    marks: Marks
    part_of: PartOf
    copied: frozenset[str]
    compilable: Compilable
    graph_index: GraphIndex = field(init=False)

    def __post_init__(self) -> None:
        self.graph_index = self.step.graph_index
        self._returned = {*map(node_of, self.step.outputs), *self.step.targets}
        self._maybe_dead = find_maybe_dead(self.graph_index)
        self._kept = {*map(node_of, self.step.inputs), *self.step.initializers.values()} | self._computed_by_all()
        self._waits, self._runs = self._find_waits(), self._find_runs()

    def _computed_by_all(self) -> set[str]:
        """Returns the nodes that several workers compute in parallel, if their XLA functions could differ.

        XLA's code depends on the processor and on the rest of the function. If one worker also updates variables that
        it owns, or another computes nothing, workers would diverge in their last bits.
        """
        context, owners = self.context, self.step.owners
        is_like_all = context.has_one_kind_of_processor and context.all_compute
        if context.workers == 1 or (is_like_all and not owners):
            return set()
        mirrored = {v.handle for v in self.step.variables if v.name not in owners}
        writes = (name for name, effect in self.graph_index.effects.items() if effect.writes & mirrored)
        found = reach(writes, self.graph_index.data.__getitem__)
        return {name for name in found if (self.part_of(name) or ("",))[0] != COMPUTE}

    def keys(self) -> dict[str, Key]:
        """Returns the keys of the nodes that may be in a region."""
        found: dict[str, Key] = {}
        for name in reversed(self.graph_index.order):
            key = self._key_of(name)
            # A read outputs a variable's buffer without a copy, which an XLA function that returns it cannot do.
            if key is not None and (key[0] == SHARED or self.graph_index.nodes[name].op == "ReadVariableOp"):
                key = self._key_of_readers(name, key, found)
            if key is not None:
                found[name] = key
        return found

    def _key_of(self, name: str) -> Key | None:
        part = self.part_of(name)
        if part is None or name not in self.marks or not self._is_free(name):
            return None
        # XLA would merge a recomputed node with its original in one function, and keep the value.
        return (
            *part,
            copied_for(name),
            self.graph_index.nodes[name].device,
            self._waits[name],
            self._runs.get(name, 0),
        )

    def _is_free(self, name: str) -> bool:
        node = self.graph_index.nodes[name]
        return (
            name not in self.copied
            and name not in self._kept
            and name not in self._maybe_dead
            and node.device.startswith(self.context.task(self.context.worker))
            and self.compilable.can_compile(node)
            and self._has_local_handles(name)
        )

    def _has_local_handles(self, name: str) -> bool:
        """Returns True if a node's resource inputs are variable handles, or come from a loop, on its device."""
        node = self.graph_index.nodes[name]
        sources = zip(self.graph_index.data[name], types_of_inputs(node), strict=True)
        handles = [self.graph_index.nodes[source] for source, kind in sources if kind == RESOURCE]
        return all((h.op == "VarHandleOp" or h.op in having(Trait.LOOP)) and h.device == node.device for h in handles)

    def _key_of_readers(self, name: str, key: Key, found: Mapping[str, Key]) -> Key | None:
        """Returns the common key of a node's readers if it fits the node; None if there are several keys."""
        readers = {found.get(consumer) for consumer in self.graph_index.consumers[name]}
        reader = next(iter(readers)) if len(readers) == 1 else None
        is_same_place = reader is not None and (reader[-3], reader[-1]) == (key[-3], key[-1])
        return reader if is_same_place and name not in self._returned else None

    def _find_waits(self) -> dict[str, int]:
        """Maps each node to a bit set of its ancestors that may wait for other workers."""
        found: dict[str, int] = {}
        count = 0
        for name in self.graph_index.order:
            bits = 0
            for source in self.graph_index.sources[name]:
                bits |= found.get(source, 0)
            if self.compilable.may_wait(self.graph_index.nodes[name]):
                bits |= 1 << count
                count += 1
            found[name] = bits
        return found

    def _find_runs(self) -> dict[str, int]:
        """Maps each node to a bit set of the runs that need it: the step, and background programs."""
        found: dict[str, int] = {}
        for k, roots in enumerate((self._returned, *self.step.nodes_apart)):
            for name in reach(roots, self.graph_index.sources.__getitem__):
                found[name] = found.get(name, 0) | 1 << k
        return found


def may_need_compiler(graph_index: GraphIndex, region: Iterable[str]) -> bool:
    """Returns True if a region has ops for which TensorFlow may lack a CPU kernel, while XLA supports them.

    Keras compiles three-dimensional convolutions for that reason alone: grouped ones, and those with channels first.
    """
    return any(graph_index.nodes[name].op in _CONVOLUTIONS for name in region)


def work_in(graph_index: GraphIndex, region: Iterable[str]) -> int:
    """Returns the number of computing nodes in a region."""
    return sum(graph_index.nodes[name].op not in _NO_WORK for name in region)


_CONVOLUTIONS = having(Trait.CONVOLUTION)
_NO_WORK = having(Trait.SOURCE | Trait.IDENTITY | Trait.RESHAPES | Trait.BY_SHAPES) | {"AssignVariableOp"}
