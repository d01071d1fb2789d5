"""The training of a session's graph: gradients that are computed in it, or fed to it."""

from __future__ import annotations

import logging

from autodist.capture.graph_mode import CapturedGraph, handle_name
from autodist.errors import CaptureError
from autodist.graph.applied import find_fed_updates
from autodist.graph.find_stages import find_stages
from autodist.graph.placement import listed
from autodist.graph.step import CapturedStep
from autodist.graph.walks import reach
from autodist.logs.terminal import ALIKE_EVERYWHERE

log = logging.getLogger("autodist")


def require_training(captured: CapturedGraph, whole: CapturedStep) -> None:
    """Checks that the graph updates variables by gradients, computed in it or fed.

    Raises:
        CaptureError: no variable is updated by a gradient.
    """
    if whole.gradients or find_fed_updates(whole):
        return
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
    writes: dict[str, list[str]] = {}
    for write in stages.writes:
        for handle in stages.effects[write].writes:
            writes.setdefault(handle, []).append(write)
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
