"""Control flow of TensorFlow 1 in a graph: `Switch` and `Merge` around branches, `Enter` and `Exit` around loops."""

from __future__ import annotations

from autodist.graph.ops import Trait, having
from autodist.graph.wiring import Wiring

_ENTRANCES = having(Trait.SWITCH | Trait.ENTER)
_MERGES, _BACK, _EXITS = map(having, (Trait.MERGE, Trait.BACK, Trait.EXIT))


def find_inside(wiring: Wiring) -> list[str]:
    """The nodes that have no value in each run, or many: those in branches and loops, what leads out left aside."""
    if not wiring.having(Trait.SWITCH | Trait.ENTER):
        return []
    depths: dict[str, int] = {}
    for name in wiring.order:
        op = wiring.nodes[name].op
        depth = max((depths.get(source, 0) for source in wiring.sources[name]), default=0)
        if op in _ENTRANCES:
            depth += 1
        elif op in _EXITS:  # a loop's value has gone through an Enter and a Switch
            depth -= 2
        elif op in _MERGES and not any(wiring.nodes[source].op in _BACK for source in wiring.data[name]):
            depth -= 1
        depths[name] = max(depth, 0)
    return [name for name, depth in depths.items() if depth]
