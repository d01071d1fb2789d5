"""Starts a run again with more machines, and without them if that start fails.

Such a start is on trial until it has saved a checkpoint: if a machine that has joined is lost by then, or if no step
can be made with it, the run goes on without it. Neither start counts as one that `max_restarts` limits.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from autodist.errors import WorkerFailedError
from autodist.resources import ResourceSpec
from autodist.runs.lost_run import Joining, LostRun
from autodist.runs.node_choice import nodes_to_leave_out
from autodist.runs.restarts import (
    MOST_FAILED_JOINS,
    EarlierStarts,
    earlier_starts,
    reason_not_to_restart,
    restart,
    source_of,
    start_again,
)
from autodist.strategies import BuildsStrategy

log = logging.getLogger("autodist")


def continue_after(lost: LostRun, spec: ResourceSpec, builder: BuildsStrategy | None) -> None:
    """Starts the script again, at its end, on the machines that it can use, if that can help; else logs the reason.

    Args:
        lost: the run, which has ended everywhere.
        spec: its machines.
        builder: its strategy builder. On a mesh, the machines that remain form whole rows.
    """
    if lost.joining is not None and not lost.chief_leaves:
        _start_with(lost.joining, lost, spec, builder)
    elif not _start_without_joined(lost, spec, builder):
        restart(lost, spec, builder)


def starts_again_after(lost: LostRun, spec: ResourceSpec) -> bool:
    """Returns True if `continue_after` starts an elastic run again; its processes then wait for that."""
    if lost.chief_leaves or lost.joining is not None:
        return not lost.chief_leaves
    if lost.away:
        return True
    earlier = earlier_starts()
    is_restarted = spec.max_restarts > 0 and reason_not_to_restart(earlier, lost, spec.max_restarts) is None
    return _are_dismissed_for(lost) and (_is_on_trial(lost, earlier) or is_restarted)


def _are_dismissed_for(lost: LostRun) -> bool:
    """Returns True if the processes of an elastic run wait for its decision after this failure."""
    return isinstance(lost.error, WorkerFailedError) or lost.is_of_script


def _start_with(joining: Joining, lost: LostRun, spec: ResourceSpec, builder: BuildsStrategy | None) -> None:
    before, after = joining.workers
    log.warning(
        "all workers start again from %s, on %d workers instead of %d, since %s (which `max_restarts` does not limit).",
        source_of(lost), after, before, joining.reason,
    )  # fmt: skip
    earlier = earlier_starts()
    left_out = (*joining.left_out, *nodes_to_leave_out(lost.leaving, spec, builder))
    left_out = earlier.left_out if spec.is_given else left_out
    lost = replace(lost, missing=())  # those that still are, are in `left_out`
    start_again(replace(earlier, fault="", step=None, left_out=left_out, joined=joining.addresses), lost)


def _start_without_joined(lost: LostRun, spec: ResourceSpec, builder: BuildsStrategy | None) -> bool:
    """Starts the script again without the machines that joined last; returns False if the run was not on trial."""
    earlier = earlier_starts()
    if lost.chief_leaves or not _is_on_trial(lost, earlier):
        return False
    if spec.is_given:
        return _start_without_processes(lost, earlier)
    left_out = nodes_to_leave_out((*earlier.joined, *lost.away), spec, builder)
    if not left_out:
        return False
    failed = earlier.count_failed_join(earlier.joined, is_last=lost.is_of_script)
    is_tried_again = min(failed[address] for address in earlier.joined) < MOST_FAILED_JOINS
    log.warning(
        "the run goes on without %s from %s, since %s %s. %s", " and ".join(earlier.joined), source_of(lost),
        lost.place, lost.fault, "It is tried again later." if is_tried_again else "It is not tried again.",
    )  # fmt: skip
    start_again(replace(earlier, left_out=left_out, joined=(), failed_joins=failed), lost)
    return True


def _start_without_processes(lost: LostRun, earlier: EarlierStarts) -> bool:
    if not _are_dismissed_for(lost):
        return False
    log.warning(
        "the run goes on without process %s from %s, since %s %s.", " and ".join(earlier.joined), source_of(lost),
        lost.place, lost.fault,
    )  # fmt: skip
    start_again(replace(earlier, left_out=(*earlier.left_out, *earlier.joined), joined=()), lost)
    return True


def _is_on_trial(lost: LostRun, earlier: EarlierStarts) -> bool:
    if not earlier.joined or lost.saved != earlier.saved:
        return False
    is_before_first_step = lost.step is None or lost.step == (lost.saved or 0) + 1
    return is_before_first_step or bool({*earlier.joined} & {*lost.failed, *lost.away, *lost.leaving})
