"""Units: sets of nodes that are to become one node each."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from autodist.graph.wiring import Wiring

Unit = tuple[Hashable, ...]


def is_acyclic(wiring: Wiring, units: Mapping[str, Unit]) -> bool:
    """Whether no unit, were it one node, would need itself. Back edges of v1 loops do not count.

    Args:
        wiring: of the graph.
        units: by name, what tells a node's unit from others; a node that is left out is one by itself.
    """
    needs = _needs(wiring, units)
    readers: dict[Hashable, list[Hashable]] = {unit: [] for unit in needs}
    for unit, sources in needs.items():
        for source in sources:
            readers[source].append(unit)
    ready = [unit for unit, sources in needs.items() if not sources]
    done = 0
    while ready:
        unit = ready.pop()
        done += 1
        for reader in readers[unit]:
            needs[reader].discard(unit)
            if not needs[reader]:
                ready.append(reader)
    return done == len(needs)


def _needs(wiring: Wiring, units: Mapping[str, Unit]) -> dict[Hashable, set[Hashable]]:
    """For each unit, and each node that is in none, the others that it needs."""
    position = {name: k for k, name in enumerate(wiring.order)}
    needs: dict[Hashable, set[Hashable]] = {}
    for name in wiring.order:
        unit: Hashable = units.get(name, name)
        sources = (s for s in wiring.sources[name] if position[s] < position[name])
        found = needs.setdefault(unit, set())
        found.update(units.get(source, source) for source in sources)
        found.discard(unit)
    return needs


def by_levels(wiring: Wiring, units: Mapping[str, Unit]) -> dict[str, Unit]:
    """The units, cut where a path leaves one and may come back: a node's level counts how often one was left before.

    Levels never fall along an edge and rise wherever a unit is left, so that nothing comes back to one level of it.
    What only its own unit reads belongs to the level where it is read first.
    """
    levels: dict[str, int] = {}
    for name in wiring.order:
        own = units.get(name)
        levels[name] = max(
            (levels.get(s, 0) + (s in units and units[s] != own) for s in wiring.sources[name]), default=0
        )
    for name in reversed(wiring.order):
        readers = wiring.consumers[name]
        if name in units and readers and all(units.get(reader) == units[name] for reader in readers):
            levels[name] = max(levels[name], min(levels[reader] for reader in readers))
    return {name: (*unit, levels[name]) for name, unit in units.items()}
