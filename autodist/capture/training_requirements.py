"""What is asked of the gradients of a TensorFlow 2 step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.capture.gradients import NotedCall
from autodist.errors import CaptureError
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having
from autodist.graph.step import Step
from autodist.graph.walks import reach

_NONE = (
    "the step makes no gradient of a variable, so there is nothing to synchronise. Compute gradients with "
    "tf.GradientTape or tf.gradients inside the step, and apply them there. A jacobian (tape.jacobian) is no gradient "
    "that replicas could add up: where it scales or clips that of each example, take it for the scales alone, and "
    "tape.gradient of tf.reduce_mean(tf.stop_gradient(scales) * losses). A function that only evaluates writes no "
    "trainable variable of its batch, nor does one that keeps sums and means of the batch (k-means, expectation "
    "maximisation): make theirs with trainable=False. A step that applies gradients which an earlier step has added up "
    "in variables takes no batch: what it writes is made of variables and numbers alone."
)
_UNUSED = (
    "the step computes gradients but writes no variable from them. Apply them to their variables inside the step "
    "(optimizer.apply_gradients)."
)


@dataclass(frozen=True)
class TrainingRequirements:
    """What is asked of the gradients of a step.

    Attributes:
        needs_gradients: whether a step without gradients is an error.
        may_evaluate: whether a step passes that makes no gradient and writes no trainable variable of its batch. It may
            write one of other variables, which all replicas do alike: of gradients that an earlier step has added up.
    """

    needs_gradients: bool = True
    may_evaluate: bool = False

    def require_calls(self, noted: Sequence[NotedCall], calls: Sequence[NotedCall]) -> None:
        """Passes if gradients were made where they can be synchronised.

        Args:
            noted: all calls that were noted.
            calls: those of the step's own graph.

        Raises:
            CaptureError: there are none, or they stand in a loop or a branch.
        """
        if not self.needs_gradients or any(c.pairs for c in calls):
            return
        if any(
            c.pairs for c in noted if isinstance(c.graph, tf.__internal__.FuncGraph) and c.graph.outer_graph is not None
        ):
            raise CaptureError(
                "the step makes its gradients inside a tf.while_loop or tf.cond, which cannot be synchronised. Move "
                "the loop out of the step: call the step once for each batch."
            )
        if not self.may_evaluate:
            raise CaptureError(_NONE)

    def require_training(self, item: Step, calls: Sequence[NotedCall]) -> None:
        """Passes if gradients are applied, or the step trains nothing and may.

        Raises:
            CaptureError: gradients are not applied, or trainable variables are written of the batch without any.
        """
        if not self.needs_gradients or item.gradients:
            return
        if any(c.pairs for c in calls):
            raise CaptureError(_UNUSED)
        written = (item.by_handle[handle] for handle in _written_of_batch(item))
        if any(v.trainable and not v.dtype.is_integer for v in written):  # a counter is trainable by default
            raise CaptureError(_NONE)


def _written_of_batch(item: Step) -> set[str]:
    """The VarHandleOps of the variables whose new values depend on the batch, or are drawn."""
    graph_index = item.graph_index
    split = [node_of(name) for name, axis in item.inputs.items() if axis is not None]
    drawn = [name for name, node in graph_index.nodes.items() if node.op in having(Trait.SEEDED | Trait.GENERATOR)]
    effects = graph_index.effects
    return {
        handle
        for name in reach([*split, *drawn], graph_index.consumers.__getitem__)
        if name in effects
        for handle in effects[name].writes
    }


TRAINS = TrainingRequirements()
"""Of a step that trains."""
