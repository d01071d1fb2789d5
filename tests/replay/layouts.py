"""The layout of each tensor of a stored step: its variation over the replicas, as inferred by propagation.

The text does not use the class names of `autodist.layout`, so that renaming these does not change it.
"""

from __future__ import annotations

from functools import cache

from autodist.graph.flows import flows_of
from autodist.graph.step import Step
from autodist.layout import (
    ByPosition,
    Elements,
    Examples,
    Kind,
    Mean,
    PerExample,
    Reduced,
    Replicated,
    Scalar,
    Sum,
    Total,
    Unknown,
    Weight,
)
from tests.replay.rewriting import load

PREFIX = "layouts/"
"""Begins the names of recorded layouts; the name of the stored step follows."""


@cache
def layouts_of(step: str) -> str:
    """Returns a line for each tensor of a stored step: "node:0  sharded(0)".

    Args:
        step: name of the stored step.
    """
    item = load(step).step
    flows = flows_of(item)
    lines = []
    for node in item.graph_def.node:
        lines += [f"{name}  {_layout(flows.kind(name))}\n" for name in _tensors(item, node.name)]
    return "".join(lines)


def _tensors(step: Step, node: str) -> list[str]:
    """Returns the names of a node's outputs."""
    names: list[str] = []
    while True:
        name = f"{node}:{len(names)}"
        try:
            step.spec_of(name)
        except (KeyError, IndexError):
            return names
        names.append(name)


def _layout(kind: Kind) -> str:
    match kind:
        case Replicated():
            return "replicated"
        case PerExample(axis):
            text = f"sharded({axis})"
        case Sum():
            text = "partial(sum)"
        case Mean(weight):
            text = f"partial(mean by {_weight(weight)})"
        case Reduced(by=by):
            text = f"partial({by.name.lower()})"
        case ByPosition():
            return "unknown, rows by position"
        case Unknown():
            return "unknown"
    return text + (f", examples mixed at {kind.mixed_at}" if kind.mixed_at else "")


def _weight(weight: Weight) -> str:
    match weight:
        case Examples():
            return "examples"
        case Elements(tensor):
            return f"elements of {tensor}"
        case Scalar(tensor):
            return tensor
        case Total(tensor, inner):
            return f"{tensor} * {_weight(inner)}"
