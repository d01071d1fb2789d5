"""Annotations as text: a line for each, with the place where it is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autodist.sharding.annotations import Annotations, Constraint, ManualRegion, Origin


def lines_of(annotations: Annotations) -> Iterator[str]:
    """Yields the annotations of a step, for its dump.

    mesh mesh = {a: 2, b: 2} (cluster.yml:3)
    variable kernel: [–, b] (cluster.yml:5)
    edge kernel: AddV2:0 → Read:0 [–, b] (cluster.yml:5)
    """
    for name, mesh in annotations.meshes.items():
        origin = annotations.mesh_origins.get(name)
        yield f"mesh {name} = {mesh}{_places(origin)}"
    for title in ("variable", "constraint", "tensor"):
        yield from (f"{title} {name}: {_text(one)}" for name, one in getattr(annotations, f"{title}s").items())
    for number, group in annotations.groups.items():
        yield f"group {number}: {', '.join(group.members)}{_places(*group.origins)}"
    for name, region in annotations.regions.items():
        yield from _region(name, region)
    for edge in annotations.edges:
        ends = ", ".join(edge.sources), "→", ", ".join(edge.targets)
        shown = _text(edge.constraint) if edge.constraint else ""
        yield " ".join(filter(None, (f"edge {edge.owner}:", *ends, shown)))
    yield from (f"barrier {name}" for name in sorted(annotations.barriers))
    yield from (f"whole {name}: {reason}" for name, reason in annotations.whole.items())
    yield from (f"missing {name}: {_text(one)}" for name, one in annotations.missing.items())


def _region(name: str, region: ManualRegion) -> Iterable[str]:
    over = f" over {', '.join(region.axes)}" if region.axes else ""
    yield f"region {name}{over}{_places(region.origin)}"
    for title, markers in (("input", region.inputs), ("output", region.outputs)):
        yield from (f"{title} {marker} of {name}: {_text(one)}" for marker, one in markers.items())
    for node, collective in region.collectives.items():
        operand = "any" if collective.operand is None else collective.operand
        kind = collective.kind or "gradient of a collective"
        yield f"{kind} {node} of {name}: {operand} → {_text(collective.result)}"
    if region.body:
        yield f"body of {name}: {', '.join(sorted(region.body))}"


def _text(one: Constraint) -> str:
    on = one.mesh or (one.sharding.mesh if one.sharding.mesh != "mesh" else None)
    return f"{one.sharding}{f' on {on}' if on is not None else ''}{_places(one.origin)}"


def _places(*origins: Origin | None) -> str:
    return "".join(f" ({origin})" for origin in origins if origin is not None)
