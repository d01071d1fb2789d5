"""Requirements on the gradients of a TensorFlow 2 step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autodist.capture.gradients import RecordedGradientCall, is_of_function
from autodist.errors import CaptureError
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having
from autodist.graph.step import CapturedStep
from autodist.graph.walks import reach

_NONE = (
    "the step makes no gradient of a variable, so there is nothing to synchronise. Compute gradients with "
    "tf.GradientTape or tf.gradients inside the step, and apply them there. A jacobian (tape.jacobian) is no gradient "
    "that replicas could add up: to scale or clip the gradient of each example, use it for the scales only, and "
    "tape.gradient of tf.reduce_mean(tf.stop_gradient(scales) * losses). A function that only evaluates must not write "
    "trainable variables from its batch; one that keeps sums and means of the batch (k-means, expectation "
    "maximisation) has to make their variables with trainable=False. A step that applies gradients which an earlier "
    "step has summed in variables takes no batch: it writes values computed from variables and numbers alone."
)
_UNUSED = (
    "the step computes gradients but writes no variable from them. Apply them to their variables inside the step "
    "(optimizer.apply_gradients)."
)


@dataclass(frozen=True)
class TrainingRequirements:
    """Requirements on the gradients of a step.

    Attributes:
        needs_gradients: True if a step without gradients is an error.
        may_evaluate: True to accept a step that computes no gradient and writes no trainable variable from its batch.
            It may compute trainable variables from other variables, such as gradients that earlier steps have
            accumulated, since all replicas then write equal values.
    """

    needs_gradients: bool = True
    may_evaluate: bool = False

    def require_calls(self, noted: Sequence[RecordedGradientCall], calls: Sequence[RecordedGradientCall]) -> None:
        """Checks that gradients are computed where they can be synchronized.

        Args:
            noted: all recorded calls.
            calls: those in the step's own graph.

        Raises:
            CaptureError: the step computes no gradients, or computes them in a loop or a branch.
        """
        if not self.needs_gradients or any(c.pairs for c in calls):
            return
        if any(c.pairs for c in noted if is_of_function(c.graph) and c.graph.outer_graph is not None):
            raise CaptureError(
                "the step computes its gradients inside a tf.while_loop or tf.cond, which cannot be synchronised. Move "
                "the loop out of the step: call the step once for each batch."
            )
        if not self.may_evaluate:
            raise CaptureError(_NONE)

    def require_training(self, step: CapturedStep, calls: Sequence[RecordedGradientCall]) -> None:
        """Checks that gradients are applied, or that the step trains nothing and may do so.

        Raises:
            CaptureError: gradients are not applied, or trainable variables are written from the batch without
                gradients.
        """
        if not self.needs_gradients or step.gradients:
            return
        if any(c.pairs for c in calls):
            raise CaptureError(_UNUSED)
        written = (step.by_handle[handle] for handle in _written_of_batch(step))
        if any(v.trainable and not v.dtype.is_integer for v in written):  # a counter is trainable by default
            raise CaptureError(_NONE)


def _written_of_batch(step: CapturedStep) -> set[str]:
    """Returns the VarHandleOps of the variables whose new values depend on the batch, or are random."""
    graph_index = step.graph_index
    split = [node_of(name) for name, axis in step.inputs.items() if axis is not None]
    drawn = [name for name, node in graph_index.nodes.items() if node.op in having(Trait.SEEDED | Trait.GENERATOR)]
    effects = graph_index.effects
    return {
        handle
        for name in reach([*split, *drawn], graph_index.consumers.__getitem__)
        if name in effects
        for handle in effects[name].writes
    }


TRAINS = TrainingRequirements()
"""The requirements on a step that trains."""
