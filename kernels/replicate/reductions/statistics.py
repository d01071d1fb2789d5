"""Statistics: values that compare examples with their mean or maximum are computed with those of the whole batch.

Examples: a variance, the logarithm of a sum of exponentials, a coefficient of determination. The average of the
replicas' values is not the value of the whole batch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autodist.graph.names import as_input, data_inputs, is_control, node_of, tensor
from autodist.graph.op_types import is_function_of_inputs
from autodist.graph.step import PlacedStep
from autodist.graph.walks import reach
from autodist.kernels.replicate.reductions.reducer import Reducer
from autodist.layout import (
    Joined,
    Kind,
    PerExample,
    Propagation,
    Replicated,
    Unknown,
    propagate,
)

MOST_NODES = 64
"""Limit for a statistic; a network whose layers let examples see one another is larger and is not recomputed."""

_MOST_PASSES = 4

ReduceCopies = Callable[[str, str, Joined, Sequence[str] | None, int], str]
"""Reduces a tensor: label, name, kind, the tensor that replaces it in each replica, number of reductions before it."""


@dataclass(frozen=True)
class GlobalStatistic:
    """The computation of a tensor from values of the whole batch.

    Attributes:
        name: the tensor.
        region: the nodes between it and tensors of known kind.
        kinds: of the tensors that are reduced first. Each needs a number of passes over the examples.
        depths: the number of passes that precede each of them.
        flows: the dependence of tensors on the batch, once all replicas share those.
    """

    name: str
    region: frozenset[str]
    kinds: Mapping[str, Joined]
    depths: Mapping[str, int]
    flows: Propagation

    @property
    def is_arithmetic(self) -> bool:
        """True if a single pass over the examples yields all its inputs, and no example is read after that."""
        return not any(self.depths.values()) and isinstance(self.flows.kind(self.name), Replicated)


class Statistics:
    """Finds and computes the statistics of one replicated graph.

    If a loss contains a statistic, as with batch normalisation, the replicas compute it separately, and outputs show
    the values used in training.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._found: dict[str, GlobalStatistic | None] = {}

    def find(self, name: str) -> GlobalStatistic | None:
        """Returns the computation of a tensor's global value in several passes; None if there is no known one."""
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def make(self, label: str, statistic: GlobalStatistic, reduce: ReduceCopies) -> str:
        """Computes the whole batch's value; returns the tensor that holds it."""
        return _Making(self._reducer, statistic, label, reduce).whole(statistic.name)

    @functools.cached_property
    def _trained(self) -> set[str]:
        """The nodes that the losses are computed from."""
        step = self._reducer.step
        targets = [node_of(t) for call in step.gradient_calls for t in call.targets]
        return reach(targets, step.graph_index.data.__getitem__)

    def _is_exact(self, kind: Kind) -> bool:
        """Returns True if examples only see one another at nodes that training uses, too."""
        at = kind.mixed_at if isinstance(kind, Joined | PerExample) else None
        return at is None or at in self._trained

    def _find(self, name: str) -> GlobalStatistic | None:
        step, flows = self._reducer.step, self._reducer.flows
        if self._is_leaf(flows.kind(name)):
            return None
        region = self._region(name)
        if region is None:
            return None
        inputs = dict.fromkeys(i for node in region for i in step.graph_index.inputs(node))
        floats = sorted(i for i in inputs if step.spec_of(i).dtype.is_floating)
        kinds: dict[str, Joined] = {}
        depths: dict[str, int] = {}
        for depth in range(_MOST_PASSES):
            found = {t: k for t in floats if t not in kinds and isinstance(k := flows.kind(t), Joined)}
            found = {t: k for t, k in found.items() if self._is_exact(k)}
            if not found:
                return None
            kinds |= found
            depths |= dict.fromkeys(found, depth)
            flows = _sharing(step, kinds)
            if self._is_known(name, flows, region):
                return GlobalStatistic(name, frozenset(region), kinds, depths, flows)
        return None

    def _is_leaf(self, kind: Kind) -> bool:
        return isinstance(kind, Replicated | PerExample | Joined) and self._is_exact(kind)

    def _region(self, name: str) -> set[str] | None:
        """Returns the ancestors of a tensor, up to rows, sums and the like in which no example sees another."""
        region, front = {node_of(name)}, [node_of(name)]
        while front:
            node = self._reducer.step.graph_index.nodes[front.pop()]
            if node.name in self._trained or not is_function_of_inputs(node.op) or len(region) > MOST_NODES:
                return None
            more = {node_of(i) for i in data_inputs(node) if not self._is_leaf(self._reducer.flows.kind(i))}
            front += more - region
            region |= more
        return region

    def _is_known(self, name: str, flows: Propagation, region: set[str]) -> bool:
        """Returns True if a tensor can be reduced, or is arithmetic on such, once all replicas share some of them."""
        kind = flows.kind(name)
        if isinstance(kind, Joined | Replicated):
            return self._is_exact(kind)
        if not isinstance(kind, Unknown) or node_of(name) not in region:
            return False
        if not self._reducer.step.spec_of(name).shape.is_fully_defined():
            return False
        inputs = self._reducer.step.graph_index.inputs(node_of(name))
        return all(self._is_known(i, flows, region) for i in inputs)


