"""Access to variables that are cut: which rule is for what takes a variable's handle."""

from __future__ import annotations

from collections.abc import Callable

from autodist.errors import StrategyError
from autodist.graph.editor import NodeDef
from autodist.graph.ops import Trait, having, writes_rows
from autodist.kernels.place.partition.reads import READS
from autodist.kernels.place.partition.whole import give_whole
from autodist.kernels.place.partition.work import PartitionedVariable, Work
from autodist.kernels.place.partition.writes import apply_by_shard, write

Rule = Callable[[Work, NodeDef, PartitionedVariable], bool]


def access(work: Work, node: NodeDef) -> bool:
    """If a node takes the handle of a cut variable, rewrites it for the shards or the whole; returns whether it does.

    Raises:
        StrategyError: control flow of TensorFlow 1 writes such a variable.
    """
    cut = next((cut for name in work.data(node) if (cut := work.variable(name))), None)
    if cut is None:
        _require_no_write(work, node)
        return False
    if node.op != "Identity":  # what takes the handle from it is looked at by itself
        rule = _rule_of(node.op)
        if rule is None or not rule(work, node, cut):
            give_whole(work, node)
    return True


def _rule_of(op: str) -> Rule | None:
    if op in having(Trait.ASSIGNMENT):
        return write
    if op.startswith("ResourceApply") or writes_rows(op):
        return apply_by_shard
    return READS.get(op)


def _require_no_write(work: Work, node: NodeDef) -> None:
    """Behind an Enter or a Switch the whole is read; what is written there would be lost."""
    effect = work.effects.get(node.name)
    lost = effect.writes & work.variables.keys() if effect else frozenset()
    for handle in sorted(lost):
        raise StrategyError(
            f"{work.variables[handle].variable.name} is partitioned, and {node.op} ({node.name}) writes it inside a "
            "loop or a branch of TensorFlow 1's control flow, which is not done shard by shard. Leave the variable "
            "whole, or take the control flow of TensorFlow 2 (tf.compat.v1.enable_control_flow_v2())."
        )
