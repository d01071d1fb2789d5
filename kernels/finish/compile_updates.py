"""CompileUpdates: fuses the arithmetic that updates a large variable into one pass over memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import tensorflow as tf

from autodist.errors import PartsError
from autodist.graph.editor import NodeDef
from autodist.graph.index import GraphIndex
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having
from autodist.graph.split import split
from autodist.graph.step import ReplicatedStep, Step
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel
from autodist.kernels.finish.called_function import compiled_function, replace_by_call


@dataclass(frozen=True)
class CompileUpdates(Kernel[ReplicatedStep, ReplicatedStep]):
    """Compiles the update of each large variable on a CPU with XLA.

    An optimizer's update consists of some dozen elementwise ops, each of which reads and writes as much memory as the
    variable has. Compiled, they read each operand once and write each variable once. Adam on 16 MB of weights takes
    4.4 ms instead of 8.5 ms, on two cores.

    Updates that workers on several machines compute in parallel are left out. XLA's code depends on the processor (for
    example on fused multiply-add), so workers with different processors would diverge in their last bits.

    Attributes:
        min_bytes: minimum size of a variable. Smaller ones stay in a processor's cache between ops, and XLA itself
            takes some 50 MB of a worker's memory.
    """

    min_bytes: int = 16 << 20
    name: ClassVar[str] = "compile-updates"
    after: ClassVar[Mapping[str, str]] = {
        "compile-step": "the function of a compiled region may contain updates",
    }

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        handles = {n.name for n in step.graph_index.of_op("VarHandleOp") if self._is_taken(n, step, context)}
        if not handles:
            return step
        editor = StepEditor(step)
        kept = {*map(node_of, (*step.outputs, *step.inputs)), *step.initializers.values()}
        for region in find_regions(step, handles, kept):
            _compile(editor, region)
        return editor.to_step()

    def _is_taken(self, handle: NodeDef, step: ReplicatedStep, context: Context) -> bool:
        variable = step.by_handle.get(handle.name)
        return (
            variable is not None
            and variable.dtype in (tf.float32, tf.float64)
            and variable.byte_size >= self.min_bytes
            and handle.device == context.cpu(context.worker)
            and (context.has_one_kind_of_processor or step.owners.get(variable.name) == context.worker)
        )


def _compile(editor: StepEditor[Step], region: Sequence[str]) -> None:
    """Replaces the nodes `region` by a function call."""
    function = compiled_function([editor[name] for name in region])
    replace_by_call(editor, f"autodist/compiled/{region[-1]}", region, function)


_TYPES = frozenset(dtype.as_datatype_enum for dtype in (tf.float32, tf.float64, tf.bool))
"""XLA may keep intermediate values of smaller dtypes in a larger dtype."""


def find_regions(step: ReplicatedStep, handles: Collection[str], kept: Collection[str]) -> list[list[str]]:
    """Finds regions of nodes that can each be replaced by one node at the same time, in topological order.

    No other node reads the values computed in a region. Its last node is a write, and all others are ancestors of it. A
    write without other nodes is not a region.

    Args:
        step: the step.
        handles: the handles of the variables.
        kept: nodes that belong to no region.
    """
    search = _Search(step.graph_index, frozenset(handles), frozenset(kept))
    writes = [node.name for node in step.graph_index.having(Trait.ASSIGNMENT) if search.is_write(node)]
    found = {write: search.region_of(write) for write in writes}
    # The write of a slot is also in the region of the weight that is computed from it.
    largest = sorted((write for write in found if len(found[write]) > 1), key=lambda write: -len(found[write]))
    while True:
        regions: dict[str, str] = {}
        for write in largest:
            if regions.keys().isdisjoint(found[write]):
                regions.update(dict.fromkeys(found[write], write))
        try:
            split(step, regions.get, copied=())
        except PartsError as error:  # a path leaves one of the regions and returns to it
            largest.remove(max(error.keys, key=largest.index))
        else:
            return [search.in_order(found[write], write) for write in dict.fromkeys(regions.values())]


@dataclass(frozen=True)
class _Search:
    graph_index: GraphIndex
    handles: frozenset[str]
    kept: frozenset[str]

    def is_write(self, node: NodeDef) -> bool:
        return node.op in having(Trait.ASSIGNMENT) and node.input[0] in self.handles

    def region_of(self, write: str) -> set[str]:
        """Returns a write with its ancestors that can move to its position."""
        region = {write}
        while found := {name for name in self._before(region) if self._belongs(name, region, write)}:
            region |= found
        return region

    def _before(self, region: Collection[str]) -> set[str]:
        return {source for name in region for source in self.graph_index.sources[name]}.difference(region)

    def _belongs(self, name: str, region: set[str], write: str) -> bool:
        node = self.graph_index.nodes[name]
        if name in self.kept or node.device != self.graph_index.nodes[write].device:
            return False
        if self.is_write(node):
            return self._shape(node) == self._shape(self.graph_index.nodes[write])
        return self._is_elementwise(node) and region.issuperset(self.graph_index.consumers[name])

    def _is_elementwise(self, node: NodeDef) -> bool:
        if node.op == "ReadVariableOp":
            return node.input[0] in self.handles
        types = [node.attr[key].type for key in ("T", "dtype") if key in node.attr]
        return node.op in having(Trait.EXACT) and _TYPES.issuperset(types)

    def _shape(self, write: NodeDef) -> bytes:
        return bytes(self.graph_index.nodes[write.input[0]].attr["shape"].shape.SerializeToString())

    def in_order(self, region: Collection[str], write: str) -> list[str]:
        """Returns the nodes of a region in topological order, ending in `write`; equal regions have equal orders."""
        ordered: dict[str, None] = {}
        left = set(region)

        def visit(name: str) -> None:
            if name in left:
                left.discard(name)
                for source in self.graph_index.sources[name]:
                    visit(source)
                ordered[name] = None

        visit(write)
        return list(ordered)
