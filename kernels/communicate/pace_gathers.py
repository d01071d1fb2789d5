"""Gathers of layers wait for the reduced gradients of earlier layers."""

from __future__ import annotations

from autodist.graph.names import is_control, node_of
from autodist.graph.ops import Trait, having
from autodist.graph.step import ReplicatedStep
from autodist.graph.step_editor import StepEditor
from autodist.kernels.communicate.buckets import Bucket
from autodist.kernels.place.gather_layers import GATHER

_PICKS = having(Trait.PICKS)


class PacedGathers:
    """Makes this worker's reads of layers that wait for a gradient wait for its sum over all workers.

    `GatherLayers` lets the reads of a layer in the backward pass wait for the gradients of a layer after it. A gradient
    stays in memory as a whole until the other workers have received their shards. With this, a worker is ahead of its
    messages by no more layers than the strategy prefetches.

        g → read(v)    becomes    g0 + g1 → read(v)

    Args:
        step: the step before gradients are sent.
    """

    def __init__(self, step: ReplicatedStep) -> None:
        self._reads: dict[str, list[str]] = {}
        for node in step.graph_def.node:
            if GATHER in node.attr:
                for gate in filter(is_control, node.input):
                    self._reads.setdefault(step.replica_of(node_of(gate))[1], []).append(node.name)
        self._gradients: dict[str, set[str]] = {}
        for gradient in step.gradients if self._reads else ():
            names = {node_of(name) for name in gradient.tensors}
            split = [name for name in names if step.graph_index.nodes[name].op in _PICKS]  # into shards
            names.update(source for name in split for source in step.graph_index.data[name])
            self._gradients[gradient.variable] = names

    def pace(self, bucket: Bucket) -> bool:
        """Returns True if reads may wait for a bucket: others wait for the gradients of several layers."""
        return len(bucket.reductions) == 1 and bool(self._waiting(bucket))

    def wait(self, editor: StepEditor[ReplicatedStep], bucket: Bucket, arrived: str) -> None:
        """Makes the reads that wait for the gradient in a bucket wait for its sum, the node `arrived`."""
        for read in self._waiting(bucket):
            editor.add_control(read, [arrived])

    def _waiting(self, bucket: Bucket) -> list[str]:
        gradients = self._gradients.get(bucket.reductions[0].variable or "", ())
        return [read for gradient in gradients for read in self._reads.get(gradient, ())]