def _sharing(step: PlacedStep, shared: Mapping[str, Joined]) -> Propagation:
    """Returns the dependence of tensors on the batch, if all replicas share the values of `shared`."""
    declared = dict.fromkeys(shared, Replicated())
    return propagate(
        step.graph_def,
        step.batch_axes,
        lambda name: step.spec_of(name).shape,
        declared=declared,
        nodes=step.graph_index.nodes,
        apart=step.apart,
    )


class _Making:
    """The computation of one statistic."""

    def __init__(self, reducer: Reducer, statistic: GlobalStatistic, label: str, reduce: ReduceCopies) -> None:
        self._reducer, self._statistic, self._label, self._reduce = reducer, statistic, label, reduce
        self._count = itertools.count()
        self._wholes: dict[str, str] = {}
        self._copies: dict[tuple[str, int], str] = {}
        self._affected: dict[str, bool] = {}

    def whole(self, name: str) -> str:
        """Returns the tensor with the whole batch's value of a captured one."""
        if name not in self._wholes:
            self._wholes[name] = self._make_whole(name)
        return self._wholes[name]

    def _make_whole(self, name: str) -> str:
        statistic = self._statistic
        label = f"{self._label}/{next(self._count)}"
        if name in statistic.kinds:
            return self._reduce(label, name, statistic.kinds[name], self._in_replicas(name), statistic.depths[name])
        kind = statistic.flows.kind(name)
        if isinstance(kind, Joined):
            return self._reduce(label, name, kind, self._in_replicas(name), 1 + max(statistic.depths.values()))
        if isinstance(kind, Replicated) and not self._is_affected(name):
            return name
        return self._copied(name, f"autodist/{label}/", None)

    def _in_replicas(self, name: str) -> list[str] | None:
        """Returns each local replica's value, computed from its examples and shared values; None: the captured one."""
        if not self._reads_affected(name):
            return None
        return [self._in_replica(name, k, is_computed=True) for k in range(self._reducer.count)]

    def _in_replica(self, name: str, k: int, is_computed: bool = False) -> str:
        if not is_computed:
            if not self._is_affected(name):
                return self._reducer.parts.named(name, k)
            if name in self._statistic.kinds or isinstance(self._statistic.flows.kind(name), Replicated):
                return self.whole(name)
        if (name, k) not in self._copies:
            prefix = f"autodist/{self._label}/in_replica_{k}/"
            self._copies[name, k] = self._copied(name, prefix, k)
        return self._copies[name, k]

    def _copied(self, name: str, prefix: str, k: int | None) -> str:
        """Copies the computation of a tensor, with inputs replaced if they depend on shared values.

        Args:
            name: of the captured tensor.
            prefix: of the copy.
            k: the local replica; None: a copy that computes with the whole batch's values.
        """
        node = node_of(name)
        if prefix + node not in self._reducer.editor:
            captured = self._reducer.step.graph_index.nodes[node].input
            source = self._reducer.editor[node_of(self._reducer.parts.named(tensor(node), k or 0))]
            inputs = [
                as_input(self._replacement(tensor(captured_input), k) or present)
                for captured_input, present in zip(captured, source.input, strict=False)
                if not is_control(captured_input)
            ]
            copy = self._reducer.editor.add_copy(source, prefix + node, inputs)
            copy.attr.pop("_class", None)
        return prefix + name

    def _replacement(self, name: str, k: int | None) -> str | None:
        """Returns the tensor that a copy reads in place of a captured one; None: the same as the original."""
        if k is not None:
            return self._in_replica(name, k) if self._is_affected(name) else None
        is_same = isinstance(self._statistic.flows.kind(name), Replicated) and not self._is_affected(name)
        return None if is_same else self.whole(name)

    def _is_affected(self, name: str) -> bool:
        return name in self._statistic.kinds or self._reads_affected(name)

    def _reads_affected(self, name: str) -> bool:
        """Returns True if a tensor is computed from shared values."""
        node = node_of(name)
        if node not in self._statistic.region:
            return False
        if node not in self._affected:
            self._affected[node] = any(map(self._is_affected, self._reducer.step.graph_index.inputs(node)))
        return self._affected[node]
