"""Stages: which nodes of a step compute (run on every replica) and which run once, on what the replicas made.

A step is a sequence compute₁, update₁, compute₂, update₂, …, after-state. A node *runs once* if a gradient reaches it
by data or through a variable (a read that is ordered after a write which a gradient reached), or if it reads state
after the compute part's own write of it (Keras's logs). All else is *compute*. What leads to a gradient is always
compute: a read of what the first update wrote, on the way to the second gradient of a GAN, starts compute₂. So is what
a batch reaches and no gradient does by data: predictions made after the update are made by every replica for its own
examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import tensorflow as tf

from autodist.graph.effects import Effect, Effects
from autodist.graph.item import Gradient, GraphItem
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.order import topological
from autodist.graph.walks import reach


@dataclass(frozen=True)
class Stages:
    """What `find_stages` found.

    Attributes:
        once: nodes that run once on a worker, after the replicas' gradients or state were combined.
        update: those of `once` that a gradient reaches.
        gradients: the gradients that reach a write of their own variable; these are synchronised.
        level: for each of them (by position) which update stage it belongs to, from 1.
        levels: the stage of every other node that belongs to a later one than the first.
        state_writes: writes that the compute part makes itself, in topological order.
        effects: what each node that touches a variable does.
        order: position of each node in a topological order.
        before: for each node the writes that are ordered before it, as a set of bits; `writes` tells them apart.
        writes: the writes, by bit.
    """

    once: frozenset[str]
    update: frozenset[str]
    gradients: tuple[Gradient, ...]
    level: tuple[int, ...]
    levels: Mapping[str, int]
    state_writes: tuple[str, ...]
    effects: Mapping[str, Effect]
    order: Mapping[str, int]
    before: Mapping[str, int]
    writes: tuple[str, ...]

    def writes_before(self, node: str, handle: str) -> list[str]:
        """The writes of `handle` that are ordered before `node`, in topological order."""
        bits = self.before.get(node, 0)
        return [w for k, w in enumerate(self.writes) if bits >> k & 1 and handle in self.effects[w].writes]


def find_stages(item: GraphItem) -> Stages:
    """Tells compute from what runs once; see the module's text."""
    gradients = list(item.gradients)
    while True:
        walk = _Walk(item, gradients)
        walk.run()
        kept = [g for k, g in enumerate(gradients) if walk.reaches_own_write(k)]
        if len(kept) == len(gradients):
            return walk.result()
        gradients = kept


