"""Global state: the value that one device would store in a variable, from means and sums over the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from autodist.graph.names import data_inputs, node_of, tensor
from autodist.graph.ops import Trait, having
from autodist.graph.parts import Aggregation
from autodist.graph.subgraph import subgraph
from autodist.graph.walks import reach
from autodist.kernels.replica_dependent import find_late_reads
from autodist.kernels.replicate.recompute_after_reduce import RecomputedValue, find_recomputed, make_again
from autodist.kernels.replicate.reductions.reducer import Reducer
from autodist.kernels.replicate.reductions.statistics import GlobalStatistic, Statistics
from autodist.kernels.replicate.state_writes import StateChange
from autodist.layout import Joined, Kind, Mean, PerExample, Reduced, Replicated, Sum, Unknown
from autodist.layout.linearity import Grade, find_linearity


@dataclass(frozen=True)
class _Written:
    """A variable's value after one of the step's writes."""

    change: StateChange
    write: str


class GlobalState:
    """Replaces the values that a replica assigns and adds by those of the whole batch.

        v ← v + n·loss, with n = Σ 1, loss = mean      becomes      v ← v + (Σₖ nₖ)·(Σₖ nₖ·lossₖ / Σₖ nₖ)

    Means and sums are reduced, and the arithmetic on them is done once. Keras, for example, adds loss · examples to its
    running loss. If the mean has other weights, that is not Σ loss · examples over the replicas. If the step reads a
    variable after writing it, the arithmetic reads the value that one device would have written.

    Args:
        reducer: reduces the means and sums.
        changes: all state changes of the step.
        statistics: finds and computes values that need several passes over the examples.
    """

    def __init__(self, reducer: Reducer, changes: Sequence[StateChange], statistics: Statistics) -> None:
        self._reducer, self._statistics = reducer, statistics
        self._late = self._find_late(changes)
        self._depends_on_writes = self._find_dependents()
        self._kinds: dict[str, Kind] = {}
        self._values: dict[str, str] = {}
        self._of_moments: dict[str, bool] = {}

    def unknown(self, change: StateChange) -> str | None:
        """Returns the reason why the value that one device would write is not known; None if it is known."""
        return self._unknown_after(_Written(change, node_of(change.after)))

    def unknown_parts(self, change: StateChange) -> list[str]:
        """Returns the tensors, among those a replica assigns and adds, whose value on one device is not known."""
        made = change.in_all
        return [t for t in dict.fromkeys((made.base, *made.changes)) if t is not None and self._unknown(t)]

    def is_of_written(self, name: str) -> bool:
        """Returns True if a tensor is computed from a value that the step has written to a variable."""
        return node_of(name) in self._depends_on_writes

    def is_of_moments(self, change: StateChange) -> bool:
        """Returns True if a change is a moving average of the moments that normalise each replica's own examples.

        Such moments are averaged over the replicas, as in tf.distribute, although the mean of variances is not the
        variance of the batch. Normalisation per replica is logged separately. A variable may also be proportional to
        such a moving average that the step has written, as one that corrects the average's bias.
        """
        handle = change.variable.handle
        if handle not in self._of_moments:
            self._of_moments[handle] = False  # until it is known, if a write depends on itself
            self._of_moments[handle] = self._find_moments(self.unknown_parts(change))
        return self._of_moments[handle]

    def _find_moments(self, parts: Sequence[str]) -> bool:
        written = [name for name in parts if self.is_of_written(name)]
        if not all(map(self._scales_moments, written)):
            return False
        nodes, found = self._reducer.step.graph_index.nodes, bool(written)
        front = [name for name in parts if name not in written]
        seen: set[str] = set()
        while front:
            name = front.pop()
            node = nodes[node_of(name)]
            if node.op in having(Trait.NORMALISES) and name != tensor(node.name):
                found = True
            elif isinstance(self._kind(name), Unknown) and node.name not in seen:
                seen.add(node.name)
                front += data_inputs(node)
            elif isinstance(self._kind(name), PerExample):
                return False
        return found

    def _scales_moments(self, name: str) -> bool:
        """Returns True if a tensor is proportional to moving averages of moments, by factors that all replicas share.

        Other values that it reads after a write are then those of all replicas, such as a counter of steps.
        """
        graph_index = self._reducer.step.graph_index
        behind = reach([node_of(name)], graph_index.data.__getitem__)
        own = [read for read in self._late if read in behind and not self._is_same(self._late[read])]
        if not own or not all(self.is_of_moments(self._late[read].change) for read in own):
            return False
        return find_linearity(graph_index, [tensor(read) for read in own]).of(name) is Grade.LINEAR

    def _is_same(self, written: _Written) -> bool:
        """Returns True if all replicas write the same value."""
        made = written.change.made[written.write]
        return all(isinstance(self._kind(t), Replicated) for t in (made.base, *made.changes) if t is not None)

    def take_for(self, name: str, kind: Kind) -> None:
        """Treats a tensor of unknown kind as one of `kind` from now on."""
        self._kinds[name] = kind

    def value(self, change: StateChange) -> str:
        """Returns the tensor with the value that one device would write."""
        return self._value_after(_Written(change, node_of(change.after)))

    def mean(self, change: StateChange) -> Mean | None:
        """Returns the mean that is the entire new value of a variable; None if the value is something else."""
        made = change.in_all
        if made.base is None or made.changes or self._statistic(made.base) is not None:
            return None
        kind = self._kind(made.base)
        return kind if isinstance(kind, Mean) else None

    def has(self, name: str) -> bool:
        """Returns True if a tensor is computed from reductions over the batch alone, not from values written before."""
        return bool(self.made_of(name)) or self._statistic(name) is not None

    def made_of(self, name: str) -> list[str]:
        """Returns the means and sums over the batch that a tensor is computed from; empty if it has other inputs."""
        is_excluded = node_of(name) in self._depends_on_writes or node_of(name) not in self._reducer.replica_dependent
        found = self._behind(name) if not is_excluded else None
        return list(found.wholes) if found is not None else []

    def of(self, label: str, name: str) -> str:
        """Computes a tensor that is arithmetic on means and sums once, from those of all replicas.

        Args:
            label: for the names of the new nodes.
            name: the captured tensor.
        """
        return self._whole(label, name)

    # -- reads after writes ----------------------------------------------------------------------------------------

    def _find_late(self, changes: Sequence[StateChange]) -> dict[str, _Written]:
        """Maps each node that reads a variable after writes of the compute part to the last of these writes."""
        stages, found = self._reducer.stages, {}
        late = find_late_reads(stages, self._reducer.replica_dependent)
        for change in changes:
            for reader in late.intersection(stages.readers(change.variable.handle)):
                before = [w for w in stages.writes_before(reader, change.variable.handle) if w in change.made]
                if before and reader not in change.made:
                    found[reader] = _Written(change, max(before, key=stages.order.__getitem__))
        return found

    def _find_dependents(self) -> set[str]:
        """Returns the nodes that depend on such reads: they differ between replicas, even if propagation disagrees."""
        graph_index, found = self._reducer.step.graph_index, set(self._late)
        for name in graph_index.order if found else ():
            if not found.isdisjoint(graph_index.data[name]):
                found.add(name)
        return found

    def _kind(self, name: str) -> Kind:
        if name not in self._kinds:
            self._kinds[name] = self._find_kind(name)
        return self._kinds[name]

    def _find_kind(self, name: str) -> Kind:
        """Returns the kind from propagation, but Unknown for arithmetic on a replica's own writes, if there is better.

        A mean of such values stays a mean if it cannot be recomputed.
        """
        kind = self._reducer.flows.kind(name)
        is_joined_or_same = isinstance(kind, Joined | Replicated)
        if node_of(name) not in self._depends_on_writes or not is_joined_or_same:
            return kind
        if isinstance(kind, Replicated) or node_of(name) in self._late or self._behind(name) is not None:
            return Unknown(f"{name} is computed from a value that the step has written to a variable")
        return kind

    # -- known values ----------------------------------------------------------------------------------------------

    def _unknown_after(self, written: _Written) -> str | None:
        made = written.change.made[written.write]
        if written.change.variable.aggregation not in (Aggregation.NONE, Aggregation.SUM):
            return f"{written.change.variable.name} is combined as it declares"
        parts = [t for t in (made.base, *made.changes) if t is not None]
        return next((reason for t in parts if (reason := self._unknown(t))), None)

    def _unknown(self, name: str) -> str | None:
        kind = self._kind(name)
        if node_of(name) in self._late:
            return self._unknown_after(self._late[node_of(name)])
        if isinstance(kind, Replicated | Sum | Reduced):
            return None
        if isinstance(kind, Mean):
            known = self._reducer.step.spec_of(name).dtype.is_floating
            return None if known else f"{name} is a mean of whole numbers"
        if isinstance(kind, Unknown):
            return kind.reason if self._behind(name) is None and self._statistic(name) is None else None
        return f"{name} holds a value for each example"

    def _behind(self, name: str) -> RecomputedValue | None:
        """Returns the computation of `name` from other tensors, if the value for the whole batch is known for all."""
        return find_recomputed(self._reducer.step, name, self._kind_here, self._is_whole)

    def _kind_here(self, name: str) -> Kind:
        """Returns the kind of a tensor; Replicated if it is not computed per replica."""
        is_per_replica = node_of(name) in self._reducer.replica_dependent or node_of(name) in self._late
        return self._kind(name) if is_per_replica else Replicated()

    def _is_whole(self, name: str, kind: Kind) -> bool | None:
        if node_of(name) in self._late or isinstance(kind, Joined):
            return self._unknown(name) is None
        return None

    def _statistic(self, name: str) -> GlobalStatistic | None:
        """Returns a tensor as a statistic of the whole batch; None if it is none."""
        return None if node_of(name) in self._depends_on_writes else self._statistics.find(name)

    # -- computed values -------------------------------------------------------------------------------------------

    def _value_after(self, written: _Written) -> str:
        if written.write not in self._values:
            self._values[written.write] = self._make(written)
        return self._values[written.write]

    def _make(self, written: _Written) -> str:
        change, made = written.change, written.change.made[written.write]
        dtype, shape, name = change.variable.dtype, change.variable.shape, f"state/{written.write}/whole"
        base = change.before if made.base is None else self._whole(f"{name}/base", made.base)
        wholes = {t: self._whole(f"{name}/{k}", t) for k, t in enumerate(dict.fromkeys(made.changes))}
        with subgraph(self._reducer.editor, f"{name}/added") as f:
            result = f.input(base, dtype, shape)
            for t in made.added:
                result += f.input(wholes[t], dtype, shape)
            for t in made.subtracted:
                result -= f.input(wholes[t], dtype, shape)
            result = tf.identity(result)
        return f.name(result)

    def _whole(self, name: str, captured: str) -> str:
        kind = self._kind(captured)
        if node_of(captured) in self._late:
            return self._value_after(self._late[node_of(captured)])
        if isinstance(kind, Replicated):
            return captured
        statistic = self._statistic(captured)
        found = self._behind(captured) if not isinstance(kind, Joined) else None
        if found is None and statistic is not None:
            return self._statistics.make(name, statistic, self._reducer.reduce_value)
        if isinstance(kind, Joined):
            return self._reducer.reduce_value(name, captured, kind)
        assert found is not None, "see `unknown`"
        wholes = {t: self._whole(f"{name}/{k}", t) for k, t in enumerate(found.wholes)}
        return make_again(self._reducer.editor, name, captured, found, wholes)
