"""RecomputeBlocks: the backward pass recomputes the activations of a block when its cotangent arrives."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist.graph.control_flow import find_inside
from autodist.graph.execution_order import settle_depths
from autodist.graph.names import as_input, node_of, output_index
from autodist.graph.op_types import type_of
from autodist.graph.recomputation import (
    Recomputation,
    blocks_of_nodes,
    find_constant,
    find_recomputations,
    suffix_of_copies,
)
from autodist.graph.step import ReplicatedStep
from autodist.graph.step_editor import StepEditor
from autodist.graph.walks import reach
from autodist.kernels.base import Context, Kernel
from autodist.kernels.place.gather_layers import gathered_again
from autodist.kernels.recompute import recompute
from autodist.logs.formatting import listed, some_of

log = logging.getLogger("autodist")


@dataclass(frozen=True)
class RecomputeBlocks(Kernel[ReplicatedStep, ReplicatedStep]):
    """Frees the activations inside the strategy's blocks after the forward pass, and computes them again.

    Only the tensors that enter or leave a block stay in memory. The forward nodes that the block's part of the backward
    pass reads are copied for it, once for each replica. The copies wait for the cotangents that enter the block, so
    TensorFlow's executor cannot compute them earlier: the activations of about one block exist at a time.

        x → f → g → out,  dout, f, g → dx      becomes      x → f → g → out,  dout, x → f' → g',  dout, f', g' → dx

    Nodes that must not run twice keep their values: random ops that advance a state, reads of variables, stateful
    calls, branches and loops of TensorFlow 1. Random draws by a key run again and draw the same numbers, so no bit of
    the result changes. Parameters that are gathered again for the backward pass are read from this second gather.

    The kernel follows Replicate because each replica has its own cotangents, and because reductions within the forward
    pass are nodes there, whose results the copies read. The kernels before it analyse each value once.
    """

    name: ClassVar[str] = "recompute-blocks"
    after: ClassVar[Mapping[str, str]] = {
        "replicate": "it finds the backward pass, and each replica waits for its own cotangents",
        "gather-layers": "copies read the parameters that it gathers for the backward pass",
    }

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        if not step.backward or context.goes_through_stages(step):
            return step
        for k in reversed(range(len(step.backward))):  # a pass may read copies that a later pass makes
            step = _Pass(step, context, k).recompute()
        return replace(step, reductions=settle_depths(step.graph_index, step.reductions))


class _Pass:
    """The recomputation for one backward pass."""

    def __init__(self, step: ReplicatedStep, context: Context, position: int) -> None:
        self.step, self.context, self.position = step, context, position
        self.graph_index = step.graph_index
        self.names = {name: step.replica_of(name)[1] for name in step.graph_index.nodes}
        captured = step.backward[position]
        self.backward = reach(
            (name for name, own in self.names.items() if own in captured), self.graph_index.consumers.__getitem__
        )
        self._by_captured = {step.replica_of(name): name for name in self.names}
        self.inside = set(find_inside(self.graph_index))
        self.constant = find_constant(self.graph_index)
        self.later: dict[str, list[str]] = {}
        """The readers that wait for each gate."""
        self.block_of = blocks_of_nodes(self.names, context.plan.recomputed_blocks)
        self._entered = 0

    def recompute(self) -> ReplicatedStep:
        editor = StepEditor(self.step)
        copies = dict(self.step.copies)
        suffix = suffix_of_copies(self.position)
        for replica, names in self._names_by_replica().items():
            found = find_recomputations(self.step, self.context.plan.recomputed_blocks, self.backward, names)
            for one in self._in_backward_order(found):
                gates = self._gates_of(one)
                entries = self._entries_of(one, editor, gates, suffix)
                made = recompute(editor, one.nodes, one.readers, gates, suffix=suffix, entries=entries)
                if copies:
                    copies |= {copy: (replica, names[name]) for copy, name in made.items()}
                    copies |= {entry: (replica, entry) for entry in entries.values()}
            if replica == 0:
                _log_recomputations(found, self.step)
        return editor.to_step(copies=copies)

    def _names_by_replica(self) -> dict[int, dict[str, str]]:
        """Returns the captured name of each node that a replica computes, by replica."""
        found: dict[int, dict[str, str]] = {}
        for name, captured in self.names.items():
            if not self.step.copies or name in self.step.copies:
                found.setdefault(self.step.replica_of(name)[0], {})[name] = captured
        return found

    def _in_backward_order(self, found: Iterable[Recomputation]) -> list[Recomputation]:
        """Returns the blocks with something to recompute, in the order in which the backward pass reaches them."""
        position = {name: k for k, name in enumerate(self.graph_index.order)}
        return sorted((one for one in found if one.nodes), key=lambda one: min(map(position.__getitem__, one.readers)))

    def _gates_of(self, one: Recomputation) -> list[str]:
        """Returns the nodes that a block's copies wait for: the cotangents that enter the block.

        They are backward nodes outside of the block that lead to the readers, and that depend on no reader. Gates of
        blocks that were copied before count as dependencies, so no node waits for itself.
        """
        dependent = reach(one.readers, self._onward)
        gates: dict[str, None] = {}

        def sources(name: str) -> list[str]:
            found = (s for s in self.graph_index.sources[name] if s in self.backward and s not in self.inside)
            free = [source for source in found if source not in dependent]
            within = [source for source in free if self.block_of.get(source) == one.block and self._leads(source)]
            gates.update(dict.fromkeys(source for source in free if source not in within))
            return within

        reach(one.readers, sources)
        for gate in gates:
            self.later.setdefault(gate, []).extend(one.readers)
        return list(gates)

    def _leads(self, name: str) -> bool:
        """Returns True if a node reads a node of the backward pass."""
        return any(source in self.backward for source in self.graph_index.sources[name])

    def _entries_of(
        self, one: Recomputation, editor: StepEditor[ReplicatedStep], gates: Sequence[str], suffix: str
    ) -> dict[str, str]:
        """Adds an Identity of each tensor that enters a block, which waits for the gates; returns them by tensor.

        If copies waited for the gates, TensorFlow's optimizer would not fuse them as it fuses their originals, and the
        results would differ in their last bits. Constants need not wait.
        """
        entries: dict[str, str] = {}
        for name in dict.fromkeys(i for node in one.nodes for i in self.graph_index.inputs(node)):
            source = node_of(name)
            if source in one.nodes or source in self.constant:
                continue
            value = self._gathered_again(source) + name.removeprefix(source)
            entry, inputs = f"{source}-{self._entered}.{output_index(name)}{suffix}", [as_input(value)]
            inputs += [f"^{gate}" for gate in gates]
            entries[name] = editor.add_op("Identity", entry, inputs, tf.as_dtype(type_of(self.graph_index, name)))
        self._entered += 1
        return entries

    def _gathered_again(self, name: str) -> str:
        """Returns the node with the parameters for the backward pass, for one with those for the forward pass."""
        replica, captured = self.step.replica_of(name)
        return self._by_captured.get((replica, gathered_again(captured)), name)

    def _onward(self, name: str) -> list[str]:
        return [*self.graph_index.consumers[name], *self.later.get(name, ())]


def _log_recomputations(found: Sequence[Recomputation], step: ReplicatedStep) -> None:
    """Logs the blocks, and the ops whose values they keep."""
    names = [one.block.name for one in found if one.nodes]
    kept = Counter(step.graph_index.nodes[name].op for one in found for name in one.kept)
    if names:
        log.info("recompute: the backward pass computes %d blocks again: %s.", len(names), some_of(names))
    if kept:
        ops = listed(f"{op} ({count})" for op, count in sorted(kept.items()))
        log.info("recompute: these ops of the blocks run once, and their values are kept: %s.", ops)
