"""Stages: which nodes of a step compute (run on every replica) and which run once, on what the replicas made.

A step is a sequence compute₁, update₁, compute₂, update₂, …, after-state. A node *runs once* if a gradient reaches it
by data or through a variable (a read that is ordered after a write which a gradient reached), or if it reads state
after the compute part's own write of it (Keras's logs). All else is *compute*. What leads to a gradient is always
compute: a read of what the first update wrote, on the way to the second gradient of a GAN, starts compute₂. So is what
a batch reaches and no gradient does by data: predictions made after the update are made by every replica for its own
examples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from autodist.graph.effects import Effect
from autodist.graph.parts import VariableGradient


@dataclass(frozen=True)
class Stages:
    """What `autodist.graph.find_stages` found.

    Attributes:
        once: nodes that run once on a worker, after the replicas' gradients or state were combined.
        update: those of `once` that a gradient reaches.
        gradients: the gradients that reach a write of a variable; these are synchronised.
        level: for each of them (by position) which update stage it belongs to, from 1.
        levels: the stage of every other node that belongs to a later one than the first.
        state_writes: writes that the compute part makes itself, in topological order.
        effects: what each node that touches a variable does, in topological order.
        order: position of each node in a topological order.
        before: for each node the writes that are ordered before it, as a set of bits; `writes` tells them apart.
        writes: the writes, by bit.
        strays: positions of the gradients that reach no write of their own variable: what is written of them is
            another network's variable, or one in which they are gathered.
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
        """Which update stage a node belongs to, from 1."""
        return self.levels.get(node, 1)

    def writes_before(self, node: str, handle: str) -> list[str]:
        """The writes of `handle` that are ordered before `node`, in topological order."""
        bits = self.before.get(node, 0)
        return [self.writes[k] for k in self._writes_of.get(handle, ()) if bits >> k & 1]

    def readers(self, handle: str) -> list[str]:
        """What reads the variable of a handle, in topological order."""
        return self._readers_of.get(handle, [])

    def is_used_after(self, handle: str, writes: Collection[str]) -> bool:
        """Whether the compute part reads a variable after some of its `writes`, for more than these."""
        return any(
            not set(writes).isdisjoint(self.writes_before(name, handle))
            for name in self.readers(handle)
            if name not in self.once and name not in writes
        )

    @cached_property
    def _writes_of(self) -> Mapping[str, list[int]]:
        """By handle, the bits of its writes."""
        found: dict[str, list[int]] = {}
        for k, write in enumerate(self.writes):
            for handle in self.effects[write].writes:
                found.setdefault(handle, []).append(k)
        return found

    @cached_property
    def _readers_of(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, effect in self.effects.items():
            for handle in effect.reads:
                found.setdefault(handle, []).append(name)
        return found
