"""Requirements on the gradients of a step: of a TensorFlow 2 function, or of the graph of a session."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from autodist.capture.gradients import RecordedGradientCall
from autodist.capture.graph_mode import CapturedGraph, handle_name
from autodist.capture.graphs import is_of_function
from autodist.errors import CaptureError
from autodist.graph.applied import find_fed_updates
from autodist.graph.effects import group_by_handle
from autodist.graph.find_stages import find_stages
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having
from autodist.graph.step import CapturedStep
from autodist.graph.walks import reach
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.placement.partitioning import listed

log = logging.getLogger("autodist")

_CONTROL_FLOW = sorted(having(Trait.LOOP | Trait.BRANCH))
_ACCUMULATORS = having(Trait.ACCUMULATOR)

_NONE = (
    "the step makes no gradient of a variable, so there is nothing to synchronise. Compute gradients with "
    "tf.GradientTape or tf.gradients inside the step, and apply them there. A jacobian (tape.jacobian) is no gradient "
    "that replicas could add up: to scale or clip the gradient of each example, compute only the scales from the "
    "examples' gradients (by tf.vectorized_map of a function that returns the norm of one example's gradient), and use "
    "tape.gradient of tf.reduce_mean(tf.stop_gradient(scales) * losses). A function that only evaluates must not write "
    "trainable variables from its batch; one that keeps sums and means of the batch (k-means, expectation "
    "maximisation) has to make their variables with trainable=False. A step that applies gradients which an earlier "
    "step has summed in variables takes no batch: it writes values computed from variables and numbers alone."
)
_UNUSED = (
    "the step computes gradients but writes no variable from them. Apply them to their variables inside the step "
    "(optimizer.apply_gradients)."
)


def require_synchronizable(noted: Sequence[RecordedGradientCall], calls: Sequence[RecordedGradientCall]) -> None:
    """Checks that gradients are computed where they can be synchronized.

    Args:
        noted: all recorded calls.
        calls: those in the step's own graph.

    Raises:
        CaptureError: the step computes gradients in a loop or a branch only.
    """
    if any(c.pairs for c in calls):
        return
    if any(c.pairs for c in noted if is_of_function(c.graph) and c.graph.outer_graph is not None):
        raise CaptureError(
            "the step computes its gradients inside a tf.while_loop or tf.switch_case, which cannot be synchronised. "
            "Move the loop out of the step: call the step once for each batch. Move tape.gradient out of the "
            "tf.switch_case, or use tf.cond; optimizer.apply_gradients may stay in it."
        )


def require_applied(step: CapturedStep, calls: Sequence[RecordedGradientCall]) -> None:
    """Checks that gradients are applied, or that the step trains nothing.

    A step without gradients may compute trainable variables from other variables, such as gradients that earlier steps
    have accumulated, since all replicas then write equal values.

    Raises:
        CaptureError: gradients are not applied, or trainable variables are written from the batch without gradients.
    """
    if step.gradients:
        return
    if any(c.pairs for c in calls):
        raise CaptureError(_UNUSED)
    written = (step.by_handle[handle] for handle in _written_of_batch(step))
    if any(v.trainable and not v.dtype.is_integer for v in written):  # a counter is trainable by default
        raise CaptureError(_NONE)


def _written_of_batch(step: CapturedStep) -> set[str]:
    """Returns the VarHandleOps of the variables whose new values depend on the batch, or are random."""
    graph_index = step.graph_index
    split = map(node_of, step.batch_axes)
    drawn = [name for name, node in graph_index.nodes.items() if node.op in having(Trait.SEEDED | Trait.GENERATOR)]
    effects = graph_index.effects
    return {
        handle
        for name in reach([*split, *drawn], graph_index.consumers.__getitem__)
        if name in effects
        for handle in effects[name].writes
    }


def require_training(captured: CapturedGraph, whole: CapturedStep) -> None:
    """Checks that the graph updates variables by gradients, computed in it or fed.

    Raises:
        CaptureError: no variable is updated by a gradient.
    """
    if whole.gradients or find_fed_updates(whole):
        return
    accumulators = [op.name for op in captured.graph.get_operations() if op.type in _ACCUMULATORS]
    if accumulators:
        raise CaptureError(
            f"the graph adds up gradients in accumulators ({listed(accumulators)}), as SyncReplicasOptimizer does, "
            "which wait for workers of another kind. Use the optimizer that it wraps, without its hook: AutoDist adds "
            "up the gradients of all replicas before every update."
        )
    looped = _trained_in_control_flow(whole)
    if looped:
        raise CaptureError(
            f"the graph trains {listed(looped)} inside a tf.while_loop or tf.cond, whose gradients cannot be "
            "synchronised. Build the gradients and the train operation outside of it, and run them once for each batch."
        )
    handles = {handle_name(source) for call in captured.calls for source, _ in call.pairs}
    made = [v.name for v in whole.variables if v.handle in handles]
    if made:
        raise CaptureError(
            f"the graph makes gradients ({listed(made)}) and writes no variable of them, so there is nothing "
            "to synchronise. Build the optimizer's train operation (apply_gradients) before the session, from these "
            "gradients, or from placeholders of the variables' shapes to which the fetched gradients are fed."
        )
    raise CaptureError(
        "the graph makes no gradient, so there is nothing to synchronise. Build the optimizer's train operation within "
        "the scope, before the session; evaluation alone needs no distributed session."
    )


def _trained_in_control_flow(whole: CapturedStep) -> list[str]:
    """Returns the names of the trainable variables that loops and branches write."""
    index = whole.graph_index
    effects = [index.effects[node.name] for node in index.of_op(*_CONTROL_FLOW) if node.name in index.effects]
    written = {handle for effect in effects for handle in effect.writes}
    return [v.name for v in whole.variables if v.handle in written and v.trainable and not v.dtype.is_integer]


def warn_unordered_updates(whole: CapturedStep) -> None:
    """Warns if an optimizer for eager mode is used in a graph: its returned operation does not wait for its writes.

    The gradient then reaches only slots, and the update of the variable reads these at any time. A graph that
    accumulates gradients in one run and applies them in another looks alike, but there another operation clears the
    accumulators.
    """
    stages = find_stages(whole)
    if not stages.gradients or len(stages.unapplied_gradients) < len(stages.gradients):
        return
    variable = whole.by_name[stages.gradients[0].variable]
    writes = group_by_handle((write, stages.effects[write].writes) for write in stages.writes)
    behind = reach(writes.get(variable.handle, ()), whole.graph_index.data.__getitem__)
    read = {handle for name in behind if name in stages.effects for handle in stages.effects[name].reads}
    kept = {h for h in read if not stages.update.isdisjoint(writes.get(h, ()))}
    slots = [h for h in sorted(kept) if len(set(writes[h]) - stages.update) <= 1]  # the initializer alone
    if slots:
        log.warning(
            "the update of %s reads %s, which the gradient updates, and nothing orders the two: TensorFlow runs "
            "them in any order, on one device as well. tf_keras's optimizers, except those of "
            "tf_keras.optimizers.legacy, are written for functions. Call apply_gradients in one: "
            "tf.function(lambda *g: optimizer.apply_gradients(zip(g, variables)))(*gradients).",
            variable.name, whole.by_handle[slots[0]].name, extra=ALIKE_EVERYWHERE,
        )  # fmt: skip
