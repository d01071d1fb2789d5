"""The tables of a step on a mesh."""

from __future__ import annotations

import io

import rich.console

from autodist.graph.partial_count import PartialCount
from autodist.sharding import Constraint, Origin, Sharding
from autodist.strategies import Mesh, arranged
from autodist.strategies.mesh_table import (
    MOST_ROWS,
    CollectiveFigures,
    MeshFigures,
    PartFigures,
    collective_rows,
    mesh_tables,
    part_figures,
    part_rows,
    requested_figures,
)
from autodist.synchronizers import mesh_of

SHAPES = {"up/kernel": (4, 8), "up/bias": (8,), "down/kernel": (8, 4)}
LAYOUTS = {"up/kernel": (None, "model"), "down/.*": ("model",)}


def built(planned, machines):
    builder = Mesh(mesh={"model": 2}, layouts=LAYOUTS)
    return builder.build(planned, arranged(builder, machines))


def shown(figures: MeshFigures, width: int = 150) -> str:
    console = rich.console.Console(file=io.StringIO(), width=width)
    for table in mesh_tables(figures, "the title", width):
        console.print(table)
    return console.file.getvalue()


def part(name: str, sharding: str = "whole", slots: tuple[PartFigures, ...] = (), size: int = 100) -> PartFigures:
    return PartFigures(name, (size // 4,), size, sharding, "", (size // 4,), size, slots)


def test_shardings_of_a_strategy_are_known_before_propagation(step, cluster):
    planned = step(SHAPES)
    figures = requested_figures(built(planned, cluster(2)), planned)
    assert [(v.sharding, v.part_shape, v.part_bytes, v.origin) for v in figures.variables] == [
        ("[–, model]", (4, 4), 64, "'up/kernel'"),
        ("whole", (8,), 32, ""),
        ("[model, –]", (4, 4), 64, "'down/.*'"),
    ]
    assert "each place holds 160 B of 288 B of trained variables" in shown(figures)
    assert "collectives" not in shown(figures)


def test_shardings_of_the_script_are_known_too(step, cluster):
    planned = step(SHAPES)
    script = {"up/bias": Constraint(Sharding.parse("[model]"), Origin("train.py:7"))}
    figures = requested_figures(built(planned, cluster(2)), planned, script)
    assert [v.text for v in figures.variables] == [
        "[–, model] from 'up/kernel'", "[model] from train.py:7", "[model, –] from 'down/.*'",
    ]  # fmt: skip


def test_a_propagated_sharding_has_another_origin_than_a_requested_one(step, cluster):
    planned = step(SHAPES)
    shardings = {"up/kernel": Sharding.parse("[–, model]"), "up/bias": Sharding.parse("[model?]")}
    mesh = mesh_of(built(planned, cluster(2)))
    found = part_figures(mesh, planned, shardings, {"up/kernel": "'up/kernel'"})
    assert [(v.sharding, v.text) for v in found] == [
        ("[–, model]", "[–, model] from 'up/kernel'"),
        ("[model]", "[model] from propagation"),
        ("whole", "whole"),
    ]


def test_cells_are_stacked_in_a_narrow_terminal(step, cluster):
    planned = step(SHAPES)
    lines = shown(requested_figures(built(planned, cluster(2)), planned), 70).splitlines()
    (first,) = (line for line in lines if "[–, model]" in line)
    assert "up/kernel" in first and "64 B" in first
    below = lines[lines.index(first) + 1]
    assert "4 × 8, 128 B" in below and "from 'up/kernel'" in below and "slots none" in below


def test_collectives_of_unknown_size_are_lower_bounds():
    known, unknown = PartialCount(2000), PartialCount(0, is_least=True)
    collectives = [
        CollectiveFigures("all_gather", ("a", "b"), 3, PartialCount(2000, is_least=True)),
        CollectiveFigures("all_reduce", ("a",), 1, known),
        CollectiveFigures("all_to_all", ("b",), 2, unknown),
    ]
    assert collective_rows(collectives) == [
        ["all_gather", "a·b", "3", "at least 2.00 kB"],
        ["all_reduce", "a", "1", "2.00 kB"],
        ["all_to_all", "b", "2", "not known"],
    ]
    figures = MeshFigures("{a: 2, b: 2}", 4, 4, (part("w"),), collectives=tuple(collectives))
    assert "as it is not known" in shown(figures)


def test_slots_that_are_divided_otherwise_are_named():
    alike, other = (part("w", "[a, –]", (part("m", s),)) for s in ("[a, –]", "whole"))
    rows = part_rows(MeshFigures("{a: 2}", 2, 2, (alike, other)))
    assert [row[-1] for row in rows] == ["1: 100 B", "1: 100 B, m whole"]


def test_the_largest_variables_have_rows_and_the_others_are_counted():
    variables = tuple(part(f"v{k}", size=4 * (k + 1)) for k in range(MOST_ROWS + 2))
    figures = MeshFigures("{a: 2}", 2, 2, variables, unused=("'x'", "train.py:7"))
    assert [row[0] for row in part_rows(figures)] == [f"v{k}" for k in range(2, MOST_ROWS + 2)]
    assert "lists 2 smaller variables" in figures.caption
    assert "no tensor of the step is reached by 'x', train.py:7" in figures.caption
