"""The table of a strategy on a mesh: the sharding of each variable."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from autodist.logs.formatting import counted, readable_bytes, readable_shape
from autodist.proto import strategy_pb2
from autodist.sharding import Constraint, Sharding
from autodist.strategies.variables import GraphLike, synced_variables
from autodist.synchronizers import mesh_of

MOST_ROWS = 40


def mesh_table(strategy: strategy_pb2.Strategy, graph_item: GraphLike) -> Table:
    """Builds a table of each trained variable's sharding, and of the bytes that a place holds of it.

    Of more than `MOST_ROWS` variables, the largest have a row each.

    Args:
        strategy: a strategy with a mesh.
        graph_item: the captured step that it is for.
    """
    mesh = mesh_of(strategy)
    found = {one.variable: one for one in strategy.mesh.variables}
    parts: Mapping[str, int] = {
        name: mesh.count(axis for axes in Sharding.parse(one.sharding).axes for axis in axes)
        for name, one in found.items()
    }
    variables = list({variable.name: variable for variable in synced_variables(graph_item)}.values())
    shown = sorted(variables, key=lambda variable: -variable.byte_size)[:MOST_ROWS]
    places, workers = mesh.size, strategy.graph_config.workers or mesh.size
    held = sum(variable.byte_size // parts.get(variable.name, 1) for variable in variables)
    whole = sum(variable.byte_size for variable in variables)
    caption = f"each place holds {readable_bytes(held)} of {readable_bytes(whole)} of trained variables"
    if len(shown) < len(variables):
        caption += f"; {counted(len(variables) - len(shown), 'smaller variable')} are not shown"
    title = f"{strategy.builder}: {counted(places, 'place')} on {counted(workers, 'worker')}, mesh {mesh}"
    table = Table(title=Text(title), caption=Text(caption))
    for column in ("variable", "shape", "size", "sharding", "at each place", "from"):
        table.add_column(column, justify="right" if column in ("size", "at each place") else "left", overflow="fold")
    for variable in (one for one in variables if one in shown):
        said = found.get(variable.name)
        table.add_row(
            Text(variable.name),
            readable_shape(variable.shape),
            readable_bytes(variable.byte_size),
            Text(said.sharding if said else "whole"),
            readable_bytes(variable.byte_size // parts.get(variable.name, 1)),
            Text(said.origin if said else ""),
        )
    return table


def with_shardings(
    strategy: strategy_pb2.Strategy, script: Mapping[str, Constraint], shardings: Mapping[str, Sharding]
) -> strategy_pb2.Strategy:
    """Returns a strategy with the other shardings of its step, too.

    Args:
        strategy: the strategy.
        script: those that the script requests, by variable.
        shardings: those that propagation has found, by variable.
    """
    if not strategy.HasField("mesh"):
        return strategy
    made = strategy_pb2.Strategy()
    made.CopyFrom(strategy)
    found = {name: (one.sharding, str(one.origin)) for name, one in script.items()}
    found = {name: (sharding, "propagation") for name, sharding in shardings.items()} | found
    requested = {one.variable for one in strategy.mesh.variables}
    made.mesh.variables.extend(
        strategy_pb2.VariableSharding(variable=name, sharding=str(sharding.closed()), origin=origin)
        for name, (sharding, origin) in found.items() if name not in requested
    )  # fmt: skip
    return made
