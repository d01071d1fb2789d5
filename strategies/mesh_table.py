"""Tables of a step on a mesh: the part of each variable that a place holds, and the transfers between places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from rich.table import Table

from autodist.graph.partial_count import PartialCount
from autodist.logs.formatting import counted, listed, readable_bytes, readable_shape
from autodist.logs.tables import NARROW, text_table
from autodist.proto import strategy_pb2
from autodist.sharding import Constraint, Mesh, Sharding
from autodist.strategies.stage_table import bytes_text
from autodist.strategies.variables import GraphLike, VariableLike, synced_variables
from autodist.synchronizers import mesh_of

MOST_ROWS = 40
"""Of variables, the largest; the others are counted."""

PART_HEADS = ("variable", "shape", "bytes", "sharding", "from", "at each place", "slots at each place")
NARROW_HEADS = ("variable", "sharding", "at each place")
COLLECTIVE_HEADS = ("collective", "over", "calls a step", "a place sends")

PROPAGATED = "propagation"
"""The origin of a sharding that neither the strategy nor the script requests."""

WHOLE = "whole"

GRADIENT_SUM = "sum of gradients"
"""The kind of the sums of gradients over the data axis."""

SLICES = "gradients and values of slices"
"""The kind of the messages for variables that the data axis divides: their gradients are summed at the owners of the
slices, and the owners send their values."""


@dataclass(frozen=True)
class PartFigures:
    """The part of a variable or slot that a place holds; of parts of unequal lengths, the longest.

    Attributes:
        name: of the variable.
        shape: of the whole variable.
        bytes: of the whole variable.
        sharding: its text form; "whole" if no axis divides it.
        origin: the pattern or the line that requests the sharding, or "propagation"; of a whole variable, the
            reason, or empty.
        part_shape: the shape of the part.
        part_bytes: the bytes of the part.
        slots: the parts of the optimizer's slots for the variable.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int
    sharding: str
    origin: str
    part_shape: tuple[int, ...]
    part_bytes: int
    slots: tuple[PartFigures, ...] = ()

    @property
    def text(self) -> str:
        """The sharding and its origin."""
        return f"{self.sharding} from {self.origin}" if self.origin else self.sharding


@dataclass(frozen=True)
class CollectiveFigures:
    """The collectives of one kind in a step.

    Attributes:
        kind: "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "sum of gradients" or "gradients and values of
            slices".
        axes: the axes along which the places of a row differ.
        calls: the number of collectives; of sums of gradients and of slices, the number of variables.
        sent: bytes that a place sends for all of them.
    """

    kind: str
    axes: tuple[str, ...]
    calls: int
    sent: PartialCount


@dataclass(frozen=True)
class MeshFigures:
    """The figures of a step on a mesh.

    Attributes:
        mesh: the axes and their sizes.
        places: the number of places.
        workers: the number of workers.
        variables: the trained variables.
        held: bytes of all variables that each worker holds, including optimizer slots; None: not known.
        collectives: the transfers of a step between places; None: not known.
        examples: the number of examples of a place in the first batch; None: not known.
        unused: the patterns and annotations that apply to no tensor of the step.
        stages: the number of pipeline stages that hold the variables; 1: each place holds a part of each variable.
    """

    mesh: str
    places: int
    workers: int
    variables: tuple[PartFigures, ...]
    held: int | None = None
    collectives: tuple[CollectiveFigures, ...] | None = None
    examples: int | None = None
    unused: tuple[str, ...] = ()
    stages: int = 1

    @property
    def title(self) -> str:
        """The numbers of places and workers, and the mesh."""
        return f"{counted(self.places, 'place')} on {counted(self.workers, 'worker')}, mesh {self.mesh}"

    @property
    def caption(self) -> str:
        """The bytes of trained variables at each place, and the annotations that apply to nothing."""
        held, whole = (sum(size) for size in zip(*((v.part_bytes, v.bytes) for v in self.variables), strict=True))
        holders = "each place holds" if self.stages == 1 else f"the {self.stages} stages of a pipeline hold"
        text = f"{holders} {readable_bytes(held)} of {readable_bytes(whole)} of trained variables"
        if self.held is not None:
            most = "each worker" if self.stages == 1 else "a worker at most"
            text += f", {most} {readable_bytes(self.held)} with slots"
        if len(self.variables) > MOST_ROWS:
            text += f"; `autodist plan --json` lists {counted(len(self.variables) - MOST_ROWS, 'smaller variable')}"
        return f"{text}; no tensor of the step is reached by {listed(self.unused)}" if self.unused else text

    @property
    def batch(self) -> str:
        """The batch that the bytes of collectives refer to."""
        if self.examples is None:
            return "bytes without those of tensors whose shapes depend on the batch, as it is not known"
        return f"bytes of a place with {counted(self.examples, 'example')}"


