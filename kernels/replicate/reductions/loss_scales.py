"""Loss scales: the share of each replica's part in a gradient, applied through the gradient's seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import tensorflow as tf

from autodist.graph.names import data_inputs, node_of, tensor
from autodist.graph.parts import GradientCall, PendingReductionKind
from autodist.graph.subgraph import SubgraphBuilder, subgraph
from autodist.graph.walks import reach
from autodist.kernels.replicate.reductions.reducer import LocalPart, Reducer
from autodist.kernels.sums import ordered_sum
from autodist.layout import Elements, Examples, Scalar, Total, Weight
from autodist.layout.linearity import Linearity, find_linearity
from autodist.placement.synchrony import SyncMode

EXACT = tf.float64
"""The dtype in which weights are divided, whatever that of the gradients: a sum of a mask is not exact in 16 bits."""


@dataclass(frozen=True)
class Seeds:
    """The seeds of one call of `gradient`.

    Attributes:
        by_replica: the tensor for each local replica.
        total: their sum, in their dtype.
        dtype: their dtype.
        divides: True if the sums of gradients over all workers are to be divided by the sum of all `total`s.
        scale: factor by which this worker's gradients are to be multiplied before they are summed; None: 1.
        is_shared: True if each seed is a share of the whole batch; False for the seeds of a sum.
        counts: for each local replica, a boolean that is False if its part has weight 0. Empty if parts of weight 0
            contribute no gradient, or if the weight is a number of examples.
    """

    by_replica: tuple[str, ...]
    total: str
    dtype: tf.DType
    divides: bool = False
    scale: str | None = None
    is_shared: bool = False
    counts: tuple[str, ...] = ()


class LossScales:
    """Computes the seeds of means: each replica's share of the whole batch, so that cotangents equal one device's.

    The total weight is known with one worker, or if every worker is fed the whole batch. Otherwise it costs a
    communication round during the forward pass. That round is skipped if the seed's scale only affects the sums of
    gradients, and these are proportional to it: the seed is then the weight itself, and the sum is divided by the
    total weight. Float16 gradients need the round, since their range is small. In a step that waits for no other
    worker, a worker uses its own batch as the whole.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._plan = reducer.context.plan
        self._wholes: dict[Weight, str] = {}

    def of(self, call: int, weight: Weight) -> Seeds:
        """Returns the seeds of a mean.

        Args:
            call: position of the call of `gradient`.
            weight: of the mean.
        """
        seeds = self._seeds(call, weight)
        # In-step all-reduces yield gradients even for parts that a mask removes from the loss entirely.
        needs_no_counts = isinstance(weight, Examples) or self._is_all_reduced(self._linearity(self._call(call)))
        return seeds if needs_no_counts else replace(seeds, counts=self._counts(call, weight))

    def _call(self, call: int) -> GradientCall:
        return self._reducer.step.gradient_calls[call]

    def _counts(self, call: int, weight: Weight) -> tuple[str, ...]:
        """Returns booleans per replica: the gradients of a masked mean over a part of weight 0 are 0 / 0."""
        weights, _ = self._reducer.weights_of(weight, EXACT)
        with subgraph(self._reducer.editor, f"loss_counts/{call}") as f:
            counts = [tf.not_equal(f.input(w, EXACT, []), 0) for w in weights]
        return tuple(f.name(c) for c in counts)

    def _seeds(self, call: int, weight: Weight) -> Seeds:
        reducer, dtype = self._reducer, self._dtype(call)
        if not reducer.group.spans_workers or self._is_local(call):
            return self._divided(call, weight, self._local_total(weight))
        with subgraph(reducer.editor, f"total_weight/{call}") as f:
            whole = reducer.parts.whole(f, weight, reducer.group.size, EXACT)
        if whole is not None:
            return self._divided(call, weight, f.name(whole))
        if weight in self._wholes:
            return self._divided(call, weight, self._wholes[weight])
        observers = self._find_observers(call)
        if observers is None:
            names, total = reducer.weights_of(weight, dtype)
            return Seeds(tuple(names), total, dtype, divides=True)
        if observers == "here":
            local_total = self._local_total(weight)
            seeds = self._divided(call, weight, local_total)
            total = reducer.weights_of(weight, dtype)[1]
            return Seeds(seeds.by_replica, total, dtype, divides=True, scale=total)
        return self._divided(call, weight, self._all_reduced(weight))

    def _dtype(self, call: int) -> tf.DType:
        return self._reducer.step.spec_of(tensor(self._reducer.step.gradient_calls[call].seed)).dtype

    # -- total weights ---------------------------------------------------------------------------------------------

    def _local_total(self, weight: Weight) -> str:
        return self._reducer.weights_of(weight, EXACT)[1]

    def _all_reduced(self, weight: Weight) -> str:
        if weight not in self._wholes:
            reducer, local = self._reducer, self._local_total(weight)
            name = f"loss_total/{len(self._wholes)}"
            with subgraph(reducer.editor, name) as f:
                local_total = tf.identity(f.input(local, EXACT, []))
                result = tf.identity(local_total)
            self._wholes[weight] = reducer.noted(
                f, name, PendingReductionKind.LOSS, LocalPart(local_total), result, self._level(weight)
            )
        return self._wholes[weight]

    def _level(self, weight: Weight) -> int:
        match weight:
            case Elements(name) | Scalar(name):
                return self._reducer.level(name)
            case Total(name, inner):
                return max(self._reducer.level(name), self._level(inner))
        return 1

    def _divided(self, call: int, weight: Weight, whole: str) -> Seeds:
        reducer, dtype = self._reducer, self._dtype(call)
        weights, _ = reducer.weights_of(weight, EXACT)
        with subgraph(reducer.editor, f"loss_scale/{call}") as f:
            shares = [self._share(f, w, whole, dtype) for w in weights]
            total = ordered_sum(shares)
        return Seeds(tuple(f.name(s) for s in shares), f.name(total), dtype, is_shared=True)

    def _share(self, f: SubgraphBuilder, weight: str, whole: str, dtype: tf.DType) -> tf.Tensor:
        share = tf.math.divide_no_nan(f.input(weight, EXACT, []), f.input(whole, EXACT, []))
        return tf.cast(share, dtype)

    # -- synchronisation -------------------------------------------------------------------------------------------

    def _sync_modes(self, call: int) -> set[SyncMode | None]:
        """Returns the sync modes of the variables that a call's gradients are for."""
        names = {g.variable for g in self._reducer.stages.gradients if g.call == call}
        synchronies = [self._plan.synchrony(name) for name in sorted(names)]
        return {None if synchrony is None else synchrony.mode for synchrony in synchronies}

    def _is_local(self, call: int) -> bool:
        """Returns True if each worker only uses its own examples."""
        modes = self._sync_modes(call)
        if modes:
            return all(mode is not None and mode.is_alone for mode in modes)
        if self._plan.updates_alone:
            return True
        context, stages = self._reducer.context, self._reducer.stages
        writes = [w for w in stages.state_writes if w in self._reducer.replica_dependent]
        return not context.reduces_outputs and not stages.gradients and not writes

    def is_divided_by_own(self, call: int, variable: str) -> bool:
        """Returns True if a variable is updated per worker, while other variables of the call are updated jointly."""
        synchrony = self._plan.synchrony(variable)
        return synchrony is not None and synchrony.mode.is_alone and not self._is_local(call)

    # -- readers of cotangents -------------------------------------------------------------------------------------

    def _find_observers(self, call: int) -> str | None:
        """Returns "everywhere" if anything but sums of gradients depends on the scale of a cotangent; "here" if only
        a fetch of this worker's session does; None if nothing does.
        """
        seen = self._linearity(self._reducer.step.gradient_calls[call])
        if self._dtype(call) not in (tf.float32, tf.float64):
            return "everywhere"
        readers = {*seen.nonlinear, *seen.float16_nodes, *self._other_readers(call, seen)}
        reduces_outputs = self._reducer.context.reduces_outputs
        if readers & (self._needed if reduces_outputs else self._trains):
            return "everywhere"
        is_returned = any(seen.depends(name) for name in self._reducer.step.outputs)
        if is_returned or readers & self._needed:
            return "everywhere" if reduces_outputs or self._is_all_reduced(seen) else "here"
        return None

    def _is_all_reduced(self, seen: Linearity) -> bool:
        """Returns True if workers all-reduce cotangents within the step, which then need the same scale."""
        return any(seen.depends(tensor(s.node)) for s in self._reducer.step.in_step_all_reduces)

    def _linearity(self, call: GradientCall) -> Linearity:
        """Returns the tensors that are proportional to the seed of a call, up to run-once nodes."""
        return find_linearity(self._reducer.step.graph_index, [call.seed], without=self._reducer.stages.once)

    def _other_readers(self, call: int, seen: Linearity) -> set[str]:
        """Returns run-once nodes that read a tensor proportional to the seed, other than the summed gradients."""
        reduced = {t for g in self._reducer.stages.gradients if g.call == call for t in g.tensors}
        nodes = self._reducer.step.graph_index.nodes
        return {
            name
            for name in self._reducer.stages.once
            if any(read not in reduced and seen.depends(read) for read in data_inputs(nodes[name]))
        }

    @cached_property
    def _needed(self) -> set[str]:
        """All nodes that run."""
        return self._leading_to([*map(node_of, self._reducer.step.outputs), *self._reducer.step.targets])

    @cached_property
    def _trains(self) -> set[str]:
        """The ancestors of variable writes. All workers compute them, whatever they fetch."""
        return self._leading_to(self._reducer.stages.writes)

    def _leading_to(self, roots: Sequence[str]) -> set[str]:
        return reach(roots, self._reducer.step.graph_index.sources.__getitem__)
