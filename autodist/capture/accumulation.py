"""Gradients that one run of a session adds up in variables, for another run to apply."""

from __future__ import annotations

from dataclasses import dataclass

from autodist.capture.gradients import NotedCall
from autodist.capture.graph_mode import CapturedGraph, handle_name, noted_nodes
from autodist.errors import CaptureError
from autodist.graph.flows import flows_of
from autodist.graph.item import GraphItem
from autodist.graph.names import node_of
from autodist.graph.propagation import Examples, Mean
from autodist.graph.walks import reach

_MEND = (
    "AutoDist combines gradients in the run that applies them. Apply them in the run that makes them, with a batch as "
    "large as the sum of those that were gathered; or gather them in the optimizer, by Keras's "
    "gradient_accumulation_steps= under fit or @ad.function."
)


@dataclass(frozen=True)
class Accumulation:
    """A gradient that is kept in another variable than the one that it is of.

    Attributes:
        variable: whose gradient it is.
        kept_in: the variable that is written.
        call: in which it was made.
    """

    variable: str
    kept_in: str
    call: NotedCall


def find_accumulations(captured: CapturedGraph, item: GraphItem) -> list[Accumulation]:
    """The gradients of a run, or of a whole graph, that reach writes of other variables and none of their own."""
    names = {v.handle: v.name for v in captured.variables}
    trained = {(g.variable, node_of(t)) for g in item.gradients for t in g.tensors}
    found = []
    for call in captured.calls:
        for source, gradient in call.pairs:
            variable = names.get(handle_name(source) or "")
            nodes = [name for name in noted_nodes(gradient) if name in item.wiring.nodes]
            if variable is None or any((variable, name) in trained for name in nodes):
                continue
            reached = reach(nodes, lambda n: [c for c in item.wiring.consumers[n] if n in item.wiring.data[c]])
            effects = [item.wiring.effects[name] for name in sorted(reached) if name in item.wiring.effects]
            written = [names[handle] for effect in effects for handle in sorted(effect.writes) if handle in names]
            found += [Accumulation(variable, name, call) for name in dict.fromkeys(written) if name != variable]
    return found


def require_applied(captured: CapturedGraph, whole: GraphItem) -> None:
    """Passes if a gradient of the graph reaches a write of its own variable.

    Raises:
        CaptureError: none does.
    """
    if whole.gradients:
        return
    kept = find_accumulations(captured, whole)
    if kept:
        raise CaptureError(
            f"the graph gathers gradients over several runs: that of {kept[0].variable} is kept in {kept[0].kept_in}, "
            f"and no run both makes a gradient and applies it, so there is nothing to synchronise. {_MEND}"
        )
    raise CaptureError(
        "the graph makes no gradient that is written to its variable, so there is nothing to synchronise. Build the "
        "optimizer's train operation within the scope, before the session."
    )


def require_means(captured: CapturedGraph, item: GraphItem) -> None:
    """Passes if the gradients that a run keeps, which applies none, are those of means over the examples.

    What the replicas leave in a variable is joined by its mean, weighed by their numbers of examples.

    Raises:
        CaptureError: they are those of a sum, say, of which the mean of what replicas keep is a part alone.
    """
    kept = [] if item.gradients else find_accumulations(captured, item)
    if not kept:
        return
    flows = flows_of(item)
    for one in kept:
        targets = [t.name for t in one.call.targets if node_of(t.name) in item.wiring.nodes]
        if not targets or any(flows.kind(t) != Mean(Examples()) for t in targets):
            raise CaptureError(
                f"this run keeps the gradient of {one.variable} in {one.kept_in} for another run to apply, and it is "
                f"the gradient of {targets[0] if targets else 'a value'}, which is not a mean over the examples: what "
                f"the replicas keep cannot be joined. {_MEND} A mean over the examples can be kept."
            )
