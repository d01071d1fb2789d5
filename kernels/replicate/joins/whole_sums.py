"""Whole sums: what the step adds up over all replicas while it computes."""

from __future__ import annotations

import tensorflow as tf

from autodist.graph.fragment import fragment
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.parts import JoinKind
from autodist.graph.propagation import Sum
from autodist.graph.walks import reach
from autodist.graph.whole_sums import find_depths
from autodist.kernels.replicate.joins.joiner import Joiner


class WholeSums:
    """Gives replicas the sum of what all of them have, in place of their own.

    Its gradient is the sum of all gradients: the seeds of each replica are its share of the batch, so that the whole
    loss is the sum of what replicas differentiate, and each of them reads the sum.
    """

    def __init__(self, joiner: Joiner) -> None:
        self._joiner = joiner

    def join(self) -> None:
        """Lets all that stands for a whole sum be it."""
        joiner, item = self._joiner, self._joiner.item
        depths = find_depths(item) if item.whole_sums else {}
        trains = reach(joiner.stages.writes, item.wiring.sources.__getitem__) if item.whole_sums else set()
        for asked in item.whole_sums:
            captured = tensor(item.wiring.nodes[asked.node].input[0])
            name = f"whole_sum/{asked.node}"
            if joiner.context.joins_outputs or asked.node in trains:
                whole = joiner.join_value(name, JoinKind.WHOLE, captured, Sum(), depth=depths[asked.node])
            else:  # workers of a session may fetch different things
                whole = joiner.join_here(name, captured, Sum())
            for k in range(joiner.count):
                given = whole if asked.of is None else self._if_used(name, captured, whole, k)
                self._become(node_of(joiner.parts.named(tensor(asked.node), k)), given)

    def _if_used(self, name: str, captured: str, whole: str, k: int) -> str:
        """The gradient of a replica's own part: none where the row that it computes with is no example."""
        if self._joiner.parts.sizes is None:
            return whole
        spec = self._joiner.item.spec_of(captured)
        with fragment(self._joiner.editor, f"{name}/{k}") as f:
            value = f.input(whole, spec.dtype, spec.shape)
            made = tf.where(self._joiner.parts.is_used(f, k), value, tf.zeros_like(value))
        return f.name(made)

    def _become(self, name: str, whole: str) -> None:
        node = self._joiner.editor[name]
        dtype = node.attr["dtype"].type
        node.op = "Identity"
        node.attr.clear()
        node.attr["T"].type = dtype
        self._joiner.editor.set_inputs(name, [whole, *filter(is_control, node.input)])
