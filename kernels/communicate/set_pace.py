"""Set pace: which steps run in lock-step, and which let workers run ahead of each other."""

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
from autodist.graph.placement import SyncMode, VariablePlacement
from autodist.graph.step import Replication, Step
from autodist.graph.subgraph import subgraph
from autodist.kernels.base import Context, Kernel
from autodist.kernels.communicate.results import Results
from autodist.kernels.place.variable_placements import (
    find_variable_placements,
    require_one_keeper_a_write,
    require_unmixed,
    require_written_by_updates,
    runs_freely,
)
from autodist.kernels.replicate.joins import EVEN_PARTS, SOME_EXAMPLES

log = logging.getLogger("autodist")


@dataclass(frozen=True)
class SetPace(Kernel):
    """Notes how each owned variable is kept; where a step waits for no other worker's update, nothing else makes it.

    A step whose variables are all asynchronous or stale runs freely: each worker keeps to itself what the compute part
    writes (averages of batch normalisation, metrics) and returns (the loss), for joining these would hold all workers
    in lock-step.
    """

    name: ClassVar[str] = "set-pace"

    def apply(self, item: Step, context: Context) -> Step:
        replication = item.replication
        if context.workers == 1 or not item.owners or replication is None or context.goes_through_stages(item):
            return item
        variable_placements = find_variable_placements(item, replication, context.plan)
        require_one_keeper_a_write(item, variable_placements)
        if any(variable_placement.runs_ahead for variable_placement in variable_placements.values()):
            require_written_by_updates(item, replication, variable_placements)
            require_unmixed(item, replication, variable_placements)
        kept = replace(
            replication,
            variable_placements=variable_placements,
            order=_order_of(item, replication, variable_placements),
        )
        return (
            _keep_state(item, kept, context)
            if runs_freely(kept, variable_placements)
            else replace(item, replication=kept)
        )


def _order_of(
    item: Step, replication: Replication, variable_placements: Mapping[str, VariablePlacement]
) -> ExecutionOrder:
    handles = {item.by_name[name].handle for name in variable_placements}
    writes = [name for name, effect in item.graph_index.effects.items() if effect.writes & handles]
    captured = replication.stages.order
    writes.sort(key=lambda name: (captured.get(name, len(captured)), name))
    order = find_execution_order(item.graph_index, replication.joins, {name: k for k, name in enumerate(writes)})
    if order is None:
        raise RewriteError("what the replicas make parts of cannot be added up in any order")
    return order


def _keep_state(item: Step, replication: Replication, context: Context) -> Step:
    own = [join for join in replication.joins if join.kind is not PendingReductionKind.GRADIENT]
    _require_no_boundary(own, replication.variable_placements)
    _require_one_weight(own, replication.variable_placements)
    _require_no_sum(own)
    if own and context.worker == 0:
        _say_that_state_is_local()
    results = Results(item, replication)
    for join in own:
        if join.name == EVEN_PARTS:
            _check_local_parts_alone(results, join, context)
        elif join.name == SOME_EXAMPLES:
            _take_for_given(results, join)
        elif not context.computes:
            _have_nothing(results, join, item.outputs)
    even = replication.even_parts and replace(replication.even_parts, is_own=True)
    return results.to_item(own, even_parts=even)


def _require_no_boundary(
    joins: Sequence[PendingReduction], variable_placements: Mapping[str, VariablePlacement]
) -> None:
    asked = [join for join in joins if join.kind is PendingReductionKind.BOUNDARY]
    stale = sorted(
        name for name, variable_placement in variable_placements.items() if variable_placement.pace is SyncMode.STALE
    )
    if asked and stale:
        raise StrategyError(
            f"an update reads {asked[0].local[0]}, which every replica computes, and {stale[0]} has staleness: its "
            "owner applies updates apart from the steps and does not have it. Set staleness to 0, or use AllReduce."
        )


def _require_one_weight(
    joins: Sequence[PendingReduction], variable_placements: Mapping[str, VariablePlacement]
) -> None:
    asked = [join for join in joins if join.kind is PendingReductionKind.LOSS]
    stale = sorted(
        name for name, variable_placement in variable_placements.items() if variable_placement.pace is SyncMode.STALE
    )
    if asked and stale:
        raise StrategyError(
            "the loss adds values of which each counts in another way (a mean beside a sum, a ratio of sums), or its "
            "gradient is looked at on its way (clipped by tf.custom_gradient, taken for data, in float16), so that "
            f"each worker has to know of all examples of a step, and {stale[0]} has staleness: no step waits for "
            "another worker. Set staleness to 0, or use AllReduce."
        )


def _require_no_sum(joins: Sequence[PendingReduction]) -> None:
    asked = next((join for join in joins if join.kind is PendingReductionKind.WHOLE), None)
    if asked is not None:
        raise StrategyError(
            f"{asked.local[0]} is added up or gathered over all replicas while the step computes, as synchronized "
            "batch normalisation and all_gather do, and all variables have sync: false or staleness: no step waits for "
            "another worker. Set synchronized=False and gather nothing, so that each replica goes by its own examples, "
            "or take sync: true."
        )


def _check_local_parts_alone(results: Results, join: PendingReduction, context: Context) -> None:
    """The replicas of one worker have to have equal parts; the check asks for them as if all workers were like this."""
    count, here = len(context.replicas), len(context.copied_replicas)
    with subgraph(results.editor, "even_parts/local") as f:
        kinds = join.shape.num_elements() // 2  # sums of numbers of rows, then of their squares
        factors = tf.constant([count] * kinds + [count * here] * kinds, join.dtype)
        moments = f.input(join.result[0], join.dtype, join.shape) * factors
    readers = [name for name in results.editor.consumers(join.result[0].partition(":")[0]) if name not in f.made]
    results.replace(join.result[0], f.name(moments), readers)


def _take_for_given(results: Results, join: PendingReduction) -> None:
    """A worker that waits for no other does not know whether others have examples."""
    with subgraph(results.editor, f"{join.name}/local") as f:
        results.replace(join.result[0], f.name(tf.ones(join.shape, join.dtype)))


def _have_nothing(results: Results, join: PendingReduction, outputs: Sequence[str]) -> None:
    """A worker without replicas returns 0 for what the others return of their own."""
    if join.result[0] in outputs:
        with subgraph(results.editor, f"no_replicas/{join.name}") as f:
            nothing = tf.zeros(join.shape, join.dtype)
        results.replace(join.result[0], f.name(nothing))


@functools.cache
def _say_that_state_is_local() -> None:
    log.info(
        "the step waits for no other worker (sync: false, or staleness): averages of batch normalisation, metrics and "
        "losses are each worker's own."
    )
