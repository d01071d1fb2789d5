"""Constants of a step: the nodes that compute the same value in each run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from autodist.graph.control_flow import V1_CONTROL_FLOW
from autodist.graph.editor import NodeDef
from autodist.graph.names import data_inputs, node_of, tensor
from autodist.graph.op_types import RESOURCE, VARIANT, is_function_of_inputs, types_of_outputs
from autodist.graph.ops import Trait, having, linear_operands
from autodist.graph.step import CapturedStep

_NEVER = having(Trait.CALL | Trait.BRANCH | Trait.LOOP | Trait.BY_KEY | Trait.KEY | Trait.FED)
_NEVER |= V1_CONTROL_FLOW | having(Trait.STACK)
"""Stateless ops that are no constants: they call functions, draw, are fed, or may run never or often."""

_HANDLES = {RESOURCE, VARIANT}
_ELEMENTWISE, _BROADCASTS = having(Trait.ELEMENTWISE), having(Trait.COPIES | Trait.REPEATS)


@dataclass(frozen=True)
class Constants:
    """The constants of a step.

    Attributes:
        computed: nodes that are constant: a Const, or a stateless op without draws whose operands are all constant. A
            contraction of constants, such as a MatMul, is none: its operands need not be sharded alike.
        broadcasts: nodes that broadcast a computed scalar to a constant shape.
        whole: those of `computed` that are never copied: scalars, and Consts above a size.
    """

    computed: frozenset[str]
    broadcasts: frozenset[str]
    whole: frozenset[str]

    @classmethod
    def of(cls, step: CapturedStep, marks: Collection[str], max_bytes: int) -> Constants:
        """Finds the constants of a step.

        Args:
            step: the step.
            marks: Identity nodes that are never constant, such as constraints.
            max_bytes: a larger Const is not copied.
        """
        nodes, data = step.graph_index.nodes, step.graph_index.data
        computed: set[str] = set()
        broadcasts: set[str] = set()
        for name in step.graph_index.order:
            node = nodes[name]
            if node.op == "Const":
                computed.add(name)
            elif data[name] and name not in marks and _preserves_constants(node, len(data[name])):
                changing = [one for one in data_inputs(node) if node_of(one) not in computed]
                if not changing:
                    computed.add(name)
                elif node.op in _BROADCASTS and not _is_scalar(step, tensor(name)):
                    if all(_is_scalar(step, one) for one in changing):
                        broadcasts.add(name)
        whole = {name for name in computed if _is_kept_whole(step, name, max_bytes)}
        return cls(frozenset(computed), frozenset(broadcasts), frozenset(whole))

    def leading_to(self, step: CapturedStep, name: str) -> list[str]:
        """Returns the nodes to copy for a reader of a node: it and its constant inputs, transitively; inputs last."""
        found: dict[str, None] = {}
        front = [name]
        while front:
            one = front.pop()
            if one in found or one in self.whole or not (one == name or one in self.computed):
                continue
            found[one] = None
            front += reversed(step.graph_index.data[one])
        return list(found)


def _preserves_constants(node: NodeDef, count: int) -> bool:
    """Returns True if the result of an op is a constant if all operands are; that of a contraction is not."""
    if node.op in _NEVER or not is_function_of_inputs(node.op):
        return False
    _, is_product = linear_operands(node.op, count) or ((), False)
    return (node.op in _ELEMENTWISE or not is_product) and not _HANDLES.intersection(types_of_outputs(node))


def _is_scalar(step: CapturedStep, name: str) -> bool:
    return bool(step.spec_of(name).shape.rank == 0)


def _is_kept_whole(step: CapturedStep, name: str, max_bytes: int) -> bool:
    node = step.graph_index.nodes[name]
    if node.op == "Const":
        spec = step.spec_of(tensor(name))
        return spec.shape.rank == 0 or (spec.shape.num_elements() or 0) * spec.dtype.size > max_bytes
    return all(_is_scalar(step, f"{name}:{k}") for k, _ in enumerate(types_of_outputs(node)))