def requested_figures(
    strategy: strategy_pb2.Strategy, step: GraphLike, script: Mapping[str, Constraint] | None = None
) -> MeshFigures:
    """Returns the figures that follow from the requested shardings alone, before propagation.

    Args:
        strategy: a strategy with a mesh.
        step: the captured step.
        script: the shardings that the script requests, by variable.
    """
    mesh = mesh_of(strategy)
    shardings = {name: one.sharding for name, one in (script or {}).items()}
    shardings |= {one.variable: Sharding.parse(one.sharding) for one in strategy.mesh.variables}
    origins = {name: str(one.origin) for name, one in (script or {}).items()}
    origins |= {one.variable: one.origin for one in strategy.mesh.variables}
    workers = len({place.worker for place in strategy.mesh.places})
    stages = len(strategy.pipeline.stages) or 1
    return MeshFigures(str(mesh), mesh.size, workers, part_figures(mesh, step, shardings, origins), stages=stages)


def part_figures(
    mesh: Mesh,
    step: GraphLike,
    shardings: Mapping[str, Sharding],
    origins: Mapping[str, str],
    slots: Mapping[str, Sequence[VariableLike]] | None = None,
) -> tuple[PartFigures, ...]:
    """Returns the parts of the trained variables.

    Args:
        mesh: the mesh.
        step: the captured step.
        shardings: of the divided variables.
        origins: of the requested shardings, by variable; the other shardings come from propagation.
        slots: the optimizer's slots of each variable.
    """
    by_name = {variable.name: variable for variable in step.variables}

    def figures(variable: VariableLike, own: Sequence[VariableLike] = ()) -> PartFigures:
        slot_figures = tuple(figures(slot) for slot in own)
        return _part(mesh, variable, shardings.get(variable.name), origins.get(variable.name, PROPAGATED), slot_figures)

    return tuple(figures(by_name[v.name], (slots or {}).get(v.name, ())) for v in synced_variables(step))


def _part(
    mesh: Mesh, variable: VariableLike, sharding: Sharding | None, origin: str, slots: tuple[PartFigures, ...]
) -> PartFigures:
    shape = tuple(variable.shape)
    if sharding is None or not sharding.divides:
        reason = "" if origin == PROPAGATED else origin
        return PartFigures(variable.name, shape, variable.byte_size, WHOLE, reason, shape, variable.byte_size, slots)
    counts = [mesh.count(axes) for axes in sharding.axes]
    part = tuple(-(-length // count) for length, count in zip(shape, counts, strict=True))
    size = variable.byte_size * prod(part) // prod(shape)
    return PartFigures(variable.name, shape, variable.byte_size, str(sharding.closed()), origin, part, size, slots)


def mesh_tables(figures: MeshFigures, title: str, width: int | None = None) -> Iterator[Table]:
    """Yields a table with a row for each trained variable, and one with a row for each kind of collective.

    Of more than `MOST_ROWS` variables, the largest have a row each.

    Args:
        figures: the figures of the step.
        title: of the first table.
        width: columns of the terminal; None: unlimited.
    """
    numbers = ("bytes", "at each place", "calls a step", "a place sends")
    is_narrow = width is not None and width < NARROW
    heads = NARROW_HEADS if is_narrow else PART_HEADS
    rows = [_narrow(row) if is_narrow else row for row in part_rows(figures)]
    yield text_table(title, heads, rows, numbers=numbers, caption=figures.caption, has_lines=is_narrow)
    if figures.collectives:
        collectives = collective_rows(figures.collectives)
        yield text_table("collectives", COLLECTIVE_HEADS, collectives, numbers=numbers, caption=figures.batch)


def part_rows(figures: MeshFigures) -> list[list[str]]:
    """Returns the rows under `PART_HEADS`."""
    largest = sorted(figures.variables, key=lambda one: -one.bytes)[:MOST_ROWS]
    return [
        [
            one.name,
            readable_shape(one.shape),
            readable_bytes(one.bytes),
            one.sharding,
            one.origin,
            readable_bytes(one.part_bytes),
            _slots_text(one),
        ]
        for one in figures.variables
        if one in largest
    ]


def _narrow(cells: Sequence[str]) -> list[str]:
    """Converts a row of the wide table to three cells of up to two lines."""
    name, shape, size, sharding, origin, part, slots = cells
    origin = origin and f"\nfrom {origin}"
    return [f"{name}\n{shape}, {size}", f"{sharding}{origin}", f"{part}\nslots {slots}"]


def collective_rows(collectives: Sequence[CollectiveFigures]) -> list[list[str]]:
    """Returns the rows under `COLLECTIVE_HEADS`."""
    return [[one.kind, "·".join(one.axes), str(one.calls), bytes_text(one.sent)] for one in collectives]


def _slots_text(variable: PartFigures) -> str:
    """Formats the number of slots and their bytes; names those that are divided otherwise than the variable."""
    if not variable.slots:
        return "none"
    text = f"{len(variable.slots)}: {readable_bytes(sum(slot.part_bytes for slot in variable.slots))}"
    others = [f"{slot.name} {slot.sharding}" for slot in variable.slots if slot.sharding != variable.sharding]
    return f"{text}, {listed(others)}" if others else text
