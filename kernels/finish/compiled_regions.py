"""Regions of a step that XLA can make one function of each: what a replica computes, and what updates variables."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from autodist.graph.control_flow import find_perhaps_dead
from autodist.graph.index import GraphIndex
from autodist.graph.names import node_of
from autodist.graph.op_types import RESOURCE, VARIANT, type_of, types_of_inputs
from autodist.graph.ops import Trait, having
from autodist.graph.placement import EVERY_WORKER
from autodist.graph.split import Subgraphs, split
from autodist.graph.step import Step
from autodist.graph.walks import reach
from autodist.kernels.base import Context
from autodist.kernels.finish.compilable import Compilable

Key = tuple[Hashable, ...]
"""What the nodes of one region have in common."""

COMPUTE, SHARED, UPDATE = "compute", "shared", "update"
"""The parts of a step: what each replica computes, what is computed once for all of them, and the update."""


@dataclass(frozen=True)
class PartOf:
    """Tells of a node which part of the step it belongs to, so that parts may run side by side; None: kernels made it.

    Args:
        item: the step, replicated or not.
    """

    item: Step

    def __call__(self, name: str) -> Key | None:
        replication = self.item.replication
        if replication is None:
            return ("step",)
        stages = replication.stages
        replica, own = self.item.replica_of(name)
        if own not in stages.order:
            return None
        level = stages.level_of(own)
        if own in stages.once:
            return (UPDATE, level)
        return (COMPUTE, replica, level) if own in replication.copies else (SHARED, level)


def _copied(item: Step) -> frozenset[str]:
    """What each region that reads it has a copy of: constants, and empty lists that replicas share.

    Not a constant that a kernel made: it may differ from replica to replica, and they are to share their functions.
    """
    part_of, graph_index = PartOf(item), item.graph_index
    constants = (
        n.name for n in graph_index.of_op("Const") if not graph_index.sources[n.name] and part_of(n.name) is not None
    )
    lists = (n.name for n in graph_index.having(Trait.ZEROS) if n.op in having(Trait.LIST))
    return frozenset([*constants, *(name for name in lists if (part_of(name) or ("",))[0] == SHARED)])


def find_regions(item: Step, context: Context, asked: Callable[[str], bool]) -> Subgraphs:
    """The parts of a step that can be replaced by one node each, all at the same time.

    The nodes of each stand on one device of this worker, are run by the same runs, and wait for the same communication:
    no two workers can come to wait for each other, and what arrives later holds nothing back.

    Args:
        item: the step, with devices.
        context: whose graph it is.
        asked: whether XLA is asked for what a node computes.
    """
    # Only under a whole step that asks for XLA does TensorFlow build loops, and their gradients, as XLA wants them.
    parts = _find_parts(item, context, asked, allows_loops=item.jit_compile)
    if item.jit_compile and _parts_of_loops_leave(item.graph_index, parts):
        return _find_parts(item, context, asked, allows_loops=False)
    return parts


def _find_parts(item: Step, context: Context, asked: Callable[[str], bool], allows_loops: bool) -> Subgraphs:
    search = _Search(item, context, asked, PartOf(item), _copied(item), allows_loops)
    return split(item, search.keys().get, copied=search.copied, cut_cycles=True)


def _parts_of_loops_leave(graph_index: GraphIndex, parts: Subgraphs) -> bool:
    """Whether a list of tensors, or a handle that a loop gives, comes into a region or leaves it."""
    passing = (name for part in parts.values() for name in (*part.takes, *part.gives))
    return any(
        type_of(graph_index, name) in (RESOURCE, VARIANT) and graph_index.nodes[node_of(name)].op != "VarHandleOp"
        for name in passing
    )


@dataclass
class _Search:
    item: Step
    context: Context
    asked: Callable[[str], bool]
    part_of: PartOf
    copied: frozenset[str]
    allows_loops: bool
    graph_index: GraphIndex = field(init=False)

    def __post_init__(self) -> None:
        self.graph_index = self.item.graph_index
        self._compilable = Compilable(self.item.graph_def, self.allows_loops)
        self._returned = {*map(node_of, self.item.outputs), *self.item.targets}
        self._perhaps_dead = find_perhaps_dead(self.graph_index)
        self._kept = {*map(node_of, self.item.inputs), *self.item.initializers.values()} | self._made_by_all()
        self._waits, self._runs = self._find_waits(), self._find_runs()

    def _made_by_all(self) -> set[str]:
        """What leads to writes that several workers make side by side, unless all have the same code for it.

        XLA's code depends on the processor, and on what else stands in a function: where one worker also updates what
        it owns, or another computes nothing, they would drift apart in their last bits.
        """
        context, owners = self.context, self.item.owners
        is_owned = {name: owner != EVERY_WORKER for name, owner in owners.items()}
        is_like_all = context.has_one_kind_of_processor and len(context.computing) == context.workers
        if context.workers == 1 or (is_like_all and not any(is_owned.values())):
            return set()
        mirrored = {v.handle for v in self.item.variables if not is_owned.get(v.name, False)}
        writes = (name for name, effect in self.graph_index.effects.items() if effect.writes & mirrored)
        found = reach(writes, self.graph_index.data.__getitem__)
        return {name for name in found if (self.part_of(name) or ("",))[0] != COMPUTE}

    def keys(self) -> dict[str, Key]:
        """Of the nodes that may stand in a region."""
        found: dict[str, Key] = {}
        for name in reversed(self.graph_index.order):
            key = self._own_key(name)
            # A read gives a variable without a copy, which a function of XLA that returns it cannot.
            if key is not None and (key[0] == SHARED or self.graph_index.nodes[name].op == "ReadVariableOp"):
                key = self._key_of_readers(name, key, found)
            if key is not None:
                found[name] = key
        return found

    def _own_key(self, name: str) -> Key | None:
        part = self.part_of(name)
        if part is None or not self.asked(name) or not self._is_free(name):
            return None
        return (*part, self.graph_index.nodes[name].device, self._waits[name], self._runs.get(name, 0))

    def _is_free(self, name: str) -> bool:
        node = self.graph_index.nodes[name]
        return (
            name not in self.copied
            and name not in self._kept
            and name not in self._perhaps_dead
            and node.device.startswith(self.context.task(self.context.worker))
            and self._compilable.can_compile(node)
            and self._has_handles_beside_it(name)
        )

    def _has_handles_beside_it(self, name: str) -> bool:
        """Whether what a node has of variables comes from their handles, or from a loop's, on its device."""
        node = self.graph_index.nodes[name]
        sources = zip(self.graph_index.data[name], types_of_inputs(node), strict=True)
        handles = [self.graph_index.nodes[source] for source, kind in sources if kind == RESOURCE]
        return all((h.op == "VarHandleOp" or h.op in having(Trait.LOOP)) and h.device == node.device for h in handles)

    def _key_of_readers(self, name: str, own: Key, found: Mapping[str, Key]) -> Key | None:
        """The region of all that read a node, if it is one and could take it; what many read stays by itself."""
        readers = {found.get(consumer) for consumer in self.graph_index.consumers[name]}
        reader = next(iter(readers)) if len(readers) == 1 else None
        is_alike = reader is not None and (reader[-3], reader[-1]) == (own[-3], own[-1])
        return reader if is_alike and name not in self._returned else None

    def _find_waits(self) -> dict[str, int]:
        """For each node, as a set of bits, what it needs that may wait for other workers."""
        found: dict[str, int] = {}
        count = 0
        for name in self.graph_index.order:
            bits = 0
            for source in self.graph_index.sources[name]:
                bits |= found.get(source, 0)
            if self._compilable.may_wait(self.graph_index.nodes[name]):
                bits |= 1 << count
                count += 1
            found[name] = bits
        return found

    def _find_runs(self) -> dict[str, int]:
        """For each node, as a set of bits, the runs that need it: the step, and what runs beside it."""
        found: dict[str, int] = {}
        beside = (self.item.served, self.item.flush_targets, self.item.initializers.values())
        for k, roots in enumerate((self._returned, *beside)):
            for name in reach(roots, self.graph_index.sources.__getitem__):
                found[name] = found.get(name, 0) | 1 << k
        return found


def may_need_compiler(graph_index: GraphIndex, region: Iterable[str]) -> bool:
    """Whether a region has ops that XLA does in cases in which TensorFlow has no kernel for a CPU.

    Keras asks to compile convolutions in three dimensions for that alone: those in groups, and channels first.
    """
    return any(graph_index.nodes[name].op in _CONVOLUTIONS for name in region)


def work_in(graph_index: GraphIndex, region: Iterable[str]) -> int:
    """How many nodes of a region compute something."""
    return sum(graph_index.nodes[name].op not in _NO_WORK for name in region)


_CONVOLUTIONS = having(Trait.CONVOLUTION)
_NO_WORK = having(Trait.SOURCE | Trait.SAME | Trait.RESHAPES | Trait.BY_SHAPES) | {"AssignVariableOp"}
