"""Stages: the nodes of a step that compute (on every replica) and those that run once, on reduced results.

A step is a sequence compute₁, update₁, compute₂, update₂, …, after-state. A node *runs once* in two cases. Either a
gradient reaches it, by data or through a variable (a read ordered after a write that a gradient reached). Or it reads
state after the compute part's own write of it (Keras's logs). All other nodes *compute*. A node that leads to a
gradient always computes: a read of the first update's write, on the way to the second gradient of a GAN, starts
compute₂. So does a node that the batch reaches and no gradient reaches by data: each replica makes predictions after
the update for its own examples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from autodist.graph.effects import Effect, group_by_handle
from autodist.graph.parts import VariableGradient


@dataclass(frozen=True)
class Stages:
    """Result of `autodist.graph.find_stages`.

    Attributes:
        once: nodes that run once on a worker, after the replicas' gradients or state were reduced.
        update: those of `once` that a gradient reaches.
        gradients: the gradients that reach a write of a variable; these are synchronised.
        level: the update round of each gradient (by position), from 1.
        levels: maps each other node of a later update round than the first to its round.
        state_writes: writes by the compute part, in topological order.
        effects: effect of each node that uses a variable, in topological order.
        order: position of each node in a topological order.
        before: maps each node to the writes ordered before it, a bit set over `writes`.
        writes: all writes; their positions are the bits of `before`.
        unapplied_gradients: positions of the gradients that reach no write of their own variable: they update another
            network's variable, or one that accumulates gradients.
    """

    once: frozenset[str]
    update: frozenset[str]
    gradients: tuple[VariableGradient, ...]
    level: tuple[int, ...]
    levels: Mapping[str, int]
    state_writes: tuple[str, ...]
    effects: Mapping[str, Effect]
    order: Mapping[str, int]
    before: Mapping[str, int]
    writes: tuple[str, ...]
    unapplied_gradients: frozenset[int] = frozenset()

    def level_of(self, node: str) -> int:
        """Returns the update round of a node, from 1."""
        return self.levels.get(node, 1)

    def writes_before(self, node: str, handle: str) -> list[str]:
        """Returns the writes of `handle` that are ordered before `node`, in topological order."""
        bits = self.before.get(node, 0)
        return [self.writes[k] for k in self._writes_of.get(handle, ()) if bits >> k & 1]

    def readers(self, handle: str) -> list[str]:
        """Returns the nodes that read the variable of a handle, in topological order."""
        return self._readers_of.get(handle, [])

    def is_used_after(self, handle: str, writes: Collection[str]) -> bool:
        """Returns True if a compute node, other than `writes`, reads the variable after some of these writes."""
        return any(
            not set(writes).isdisjoint(self.writes_before(name, handle))
            for name in self.readers(handle)
            if name not in self.once and name not in writes
        )

    @cached_property
    def _writes_of(self) -> Mapping[str, list[int]]:
        """Maps each handle to the bits of its writes."""
        return group_by_handle((k, self.effects[write].writes) for k, write in enumerate(self.writes))

    @cached_property
    def _readers_of(self) -> Mapping[str, list[str]]:
        return group_by_handle((name, effect.reads) for name, effect in self.effects.items())


NO_STAGES = Stages(frozenset(), frozenset(), (), (), {}, (), {}, {}, {}, ())
"""Stages of an empty graph."""
