"""Analysis that finds the stages of a step, as defined in `autodist.graph.stages`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autodist.graph.effects import Effect
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.parts import VariableGradient
from autodist.graph.stages import Stages
from autodist.graph.step import CapturedStep, Step
from autodist.graph.walks import reach


def find_stages(step: Step) -> Stages:
    """Separates compute from nodes that run once; see `autodist.graph.stages`.

    The result is cached for a graph, its gradients, variables and inputs, and shared by all kernels.
    """
    key = (step.gradients, tuple((v.name, v.handle) for v in step.variables), tuple(step.batch_axes))
    return step.graph_index.once("stages", key, lambda: _find(step))


def _find(step: Step) -> Stages:
    gradients = list(step.gradients)
    while True:
        walk = _Walk(step, gradients)
        walk.run()
        kept = [g for k, g in enumerate(gradients) if walk.reaches_write(k)]
        if len(kept) == len(gradients):
            return walk.result()
        gradients = kept


def nodes_for(step: Step, roots: Collection[str]) -> dict[str, None]:
    """Returns some nodes and those computed only for them, in reverse topological order."""
    graph_index = step.graph_index
    found: dict[str, None] = {}
    for name in reversed(graph_index.order):
        readers = graph_index.readers(name)
        if name in roots or (readers and all(reader in found for reader in readers)):
            found[name] = None
    return found


@dataclass
class _Walk:
    """One pass over the graph in topological order.

    Sets of gradients and of writes are Python integers used as bit sets: a union of the few hundred members is one
    machine operation.
    """

    step: Step
    gradients: list[VariableGradient]
    reach: dict[str, int] = field(default_factory=dict)  # gradients that reach a node that runs once
    after_state: set[str] = field(default_factory=set)
    before: dict[str, int] = field(default_factory=dict)
    level: dict[str, int] = field(default_factory=dict)
    writes: list[str] = field(default_factory=list)
    written: dict[str, int] = field(default_factory=dict)  # handle -> bits of its writes
    updates: int = 0  # bits of the writes that a gradient reaches

    def __post_init__(self) -> None:
        self.graph_index = self.step.graph_index
        self.order = {name: k for k, name in enumerate(self.graph_index.order)}
        self.effects = {
            name: self.graph_index.effects[name]
            for name in sorted(self.graph_index.effects, key=self.order.__getitem__)
        }
        at: dict[str, int] = {}
        for k, gradient in enumerate(self.gradients):
            for t in gradient.tensors:
                at[t] = at.get(t, 0) | 1 << k
        self.reads = self._readers(at)
        leads = self._data_ancestors(map(node_of, at))
        self.handles = {v.name: v.handle for v in self.step.variables}
        by_data = self._reached_by_data(self.reads, without=leads)
        batch = self._readers({tensor(i): 1 for i in self.step.batch_axes})
        self.in_replica = leads | (self._reached_by_data(batch) - by_data)
        # A write that depends on gradients through a variable only (averaging weights after their update) is recognized
        # in `_visit`, by the gradients that reach it.
        writes = (name for name, effect in self.effects.items() if effect.writes and name not in by_data)
        self.leads_to_state = self._data_ancestors(writes)

    def run(self) -> None:
        for name in self.graph_index.order:
            self._visit(name)

    def _visit(self, name: str) -> None:
        data = self.graph_index.data[name]
        before = 0
        for source in self.graph_index.sources[name]:
            if source in self.before:
                before |= self.before[source]
        level = max([self.level[source] for source in data if source in self.level], default=1)
        effect = self.effects.get(name)
        touched = self._writes_that_show(effect, before) if effect else 0
        updates = list(self._of(touched & self.updates)) if touched else []
        reach = 0
        if name in self.in_replica:
            level = max([level, *(1 + self.level[w] for w in updates)])
        else:
            level = max([level, *(self.level[w] for w in updates)])
            reach = self._reach_of(name, data, updates)
            late = bool(touched & ~self.updates) or not self.after_state.isdisjoint(data)
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
        """Returns the writes `before` a node that change a variable that it reads or writes."""
        touched = 0
        for handle in effect.reads | effect.writes:
            touched |= self.written.get(handle, 0) & before
        return touched

    def _reach_of(self, name: str, data: Iterable[str], updates: Iterable[str]) -> int:
        """Returns the gradients that reach a node by its `data` or through the `updates` that it sees."""
        reach = self.reads.get(name, 0)
        for source in data:
            if source in self.reach:
                reach |= self.reach[source]
        for write in updates:
            reach |= self.reach[write]
        return reach

    def _note_write(self, name: str, effect: Effect, level: int, is_update: bool) -> int:
        """Records a write; returns its bit."""
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
        return reach(roots, self.graph_index.data.__getitem__)

    def _readers(self, tensors: Mapping[str, int]) -> dict[str, int]:
        """Maps each node that reads any of `tensors` to the bits of all that it reads."""
        result: dict[str, int] = {}
        for name in {consumer for t in tensors for consumer in self.graph_index.consumers[node_of(t)]}:
            for i in self.graph_index.nodes[name].input:
                if not is_control(i) and tensor(i) in tensors:
                    result[name] = result.get(name, 0) | tensors[tensor(i)]
        return result

    def _reached_by_data(self, readers: Collection[str], without: Collection[str] = ()) -> set[str]:
        """Returns `readers` and all nodes that depend on them by data, on paths without nodes of `without`."""
        result: set[str] = set()
        for name in self.graph_index.order:
            if (name in readers or not result.isdisjoint(self.graph_index.data[name])) and name not in without:
                result.add(name)
        return result

    def reaches_write(self, k: int) -> bool:
        """Returns True if a gradient reaches any write; it is then the gradient of the whole batch."""
        return bool(self._reach_of_writes[None] >> k & 1)

    def reaches_own_write(self, k: int) -> bool:
        handle = self.handles[self.gradients[k].variable]
        return bool(self._reach_of_writes.get(handle, 0) >> k & 1)

    @cached_property
    def _reach_of_writes(self) -> Mapping[str | None, int]:
        """Maps each handle to the gradients that reach its writes, None to those that reach any. For after the walk."""
        result: dict[str | None, int] = {None: 0}
        for name in self.writes:
            reach = self.reach.get(name, 0)
            for handle in (None, *self.effects[name].writes):
                result[handle] = result.get(handle, 0) | reach
        return result

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
            order=self.order,
            before=self.before,
            writes=tuple(self.writes),
            unapplied_gradients=frozenset(k for k in range(len(self.gradients)) if not self.reaches_own_write(k)),
        )


def written_handles(step: CapturedStep) -> set[str]:
    """Returns the VarHandleOps of the variables that a step writes."""
    return {handle for effect in step.graph_index.effects.values() for handle in effect.writes}
