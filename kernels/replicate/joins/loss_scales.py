"""Shares: how much each replica's part counts in a gradient, as its seed says it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import tensorflow as tf

from autodist.graph.linearity import Linearity, find_linearity
from autodist.graph.names import node_of, tensor
from autodist.graph.parts import GradientCall, PendingReductionKind
from autodist.graph.placement import SyncMode
from autodist.graph.propagation import Elements, Examples, Scalar, Total, Weight
from autodist.graph.subgraph import SubgraphBuilder, subgraph
from autodist.graph.walks import reach
from autodist.kernels.replicate.joins.joiner import Joiner
from autodist.kernels.sums import ordered_sum

EXACT = tf.float64
"""As what weights are divided, whatever the gradients' type: a sum of a mask is not exact in 16 bits."""


@dataclass(frozen=True)
class Seeds:
    """The seeds of one call of `gradient`.

    Attributes:
        by_replica: the tensor for each local replica.
        total: their sum, in their type.
        dtype: their type.
        divides: whether the sums of gradients over all workers are still to be divided by the sum of `total`s.
        scale: by what this worker's gradients are still to be multiplied before they are added up; None: by nothing.
        is_shared: whether each is a share of the whole batch, which the seeds of a sum are not.
        counts: for each local replica, whether its part weighs anything; empty, where no gradient comes of a part that
            does not, or where the weight is a number of examples.
    """

    by_replica: tuple[str, ...]
    total: str
    dtype: tf.DType
    divides: bool = False
    scale: str | None = None
    is_shared: bool = False
    counts: tuple[str, ...] = ()


