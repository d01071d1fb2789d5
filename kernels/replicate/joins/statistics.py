"""Statistics: a value that compares examples with their own mean or maximum is made with the whole batch's.

A variance, the logarithm of a sum of exponentials, a coefficient of determination: each replica's own, averaged, is not
that of the whole.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autodist.graph.names import as_input, is_control, node_of, tensor
from autodist.graph.op_types import is_stateless
from autodist.graph.ops import draws_numbers
from autodist.graph.propagation import (
    Joined,
    Kind,
    PerExample,
    Propagation,
    Replicated,
    Unknown,
    propagate,
)
from autodist.graph.step import Step
from autodist.graph.walks import reach
from autodist.kernels.replicate.joins.joiner import Joiner

MOST_NODES = 64
"""A statistic has few; a network whose layers let examples see one another is not computed once more."""

_MOST_PASSES = 4

JoinCopies = Callable[[str, str, Joined, Sequence[str] | None, int], str]
"""Joins a tensor: a label, its name, its kind, what stands for it in each replica, how many joins go before."""


@dataclass(frozen=True)
class WholeStatistic:
    """How a tensor is made of what the whole batch has.

    Attributes:
        name: the tensor.
        region: the nodes between it and what is known without it.
        kinds: of the tensors that have to be joined first; of each, by how many passes over the examples it is found.
        depths: of these, how many passes go before.
        flows: how tensors depend on the batch, once all replicas share those.
    """

    name: str
    region: frozenset[str]
    kinds: Mapping[str, Joined]
    depths: Mapping[str, int]
    flows: Propagation

    @property
    def is_arithmetic(self) -> bool:
        """Whether one pass over the examples gives all that it is made of, and no example is looked at after that."""
        return not any(self.depths.values()) and isinstance(self.flows.kind(self.name), Replicated)


class Statistics:
    """Finds and makes them in one replicated graph.

    Where a loss is computed so, as in batch normalisation, replicas stay by themselves: what is returned of it is what
    they have trained with.
    """

    def __init__(self, joiner: Joiner) -> None:
        self._joiner = joiner
        self._found: dict[str, WholeStatistic | None] = {}

    def find(self, name: str) -> WholeStatistic | None:
        """How the whole batch's value of a tensor is made in several passes; None if it is not, or not known to be."""
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def make(self, label: str, statistic: WholeStatistic, join: JoinCopies) -> str:
        """The tensor that holds the whole batch's value."""
        return _Making(self._joiner, statistic, label, join).whole(statistic.name)

    @functools.cached_property
    def _trained(self) -> set[str]:
        """The nodes that the losses are made of."""
        item = self._joiner.item
        targets = [node_of(t) for call in item.gradient_calls for t in call.targets]
        return reach(targets, item.graph_index.data.__getitem__)

    def _is_exact(self, kind: Kind) -> bool:
        """Whether examples see one another nowhere but where they do so in the training, too."""
        at = kind.mixed_at if isinstance(kind, Joined | PerExample) else None
        return at is None or at in self._trained

    def _find(self, name: str) -> WholeStatistic | None:
        item, flows = self._joiner.item, self._joiner.flows
        if self._is_leaf(flows.kind(name)):
            return None
        region = self._region(name)
        if region is None:
            return None
        inputs = dict.fromkeys(tensor(i) for n in region for i in item.graph_index.nodes[n].input if not is_control(i))
        floats = sorted(i for i in inputs if item.spec_of(i).dtype.is_floating)
        kinds: dict[str, Joined] = {}
        depths: dict[str, int] = {}
        for depth in range(_MOST_PASSES):
            found = {t: k for t in floats if t not in kinds and isinstance(k := flows.kind(t), Joined)}
            found = {t: k for t, k in found.items() if self._is_exact(k)}
            if not found:
                return None
            kinds |= found
            depths |= dict.fromkeys(found, depth)
            flows = _sharing(item, kinds)
            if self._is_known(name, flows, region):
                return WholeStatistic(name, frozenset(region), kinds, depths, flows)
        return None

    def _is_leaf(self, kind: Kind) -> bool:
        return isinstance(kind, Replicated | PerExample | Joined) and self._is_exact(kind)

    def _region(self, name: str) -> set[str] | None:
        """The nodes behind a tensor, up to rows, sums and the like in which no example sees another."""
        region, front = {node_of(name)}, [node_of(name)]
        while front:
            node = self._joiner.item.graph_index.nodes[front.pop()]
            if node.name in self._trained or not _is_function_of_inputs(node.op) or len(region) > MOST_NODES:
                return None
            more = {node_of(i) for i in node.input if not is_control(i) and not self._is_leaf(self._kind_of_input(i))}
            front += more - region
            region |= more
        return region

    def _kind_of_input(self, spelling: str) -> Kind:
        return self._joiner.flows.kind(tensor(spelling))

    def _is_known(self, name: str, flows: Propagation, region: set[str]) -> bool:
        """Whether a tensor is one that joins, or arithmetic on such, once all replicas share some of them."""
        kind = flows.kind(name)
        if isinstance(kind, Joined | Replicated):
            return self._is_exact(kind)
        if not isinstance(kind, Unknown) or node_of(name) not in region:
            return False
        if not self._joiner.item.spec_of(name).shape.is_fully_defined():
            return False
        inputs = [i for i in self._joiner.item.graph_index.nodes[node_of(name)].input if not is_control(i)]
        return all(self._is_known(tensor(i), flows, region) for i in inputs)


