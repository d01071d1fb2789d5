"""Synchronization modes: lock-step steps, and steps in which workers run ahead of each other."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist.errors import RewriteError, StrategyError
from autodist.graph.execution_order import ExecutionOrder, find_execution_order
from autodist.graph.parts import PendingReduction, PendingReductionKind
from autodist.graph.step import ReplicatedStep
from autodist.graph.subgraph import subgraph
from autodist.kernels.base import Context, Kernel
from autodist.kernels.communicate.results import Results
from autodist.kernels.place.synchrony import (
    find_synchrony,
    require_one_owner_per_write,
    require_unmixed,
    require_written_by_updates,
    runs_freely,
)
from autodist.kernels.replicate.reductions import EVEN_PARTS, SOME_EXAMPLES
from autodist.placement.synchrony import Synchrony, SyncMode

log = logging.getLogger("autodist")


@dataclass(frozen=True)
class SetSyncMode(Kernel[ReplicatedStep, ReplicatedStep]):
    """Sets the synchrony of each variable that has one; lets steps that no variable makes wait run ahead.

    A step whose variables are all asynchronous, stale or make local steps runs ahead freely. Variables that the compute
    part writes (moving averages, metrics) and outputs (the loss) are then local to each worker. Reducing them would
    keep all workers in lock-step.
    """

    name: ClassVar[str] = "set-sync-mode"
    after: ClassVar[Mapping[str, str]] = {
        "place-stages": "a pipeline has no pending reductions between workers",
    }

    def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
        if context.workers == 1 or context.goes_through_stages(step):
            return step
        if not step.owners and context.plan.local_steps.keys().isdisjoint(step.by_name):
            return step
        synchrony_of = find_synchrony(step, context.plan)
        require_one_owner_per_write(step, synchrony_of)
        if any(synchrony.runs_ahead for synchrony in synchrony_of.values()):
            require_written_by_updates(step, synchrony_of)
            require_unmixed(step, synchrony_of)
        step = replace(step, synchrony_of=synchrony_of, order=_order_of(step, synchrony_of))
        return _keep_state_local(step, context) if runs_freely(step, synchrony_of) else step


def _order_of(step: ReplicatedStep, synchrony_of: Mapping[str, Synchrony]) -> ExecutionOrder:
    handles = {step.by_name[name].handle for name in synchrony_of}
    writes = [name for name, effect in step.graph_index.effects.items() if effect.writes & handles]
    captured = step.stages.order
    writes.sort(key=lambda name: (captured.get(name, len(captured)), name))
    order = find_execution_order(step.graph_index, step.reductions, {name: k for k, name in enumerate(writes)})
    if order is None:
        raise RewriteError("the pending reductions of the step depend on each other in a cycle")
    return order


def _keep_state_local(step: ReplicatedStep, context: Context) -> ReplicatedStep:
    local = [pending for pending in step.reductions if pending.kind is not PendingReductionKind.GRADIENT]
    _require_no_boundary(local, step.synchrony_of)
    _require_one_weight(local, step.synchrony_of)
    _require_no_sum(local)
    if local and context.worker == 0:
        _log_local_state()
    results = Results(step)
    for pending in local:
        if pending.name == EVEN_PARTS:
            _check_local_parts_alone(results, pending, context)
        elif pending.name == SOME_EXAMPLES:
            _assume_examples(results, pending)
        elif not context.computes:
            _return_zero(results, pending, step.outputs)
    even = step.even_parts and replace(step.even_parts, is_own=True)
    return results.to_step(local, even_parts=even, own_state=tuple(local))


def _stale_variables(synchrony_of: Mapping[str, Synchrony]) -> list[str]:
    return sorted(name for name, synchrony in synchrony_of.items() if synchrony.mode is SyncMode.STALE)


def _require_no_boundary(reductions: Sequence[PendingReduction], synchrony_of: Mapping[str, Synchrony]) -> None:
    cross_stage = [pending for pending in reductions if pending.kind is PendingReductionKind.BOUNDARY]
    stale = _stale_variables(synchrony_of)
    if cross_stage and stale:
        raise StrategyError(
            f"an update reads {cross_stage[0].local[0]}, which every replica computes, and {stale[0]} has staleness: "
            "its owner applies updates outside the steps and does not have this tensor. Set staleness: 0, or use "
            "AllReduce."
        )


def _require_one_weight(reductions: Sequence[PendingReduction], synchrony_of: Mapping[str, Synchrony]) -> None:
    losses = [pending for pending in reductions if pending.kind is PendingReductionKind.LOSS]
    stale = _stale_variables(synchrony_of)
    if losses and stale:
        raise StrategyError(
            "the loss has terms with different weights (a mean and a sum, or a ratio of sums), or its gradient is not "
            "linear in the loss (clipped by tf.custom_gradient, used as data, in float16). Each worker then needs all "
            f"examples of a step, and {stale[0]} has staleness: no step waits for another worker. Set staleness: 0, or "
            "use AllReduce."
        )


def _require_no_sum(reductions: Sequence[PendingReduction]) -> None:
    in_step = next((pending for pending in reductions if pending.kind is PendingReductionKind.WHOLE), None)
    if in_step is not None:
        raise StrategyError(
            f"{in_step.local[0]} is reduced or gathered over all replicas while the step computes (by synchronized "
            "batch normalisation or all_gather), and all variables have sync: false or staleness: no step waits for "
            "another worker. Set synchronized=False and gather nothing, so that each replica uses its own examples, or "
            "set sync: true."
        )


def _check_local_parts_alone(results: Results, pending: PendingReduction, context: Context) -> None:
    """Restricts the check for equal parts to this worker's replicas, as if all workers had the same examples."""
    count, here = pending.group.size, len(context.copied_replicas)
    with subgraph(results.editor, "even_parts/local") as f:
        kinds = pending.shape.num_elements() // 2  # sums of numbers of rows, then of their squares
        factors = tf.constant([count] * kinds + [count * here] * kinds, pending.dtype)
        moments = f.input(pending.result[0], pending.dtype, pending.shape) * factors
    readers = [name for name in results.editor.consumers(pending.result[0].partition(":")[0]) if name not in f.made]
    results.replace(pending.result[0], f.name(moments), readers)


def _assume_examples(results: Results, pending: PendingReduction) -> None:
    """Assumes that other workers have examples, since this worker does not wait for them."""
    with subgraph(results.editor, f"{pending.name}/local") as f:
        results.replace(pending.result[0], f.name(tf.ones(pending.shape, pending.dtype)))


def _return_zero(results: Results, pending: PendingReduction, outputs: Sequence[str]) -> None:
    """Makes a worker without replicas return 0 for outputs that each worker computes on its own."""
    if pending.result[0] in outputs:
        with subgraph(results.editor, f"no_replicas/{pending.name}") as f:
            nothing = tf.zeros(pending.shape, pending.dtype)
        results.replace(pending.result[0], f.name(nothing))


@functools.cache
def _log_local_state() -> None:
    log.info(
        "the step waits for no other worker (sync: false, staleness, or local steps): moving averages, metrics and "
        "losses are local to each worker."
    )
