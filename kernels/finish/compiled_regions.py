"""Regions of a step that XLA can make one function of each: what a replica computes, and what updates variables."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from autodist.graph.item import GraphItem
from autodist.graph.names import is_control, node_of, split_replica, tensor
from autodist.graph.placement import EVERY_WORKER
from autodist.graph.units import by_levels, is_acyclic
from autodist.graph.walks import reach
from autodist.graph.wiring import Wiring
from autodist.kernels.base import Context
from autodist.kernels.finish.compilable import RESOURCE, VARIANT, Compilable, types_of_inputs, types_of_outputs

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

    item: GraphItem

    def __call__(self, name: str) -> Key | None:
        stages = self.item.stages
        if stages is None:
            return ("step",)
        replica, own = split_replica(name)
        if own not in stages.order:
            return None
        level = stages.levels.get(own, 1)
        if own in stages.once:
            return (UPDATE, level)
        return (COMPUTE, replica, level) if own in self.item.replicated else (SHARED, level)


def is_copied(item: GraphItem, name: str) -> bool:
    """Whether each region that reads a node has a copy of its own: a constant, or an empty list that replicas share.

    Not a constant that a kernel made: it may differ from replica to replica, and they are to share their functions.
    """
    op = item.wiring.nodes[name].op
    if op not in ("Const", "EmptyTensorList", "TensorListReserve"):
        return False
    part = PartOf(item)(name)
    return part is not None and (part[0] == SHARED if op != "Const" else not item.wiring.sources[name])


def find_regions(item: GraphItem, context: Context, asked: Callable[[str], bool]) -> list[list[str]]:
    """The nodes of each region, each after what it needs of the others.

    Each region's nodes can be replaced by one node, all regions at the same time, without a cycle. They stand on one
    device of this worker, are run by the same runs, and wait for the same communication: no two workers can come to
    wait for each other, and what arrives later holds nothing back.

    Args:
        item: the step, with devices.
        context: whose graph it is.
        asked: whether XLA is asked for what a node computes.
    """
    # Only under a whole step that asks for XLA does TensorFlow build loops, and their gradients, as XLA wants them.
    units = _units(item, context, asked, allows_loops=item.jit_compile)
    if item.jit_compile and _parts_of_loops_leave(item, units):
        units = _units(item, context, asked, allows_loops=False)
    found: dict[Key, list[str]] = {}
    for name in item.wiring.order:
        if name in units:
            found.setdefault(units[name], []).append(name)
    return list(found.values())


def _units(item: GraphItem, context: Context, asked: Callable[[str], bool], allows_loops: bool) -> dict[str, Key]:
    keys = _Search(item, context, asked, PartOf(item), allows_loops).keys()
    return keys if is_acyclic(item.wiring, keys) else by_levels(item.wiring, keys)


def _parts_of_loops_leave(item: GraphItem, units: Mapping[str, Key]) -> bool:
    """Whether a list of tensors, or a handle that a loop gives, comes into a region or leaves it."""
    wiring = item.wiring
    for name in units:
        node = wiring.nodes[name]
        for spelling, kind in zip(node.input, types_of_inputs(node), strict=False):
            source = node_of(spelling)
            comes = units.get(source) != units[name] and wiring.nodes[source].op != "VarHandleOp"
            if kind in _OF_LOOPS and comes and not is_copied(item, source):
                return True
        given = {tensor(f"{name}:{k}") for k, kind in enumerate(types_of_outputs(node)) if kind in _OF_LOOPS}
        readers = [c for c in wiring.consumers[name] if units.get(c) != units[name]] if given else []
        if any(not is_control(i) and tensor(i) in given for reader in readers for i in wiring.nodes[reader].input):
            return True
    return False


_OF_LOOPS = frozenset({RESOURCE, VARIANT})


@dataclass
class _Search:
    item: GraphItem
    context: Context
    asked: Callable[[str], bool]
    part_of: PartOf
    allows_loops: bool
    wiring: Wiring = field(init=False)

    def __post_init__(self) -> None:
        self.wiring = self.item.wiring
        self._compilable = Compilable(self.item.graph_def, self.allows_loops)
        self._returned = {*map(node_of, self.item.outputs), *self.item.targets}
        branches = (n.name for n in self.wiring.of_op("Switch", "RefSwitch", "Enter", "RefEnter"))
        self._perhaps_dead = reach(branches, self.wiring.consumers.__getitem__)
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
        writes = (name for name, effect in self.wiring.effects.items() if effect.writes & mirrored)
        found = reach(writes, self.wiring.data.__getitem__)
        return {name for name in found if (self.part_of(name) or ("",))[0] != COMPUTE}

    def keys(self) -> dict[str, Key]:
        """Of the nodes that may stand in a region."""
        found: dict[str, Key] = {}
        for name in reversed(self.wiring.order):
            key = self._own_key(name)
            # A read gives a variable without a copy, which a function of XLA that returns it cannot.
            if key is not None and (key[0] == SHARED or self.wiring.nodes[name].op == "ReadVariableOp"):
                key = self._key_of_readers(name, key, found)
            if key is not None:
                found[name] = key
        return found

    def _own_key(self, name: str) -> Key | None:
        part = self.part_of(name)
        if part is None or not self.asked(name) or not self._is_free(name):
            return None
        return (*part, self.wiring.nodes[name].device, self._waits[name], self._runs.get(name, 0))

    def _is_free(self, name: str) -> bool:
        node = self.wiring.nodes[name]
        return (
            not is_copied(self.item, name)
            and name not in self._kept
            and name not in self._perhaps_dead
            and node.device.startswith(self.context.task(self.context.worker))
            and self._compilable.can_compile(node)
            and self._has_handles_beside_it(name)
        )

    def _has_handles_beside_it(self, name: str) -> bool:
        """Whether what a node has of variables comes from their handles, or from a loop's, on its device."""
        node = self.wiring.nodes[name]
        sources = zip(self.wiring.data[name], types_of_inputs(node), strict=True)
        handles = [self.wiring.nodes[source] for source, kind in sources if kind == RESOURCE]
        return all(h.op in ("VarHandleOp", "While") and h.device == node.device for h in handles)

    def _key_of_readers(self, name: str, own: Key, found: Mapping[str, Key]) -> Key | None:
        """The region of all that read a node, if it is one and could take it; what many read stays by itself."""
        readers = {found.get(consumer) for consumer in self.wiring.consumers[name]}
        reader = next(iter(readers)) if len(readers) == 1 else None
        is_alike = reader is not None and (reader[-3], reader[-1]) == (own[-3], own[-1])
        return reader if is_alike and name not in self._returned else None

    def _find_waits(self) -> dict[str, int]:
        """For each node, as a set of bits, what it needs that may wait for other workers."""
        found: dict[str, int] = {}
        count = 0
        for name in self.wiring.order:
            bits = 0
            for source in self.wiring.sources[name]:
                bits |= found.get(source, 0)
            if self._compilable.may_wait(self.wiring.nodes[name]):
                bits |= 1 << count
                count += 1
            found[name] = bits
        return found

    def _find_runs(self) -> dict[str, int]:
        """For each node, as a set of bits, the runs that need it: the step, and what runs beside it."""
        found: dict[str, int] = {}
        beside = (self.item.served, self.item.landed, self.item.initializers.values())
        for k, roots in enumerate((self._returned, *beside)):
            for name in reach(roots, self.wiring.sources.__getitem__):
                found[name] = found.get(name, 0) | 1 << k
        return found


def may_need_compiler(wiring: Wiring, region: Iterable[str]) -> bool:
    """Whether a region has ops that XLA does in cases in which TensorFlow has no kernel for a CPU.

    Keras asks to compile convolutions in three dimensions for that alone: those in groups, and channels first.
    """
    return any(wiring.nodes[name].op in _CONVOLUTIONS for name in region)


def work_in(wiring: Wiring, region: Iterable[str]) -> int:
    """How many nodes of a region compute something."""
    return sum(wiring.nodes[name].op not in _NO_WORK for name in region)


_NO_WORK = frozenset(
    {
        "AssignVariableOp", "BroadcastGradientArgs", "Const", "ExpandDims", "Identity", "NoOp", "ReadVariableOp",
        "Reshape", "Shape", "ShapeN", "Squeeze", "StopGradient",
    }
)  # fmt: skip

_CONVOLUTIONS = frozenset(
    f"{kind}{direction}"
    for kind in ("Conv2D", "Conv3D", "DepthwiseConv2dNative")
    for direction in ("", "BackpropInput", "BackpropFilter", "BackpropInputV2", "BackpropFilterV2")
)