class LossScales:
    """Makes the seeds of means: each replica's share of the whole batch, so that cotangents are one device's.

    The whole is known on one worker, or of a batch that every worker is given. Elsewhere it costs an exchange while the
    forward pass runs; that is spared where nothing but the sums of gradients can tell: where they are proportional to
    the seed, which is then the weight itself, and the sum is divided by that of all weights. Float16 can tell, since
    its range is small. In a step that waits for no other worker a worker sees its own batch as the whole.
    """

    def __init__(self, joiner: Joiner) -> None:
        self._joiner = joiner
        self._plan = joiner.context.plan
        self._wholes: dict[Weight, str] = {}

    def of(self, call: int, weight: Weight) -> Seeds:
        """The seeds of a mean.

        Args:
            call: position of the call of `gradient`.
            weight: of the mean.
        """
        seeds = self._seeds(call, weight)
        # What replicas add up on the way has gradients for parts, too, of which a mask leaves nothing in the loss.
        is_told_by_seed = isinstance(weight, Examples) or self._is_exchanged(self._linearity(self._call(call)))
        return seeds if is_told_by_seed else replace(seeds, counts=self._counts(call, weight))

    def _call(self, call: int) -> GradientCall:
        return self._joiner.item.gradient_calls[call]

    def _counts(self, call: int, weight: Weight) -> tuple[str, ...]:
        """Where nothing of a part counts, in a masked mean, its gradients are 0 / 0."""
        weights, _ = self._joiner.weights_of(weight, EXACT)
        with subgraph(self._joiner.editor, f"loss_counts/{call}") as f:
            counts = [tf.not_equal(f.input(w, EXACT, []), 0) for w in weights]
        return tuple(f.name(c) for c in counts)

    def _seeds(self, call: int, weight: Weight) -> Seeds:
        joiner, dtype = self._joiner, self._dtype(call)
        if joiner.context.workers == 1 or self._is_own(call):
            return self._divided(call, weight, self._own(weight))
        with subgraph(joiner.editor, f"whole_weight/{call}") as f:
            whole = joiner.parts.whole(f, weight, len(joiner.context.replicas), EXACT)
        if whole is not None:
            return self._divided(call, weight, f.name(whole))
        if weight in self._wholes:
            return self._divided(call, weight, self._wholes[weight])
        looked_at = self._find_looked_at(call)
        if looked_at is None:
            names, total = joiner.weights_of(weight, dtype)
            return Seeds(tuple(names), total, dtype, divides=True)
        if looked_at == "here":
            own = self._own(weight)
            seeds = self._divided(call, weight, own)
            total = joiner.weights_of(weight, dtype)[1]
            return Seeds(seeds.by_replica, total, dtype, divides=True, scale=total)
        return self._divided(call, weight, self._exchanged(weight))

    def _dtype(self, call: int) -> tf.DType:
        return self._joiner.item.spec_of(tensor(self._joiner.item.gradient_calls[call].seed)).dtype

    # -- the whole -------------------------------------------------------------------------------------------------

    def _own(self, weight: Weight) -> str:
        return self._joiner.weights_of(weight, EXACT)[1]

    def _exchanged(self, weight: Weight) -> str:
        if weight not in self._wholes:
            joiner, local = self._joiner, self._own(weight)
            name = f"loss_whole/{len(self._wholes)}"
            with subgraph(joiner.editor, name) as f:
                own = tf.identity(f.input(local, EXACT, []))
                result = tf.identity(own)
            self._wholes[weight] = joiner.noted(
                f, name, PendingReductionKind.LOSS, own, None, result, self._level(weight)
            )
        return self._wholes[weight]

    def _level(self, weight: Weight) -> int:
        match weight:
            case Elements(name) | Scalar(name):
                return self._joiner.level(name)
            case Total(name, inner):
                return max(self._joiner.level(name), self._level(inner))
        return 1

    def _divided(self, call: int, weight: Weight, whole: str) -> Seeds:
        joiner, dtype = self._joiner, self._dtype(call)
        weights, _ = joiner.weights_of(weight, EXACT)
        with subgraph(joiner.editor, f"loss_share/{call}") as f:
            shares = [self._share(f, w, whole, dtype) for w in weights]
            total = ordered_sum(shares)
        return Seeds(tuple(f.name(s) for s in shares), f.name(total), dtype, is_shared=True)

    def _share(self, f: SubgraphBuilder, weight: str, whole: str, dtype: tf.DType) -> tf.Tensor:
        share = tf.math.divide_no_nan(f.input(weight, EXACT, []), f.input(whole, EXACT, []))
        return tf.cast(share, dtype)

    # -- who waits for whom ----------------------------------------------------------------------------------------

    def _paces(self, call: int) -> set[SyncMode | None]:
        """How the variables are kept that a call's gradients are for."""
        names = {g.variable for g in self._joiner.stages.gradients if g.call == call}
        variable_placements = [self._plan.variable_placement(name) for name in sorted(names)]
        return {
            None if variable_placement is None else variable_placement.pace
            for variable_placement in variable_placements
        }

    def _is_own(self, call: int) -> bool:
        """Whether each worker goes by its own examples alone."""
        paces = self._paces(call)
        if paces:
            return paces == {SyncMode.ASYNCHRONOUS}
        if self._plan.is_asynchronous:
            return True
        context, stages = self._joiner.context, self._joiner.stages
        writes = [w for w in stages.state_writes if w in self._joiner.varying]
        return not context.joins_outputs and not stages.gradients and not writes

    def is_divided_by_own(self, call: int, variable: str) -> bool:
        """Whether a variable is updated by each worker alone, in a step that others of the call's are not."""
        variable_placement = self._plan.variable_placement(variable)
        return (
            variable_placement is not None
            and variable_placement.pace is SyncMode.ASYNCHRONOUS
            and not self._is_own(call)
        )

    # -- who looks at cotangents -----------------------------------------------------------------------------------

    def _find_looked_at(self, call: int) -> str | None:
        """Whether something else can tell a cotangent's size than sums of gradients: "everywhere", or "here" alone,
        where this worker's session fetches one; None if nothing can.
        """
        seen = self._linearity(self._joiner.item.gradient_calls[call])
        if self._dtype(call) not in (tf.float32, tf.float64):
            return "everywhere"
        told = {*seen.bends, *seen.halves, *self._other_readers(call, seen)}
        joins_outputs = self._joiner.context.joins_outputs
        if told & (self._needed if joins_outputs else self._trains):
            return "everywhere"
        is_returned = any(seen.depends(name) for name in self._joiner.item.outputs)
        if is_returned or told & self._needed:
            return "everywhere" if joins_outputs or self._is_exchanged(seen) else "here"
        return None

    def _is_exchanged(self, seen: Linearity) -> bool:
        """Whether workers add up cotangents on the way, which then have to be of one scale."""
        return any(seen.depends(tensor(s.node)) for s in self._joiner.item.whole_sums)

    def _linearity(self, call: GradientCall) -> Linearity:
        """What is proportional to the seed of a call, up to what runs once."""
        return find_linearity(self._joiner.item.graph_index, [call.seed], without=self._joiner.stages.once)

    def _other_readers(self, call: int, seen: Linearity) -> set[str]:
        """The nodes that run once and read something proportional to the seed other than the summed gradients."""
        joined = {t for g in self._joiner.stages.gradients if g.call == call for t in g.tensors}
        graph_index, once = self._joiner.item.graph_index, self._joiner.stages.once
        found = set()
        for name in seen.grades:
            if name not in joined and seen.depends(name):
                readers = [c for c in graph_index.consumers[node_of(name)] if c in once]
                found |= {c for c in readers if name in map(tensor, graph_index.nodes[c].input)}
        return found

    @cached_property
    def _needed(self) -> set[str]:
        """All nodes that run."""
        return self._leading_to([*map(node_of, self._joiner.item.outputs), *self._joiner.item.targets])

    @cached_property
    def _trains(self) -> set[str]:
        """What leads to writes of variables, which all workers make alike whatever they fetch."""
        return self._leading_to(self._joiner.stages.writes)

    def _leading_to(self, roots: Sequence[str]) -> set[str]:
        return reach(roots, self._joiner.item.graph_index.sources.__getitem__)
