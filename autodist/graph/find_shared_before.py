"""Shared state: the order of the reads and writes of variables that no pipeline stage holds."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Mapping

from autodist.graph.step import Step


def find_shared_before(step: Step, names: Collection[str], held: Collection[str]) -> Mapping[str, list[str]]:
    """Maps each node that accesses a variable which the step writes to the accesses before it.

    Two reads are not ordered.

    Args:
        step: the step.
        names: the nodes to consider.
        held: handles of the variables that one stage holds.
    """
    effects = {name: effect for name, effect in step.graph_index.effects.items() if name in names}
    written = frozenset().union(*(effect.writes for effect in effects.values())) - frozenset(held)
    touched = {name: both for name, e in effects.items() if (both := (e.reads | e.writes) & written)}
    return {
        name: [one for one in waits if touched[name] & touched[one] & (effects[name].writes | effects[one].writes)]
        for name, waits in _waits_among(step, touched).items()
    }


def _waits_among(step: Step, names: Collection[str]) -> dict[str, list[str]]:
    """Maps each of some nodes to those among them that it waits for."""
    order, sources = step.graph_index.order, step.graph_index.sources
    among = [name for name in order if name in names]
    bit_of = {name: 1 << k for k, name in enumerate(among)}
    before: dict[str, int] = {}
    for name in order if among else ():
        waits = (before.get(source, 0) | bit_of.get(source, 0) for source in sources[name])
        before[name] = functools.reduce(operator.or_, waits, 0)
    return {name: [one for one in among if before[name] & bit_of[one]] for name in among}