@dataclass
class _Walk:
    """One pass over the graph in topological order.

    Sets of gradients, and of writes, are Python integers used as bit sets: a union is one machine operation for the
    few hundred members that there are.
    """

    item: GraphItem
    gradients: list[Gradient]
    reach: dict[str, int] = field(default_factory=dict)  # gradients that reach a node which runs once
    after_state: set[str] = field(default_factory=set)
    before: dict[str, int] = field(default_factory=dict)
    level: dict[str, int] = field(default_factory=dict)
    writes: list[str] = field(default_factory=list)
    written: dict[str, int] = field(default_factory=dict)  # handle -> bits of its writes
    updates: int = 0  # bits of the writes that a gradient reaches

    def __post_init__(self) -> None:
        definition = self.item.graph_def
        self.sorted = topological(definition)
        effects = Effects(definition)
        self.effects = {n.name: e for n in self.sorted if (e := effects.of(n))}
        self.data = {n.name: [(node_of(i), tensor(i)) for i in n.input if not is_control(i)] for n in self.sorted}
        self.at: dict[str, int] = {}
        for k, gradient in enumerate(self.gradients):
            for t in gradient.tensors:
                self.at[t] = self.at.get(t, 0) | 1 << k
        self.leads = self._data_ancestors(node_of(t) for t in self.at)
        self.handles = {v.name: v.handle for v in self.item.variables}
        self.by_data = self._reached_by_data(self.at)
        batch = {i: 1 for i, axis in self.item.inputs.items() if axis is not None}
        self.in_replica = self.leads | (self._reached_by_data(batch) - self.by_data)
        # A write through a variable alone (weights averaged after their update) is told apart in `_visit`, where it
        # has gradients that reach it.
        writes = (name for name, effect in self.effects.items() if effect.writes and name not in self.by_data)
        self.leads_to_state = self._data_ancestors(writes)

    def run(self) -> None:
        for node in self.sorted:
            self._visit(node)

    def _visit(self, node: tf.compat.v1.NodeDef) -> None:
        name = node.name
        data = self.data[name]
        before = 0
        for i in node.input:
            before |= self.before.get(node_of(i), 0)
        level = max((self.level.get(source, 1) for source, _ in data), default=1)
        effect = self.effects.get(name)
        touched = self._writes_that_show(effect, before) if effect else 0
        updates = list(self._of(touched & self.updates))
        reach = 0
        if name in self.in_replica:
            level = max([level, *(1 + self.level[w] for w in updates)])
        else:
            level = max([level, *(self.level[w] for w in updates)])
            reach = self._reach_of(data, updates)
            late = any(source in self.after_state for source, _ in data) or bool(touched & ~self.updates)
            if late and name not in self.leads_to_state:
                self.after_state.add(name)
        if reach:
            self.reach[name] = reach
        if level > 1:
            self.level[name] = level
        if effect and effect.writes:
            before |= self._note_write(name, effect, level, is_update=bool(reach))
        if before:
            self.before[name] = before

    def _writes_that_show(self, effect: Effect, before: int) -> int:
        """Those of the writes `before` a node that change what it reads or writes."""
        touched = 0
        for handle in effect.reads | effect.writes:
            touched |= self.written.get(handle, 0) & before
        return touched

    def _reach_of(self, data: Iterable[tuple[str, str]], updates: Iterable[str]) -> int:
        """The gradients that reach a node by its `data` or through the `updates` that it sees."""
        reach = 0
        for source, made in data:
            reach |= self.reach.get(source, 0) | self.at.get(made, 0)
        for write in updates:
            reach |= self.reach[write]
        return reach

    def _note_write(self, name: str, effect: Effect, level: int, is_update: bool) -> int:
        """Returns the write's bit."""
        bit = 1 << len(self.writes)
        self.writes.append(name)
        self.level.setdefault(name, level)
        for handle in effect.writes:
            self.written[handle] = self.written.get(handle, 0) | bit
        if is_update:
            self.updates |= bit
        return bit

    def _of(self, bits: int) -> Iterable[str]:
        while bits:
            low = bits & -bits
            yield self.writes[low.bit_length() - 1]
            bits ^= low

    def _data_ancestors(self, roots: Iterable[str]) -> set[str]:
        return reach(roots, lambda name: [source for source, _ in self.data[name]])

    def _reached_by_data(self, tensors: Mapping[str, int]) -> set[str]:
        found: set[str] = set()
        for node in self.sorted:
            if node.name in self.leads and tensors is self.at:
                continue
            if any(source in found or made in tensors for source, made in self.data[node.name]):
                found.add(node.name)
        return found

    def reaches_own_write(self, k: int) -> bool:
        handle = self.handles[self.gradients[k].variable]
        return any(handle in self.effects[w].writes and self.reach.get(w, 0) >> k & 1 for w in self.writes)

    def result(self) -> Stages:
        update = frozenset(self.reach)
        state = tuple(w for w in self.writes if w not in update and w not in self.after_state)
        return Stages(
            once=update | self.after_state,
            update=update,
            gradients=tuple(self.gradients),
            level=tuple(self.level.get(node_of(g.tensors[-1]), 1) for g in self.gradients),
            levels=self.level,
            state_writes=state,
            effects=self.effects,
            order={n.name: k for k, n in enumerate(self.sorted)},
            before=self.before,
            writes=tuple(self.writes),
        )


def written_handles(item: GraphItem) -> set[str]:
    """The VarHandleOps of the variables that a step writes."""
    effects = Effects(item.graph_def)
    return {handle for node in item.graph_def.node for handle in effects.of(node).writes}
