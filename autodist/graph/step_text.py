"""Steps as text: what a worker runs, and what kernels tell each other of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from autodist.graph.graph_text import sections_of_graph
from autodist.graph.in_step_all_reduce import InStepAllReduce, InStepAllReduceKind
from autodist.graph.parts import GradientCall, PendingReduction, Variable
from autodist.graph.step import Step


def text_of_step(item: Step, captured: Step) -> str:
    """What one worker runs, and where its variables are.

    Args:
        item: the rewritten step.
        captured: the step of which it was made.
    """
    variable_placements = item.replication.variable_placements if item.replication else {}
    return _text(
        {
            "runs": _runs(item),
            "inputs": [*_pairs(item.inputs), *(f"{name} has as many rows as {by}" for name, by in item.apart.items())],
            "variables": sorted(_variable(item, v) for v in item.variables),
            "placements": [_placement(item, v.name) for v in captured.variables],
            "keepers": [
                f"{name}: {k.owner}, {k.pace.value}, {k.staleness}" for name, k in sorted(variable_placements.items())
            ],
            **sections_of_graph(item.graph_def),
        }
    )


def text_of_notes(item: Step) -> str:
    """What kernels know of a step that they have not rewritten to its end."""
    made = item.replication
    return _text(
        {
            "gradients": [f"{g.variable}: {', '.join(g.tensors)} of call {g.call}" for g in item.gradients],
            "gradient calls": map(_call, item.gradient_calls),
            "whole sums": map(_whole, item.whole_sums),
            "joins": map(_join, made.joins if made else ()),
            "joined gradients": sorted(made.joined_gradients if made else ()),
        }
    )


def _text(sections: Mapping[str, Iterable[str]]) -> str:
    return "".join(f"{title}\n" + "".join(f"  {line}\n" for line in lines) for title, lines in sections.items())


def _call(call: GradientCall) -> str:
    terms = "".join(f"; {t.value} of {t.tensor} weighed by {t.seed}" for t in call.terms)
    return f"of {', '.join(call.targets)} weighed by {call.seed}{terms}"


def _whole(whole: InStepAllReduce) -> str:
    how = "" if whole.how is InStepAllReduceKind.SUM else f", {whole.how.value} along axis {whole.axis}"
    return f"{whole.node}{' of ' + whole.of if whole.of else ''}{how}"


def _join(join: PendingReduction) -> str:
    weight = f" / {join.weight}" if join.weight else ""
    return (
        f"{join.name}: {join.kind.name.lower()}, level {join.level}, depth {join.depth}, {join.merge.name.lower()} of "
        f"{', '.join(join.local)}{weight} -> {', '.join(join.result)}"
    )


def _runs(item: Step) -> Iterator[str]:
    """What is returned, in its order, and what runs without being returned."""
    made = item.replication
    yield f"returns {', '.join(item.outputs)}" + (", which counts examples" if made and made.counts_examples else "")
    yield from (f"target {name}" for name in sorted(item.targets))
    yield from (f"served {name}" for name in sorted(item.served))
    yield from (f"landed {name}" for name in sorted(item.flush_targets))
    yield from (f"initially {key}: {name}" for key, name in sorted(item.initializers.items()))
    if made is not None and made.even_parts is not None:
        yield f"needs even parts: {made.even_parts}"


def _pairs(mapping: Mapping[str, object]) -> Iterator[str]:
    return (f"{name}: {value}" for name, value in mapping.items())


def _variable(item: Step, variable: Variable) -> str:
    owner = item.owners.get(variable.name)
    told = f"{variable.name}: {variable.dtype.name}{list(variable.shape)} in {variable.handle}"
    return f"{told} of {owner}" if owner else told


def _placement(item: Step, name: str) -> str:
    found = item.placement(name)
    return f"{name}: cut {found.cut}, owners {found.owners}, copies {found.copies}"