def _sharing(item: Step, shared: Mapping[str, Joined]) -> Propagation:
    """How tensors depend on the batch where all replicas have the same of some of them."""
    axes = {name: axis for name, axis in item.inputs.items() if axis is not None}
    declared = dict.fromkeys(shared, Replicated())
    return propagate(
        item.graph_def,
        axes,
        lambda name: item.spec_of(name).shape,
        declared=declared,
        nodes=item.graph_index.nodes,
        apart=item.apart,
    )


def _is_function_of_inputs(op: str) -> bool:
    return is_stateless(op) and not draws_numbers(op)


class _Making:
    """Makes one statistic."""

    def __init__(self, joiner: Joiner, statistic: WholeStatistic, label: str, join: JoinCopies) -> None:
        self._joiner, self._statistic, self._label, self._join = joiner, statistic, label, join
        self._count = itertools.count()
        self._wholes: dict[str, str] = {}
        self._copies: dict[tuple[str, int], str] = {}
        self._affected: dict[str, bool] = {}

    def whole(self, name: str) -> str:
        """The tensor that holds the whole batch's value of a captured one."""
        if name not in self._wholes:
            self._wholes[name] = self._make_whole(name)
        return self._wholes[name]

    def _make_whole(self, name: str) -> str:
        statistic = self._statistic
        label = f"{self._label}/{next(self._count)}"
        if name in statistic.kinds:
            return self._join(label, name, statistic.kinds[name], self._in_replicas(name), statistic.depths[name])
        kind = statistic.flows.kind(name)
        if isinstance(kind, Joined):
            return self._join(label, name, kind, self._in_replicas(name), 1 + max(statistic.depths.values()))
        if isinstance(kind, Replicated) and not self._is_affected(name):
            return name
        return self._copied(name, f"autodist/{label}/", None)

    def _in_replicas(self, name: str) -> list[str] | None:
        """What each local replica makes of its examples and of what all share; None: its own."""
        if not self._reads_affected(name):
            return None
        return [self._own(name, k, is_asked=True) for k in range(self._joiner.count)]

    def _own(self, name: str, k: int, is_asked: bool = False) -> str:
        if not is_asked:
            if not self._is_affected(name):
                return self._joiner.parts.named(name, k)
            if name in self._statistic.kinds or isinstance(self._statistic.flows.kind(name), Replicated):
                return self.whole(name)
        if (name, k) not in self._copies:
            prefix = f"autodist/{self._label}/in_replica_{k}/"
            self._copies[name, k] = self._copied(name, prefix, k)
        return self._copies[name, k]

    def _copied(self, name: str, prefix: str, k: int | None) -> str:
        """A copy of what a replica computes, of other inputs where these are made of what is shared.

        Args:
            name: of the captured tensor.
            prefix: of the copy.
            k: the local replica; None: a copy that computes with the whole batch's values.
        """
        node = node_of(name)
        if prefix + node not in self._joiner.editor:
            captured = self._joiner.item.graph_index.nodes[node].input
            source = self._joiner.editor[node_of(self._joiner.parts.named(tensor(node), k or 0))]
            inputs = [
                as_input(self._instead(tensor(mine), k) or present)
                for mine, present in zip(captured, source.input, strict=False)
                if not is_control(mine)
            ]
            copy = self._joiner.editor.add_copy(source, prefix + node, inputs)
            copy.attr.pop("_class", None)
        return prefix + name

    def _instead(self, name: str, k: int | None) -> str | None:
        """The tensor that a copy reads in place of a captured one; None: it reads the same as its original."""
        if k is not None:
            return self._own(name, k) if self._is_affected(name) else None
        is_same = isinstance(self._statistic.flows.kind(name), Replicated) and not self._is_affected(name)
        return None if is_same else self.whole(name)

    def _is_affected(self, name: str) -> bool:
        return name in self._statistic.kinds or self._reads_affected(name)

    def _reads_affected(self, name: str) -> bool:
        """Whether a tensor is made of others that are shared."""
        node = node_of(name)
        if node not in self._statistic.region:
            return False
        if node not in self._affected:
            inputs = [i for i in self._joiner.item.graph_index.nodes[node].input if not is_control(i)]
            self._affected[node] = any(self._is_affected(tensor(i)) for i in inputs)
        return self._affected[node]
