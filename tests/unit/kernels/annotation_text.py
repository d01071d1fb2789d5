"""Annotations as text, in the notation of a step's dump (`autodist.sharding.text`).

An annotation without a place "(…)" is written "here", which texts leave out.

    mesh mesh = {a: 2, b: 2}
    variable kernel: [–, b] (cluster.yml:5)
    constraint c: [a, ?] on {a: 2, b: 2}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import tensorflow as tf

from autodist.graph.parts import Variable
from autodist.sharding import (
    Annotations,
    Constraint,
    DataFlowEdge,
    ManualRegion,
    Mesh,
    Origin,
    Sharding,
    ShardingGroup,
    lines_of,
)

HERE = Origin("here")
_WORDS = "variable|constraint|tensor|group|region|input|output|body|edge|barrier|copy|whole|missing"
_LINE = re.compile(rf"(mesh \S+ = {{.*|({_WORDS}) .*)")


def text_of_annotations(annotations: Annotations) -> list[str]:
    """Returns the annotations as lines."""
    return [line.replace(f" ({HERE})", "") for line in lines_of(annotations)]


def split_annotations(lines: Sequence[str]) -> tuple[list[str], Annotations | None]:
    """Returns the lines that are no annotations, and the annotations of the others; None if there are none."""
    found = [line for line in lines if _LINE.fullmatch(line)]
    return [line for line in lines if line not in found], annotations_from(found) if found else None


def variables_of(graph_def: tf.compat.v1.GraphDef) -> tuple[Variable, ...]:
    """Returns a variable for each VarHandleOp, under the name of the node."""
    return tuple(
        Variable(
            node.name,
            node.name,
            tuple(tf.TensorShape(node.attr["shape"].shape).as_list()),
            tf.as_dtype(node.attr["dtype"].type),
            trainable=True,
        )
        for node in graph_def.node if node.op == "VarHandleOp"
    )  # fmt: skip


def annotations_from(lines: Iterable[str]) -> Annotations:
    """Returns the annotations that lines describe."""
    made = Annotations({})
    for line in lines:
        made = _with(made, *line.split(" ", 1))
    return made


def _with(made: Annotations, word: str, rest: str) -> Annotations:
    rest, origins = _origins(rest)
    origin = origins[0] if origins else HERE
    match word:
        case "mesh":
            name, _, text = rest.partition(" = ")
            named = {**made.mesh_origins, name: origin}
            return replace(made, meshes={**made.meshes, name: mesh_from(text)}, mesh_origins=named)
        case "variable" | "constraint" | "tensor":
            name, _, text = rest.partition(": ")
            known = getattr(made, f"{word}s")
            return replace(made, **{f"{word}s": {**known, name: _constraint(text, origin)}})
        case "missing":
            name, _, text = rest.partition(": ")
            return replace(made, missing={**made.missing, name: _constraint(text, origin)})
        case "group":
            number, _, text = rest.partition(": ")
            group = ShardingGroup(tuple(text.split(", ")), tuple(origins or [HERE]))
            return replace(made, groups={**made.groups, int(number): group})
        case "region":
            name, _, axes = rest.partition(" over ")
            region = ManualRegion(tuple(filter(None, axes.split(", "))), {}, {}, frozenset(), origin)
            return replace(made, regions={**made.regions, name: region})
        case "input" | "output":
            head, _, text = rest.partition(": ")
            marker, _, name = head.partition(" of ")
            region = made.regions[name]
            markers = {**getattr(region, f"{word}s"), marker: _constraint(text, origin)}
            return replace(made, regions={**made.regions, name: replace(region, **{f"{word}s": markers})})
        case "body":
            name, _, nodes = rest.removeprefix("of ").partition(": ")
            region = replace(made.regions[name], body=frozenset(nodes.split(", ")))
            return replace(made, regions={**made.regions, name: region})
        case "edge":
            return replace(made, edges=(*made.edges, _edge(rest, origin)))
        case "barrier":
            return replace(made, barriers=made.barriers | {rest})
        case _:
            name, _, reason = rest.partition(": ")
            return replace(made, whole={**made.whole, name: reason})


def mesh_from(text: str) -> Mesh:
    """Returns a mesh: "{a: 2, b: 2}" or "{a: 2} over 1, 0"."""
    axes, _, places = text.partition(" over ")
    pairs = (pair.split(": ") for pair in axes.strip("{}").split(", ") if pair)
    return Mesh.of({name: int(size) for name, size in pairs}, map(int, filter(None, places.split(", "))))


def _origins(text: str) -> tuple[str, list[Origin]]:
    found: list[Origin] = []
    while match := re.fullmatch(r"(.*) \(([^()]*)\)", text):
        text = match[1]
        found.insert(0, Origin(match[2]))
    return text, found


def _constraint(text: str, origin: Origin) -> Constraint:
    sharding, _, on = text.partition(" on ")
    if on.startswith("{"):
        return Constraint(Sharding.parse(sharding), origin, mesh_from(on))
    return Constraint(Sharding.parse(sharding, on or "mesh"), origin)


def _edge(text: str, origin: Origin) -> DataFlowEdge:
    owner, _, flow = text.partition(": ")
    found = re.fullmatch(r"(.*?) ?→ ?(.*?)( ?\[.*)?", flow)
    assert found, f"{text!r} is no edge"
    sources, targets = (tuple(filter(None, part.split(", "))) for part in found.group(1, 2))
    return DataFlowEdge(owner, sources, targets, _constraint(found[3].strip(), origin) if found[3] else None)
