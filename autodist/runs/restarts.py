"""Restarts: after a run has lost a worker, all workers restart from the last checkpoint, a limited number of times.

The other workers have ended by then. The chief's process re-executes its script (`cluster.re_exec`), which starts the
others as usual. State of earlier starts is passed in the environment.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autodist.cluster.environments.start_rendezvous import elastic_rendezvous
from autodist.cluster.failure import is_of_machines, would_repeat
from autodist.cluster.re_exec import cannot_re_exec, has_lost_input, re_exec_at_the_end
from autodist.cluster.script_end import watch_script_end
from autodist.errors import ResourceSpecError, WorkerFailedError
from autodist.json_record import JSONRecord
from autodist.resources import ResourceSpec
from autodist.runs.early_launch import environment_of, no_early_launch
from autodist.runs.lost_run import LostRun
from autodist.runs.node_choice import nodes_to_leave_out
from autodist.runs.worker_launch import EARLIER_STARTS, WorkerLaunch
from autodist.strategies import BuildsStrategy
from autodist.waits import Event

log = logging.getLogger("autodist")

VARIABLE = EARLIER_STARTS
"""Environment variable that passes the state of earlier starts to a re-executed process, as JSON."""

MOST_FAILED_JOINS = 3
"""A machine with which so many starts have failed is not tried again."""

_SHORTEST_WAIT, _LONGEST_WAIT = 1.0, 60.0


@dataclass(frozen=True)
class EarlierStarts(JSONRecord):
    """State of the starts before this one.

    Attributes:
        count: number of restarts so far.
        fault: reason of the last restart.
        step: the step in progress at that time; None before the first.
        saved: step of the last checkpoint; None: none was saved.
        saved_as: path of that checkpoint.
        seeds: seeds of the script's runs, reused in the same order.
        left_out: addresses of nodes that this start leaves out; with `nodes: given`, numbers of processes.
        joined: addresses of nodes, or numbers of processes, that this start has taken in; (): it was made for another
            reason.
        expected: numbers of the processes, started by a scheduler, that join this start again.
        failed_joins: for each address of a node or number of a process, the number of starts that took it in and failed
            with it.
        refused: for each address, the last reported reason why the node cannot be used.
    """

    count: int = 0
    fault: str = ""
    step: int | None = None
    saved: int | None = None
    saved_as: str | None = None
    seeds: tuple[int, ...] = ()
    left_out: tuple[str, ...] = ()
    expected: tuple[int, ...] = ()
    joined: tuple[str, ...] = ()
    failed_joins: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def count_failed_join(self, addresses: Collection[str], is_last: bool = False) -> dict[str, int]:
        """Returns `failed_joins` after a start that has failed with some nodes or processes.

        Args:
            addresses: addresses of the nodes, or numbers of the processes.
            is_last: True if they are not to be tried again.
        """
        failed = {one: MOST_FAILED_JOINS if is_last else self.failed_joins.get(one, 0) + 1 for one in addresses}
        return {**self.failed_joins, **failed}


def _without_checkpoint(state: EarlierStarts) -> EarlierStarts:
    return replace(state, saved=None, saved_as=None)


@functools.cache
def earlier_starts() -> EarlierStarts:
    """Returns the state of earlier starts; removes it from the environment, so that child processes do not see it."""
    content = os.environ.pop(VARIABLE, None)
    if content is None:
        return EarlierStarts()
    state = EarlierStarts.decode(content)
    if is_gone(state.saved_as):
        log.warning(
            "%s, the checkpoint of step %d from which all workers were to restart, was removed: the script continues "
            "from what is left in its folder, or begins at its first step.", state.saved_as, state.saved,
        )  # fmt: skip
        return _without_checkpoint(state)
    return state


_seeds: list[int] = []
"""Seeds of the runs that this process's script has made."""


def seed_of_next_run(draw: Callable[[], int]) -> int:
    """Returns the seed of the script's next run: the same after each restart.

    Args:
        draw: draws a seed on the first start.
    """
    drawn = earlier_starts().seeds
    _seeds.append(drawn[len(_seeds)] if len(drawn) > len(_seeds) else draw())
    return _seeds[-1]


def require_can_restart(spec: ResourceSpec) -> None:
    """Checks that the script can be restarted, if the machines' settings request restarts.

    Raises:
        ResourceSpecError: the script cannot be restarted, or a setting for restarts has no effect.
    """
    if spec.rejoin_interval is not None and spec.min_nodes is None:
        raise ResourceSpecError(
            f"rejoin_interval is {spec.rejoin_interval:g}, but the number of processes is fixed. Run `autodist run "
            "--nodes MIN:MAX`, set `min_nodes`, or remove `rejoin_interval`."
        )
    if spec.max_restarts == 0 and spec.min_nodes is None:
        return
    if spec.max_restarts == 0 and spec.checkpoint is None:
        raise ResourceSpecError(
            f"min_nodes is {spec.min_nodes}: the run may start with that many nodes, and takes in the others by "
            "starting again from a checkpoint. Add `checkpoint`, such as {folder: checkpoints, every_minutes: 10}, or "
            "`max_restarts`, to leave out nodes at a restart only."
        )
    reason = cannot_re_exec()
    if spec.is_given and spec.min_nodes is None:
        reason = (
            "a scheduler has started the processes (`nodes: given`), and AutoDist cannot start one again. Set "
            "`min_nodes`, with which a run starts again with the processes that remain, or let the scheduler restart "
            "the job, whose script continues from its last checkpoint"
        )
    elif len(spec.workers) == 1 and spec.min_nodes is None:
        reason = "there is one worker, the script's own process, and no other process could restart it; use 0"
    if reason is not None:
        key = "max_restarts" if spec.max_restarts else "min_nodes"
        raise ResourceSpecError(f"{key} is {getattr(spec, key)}, which is not possible here: {reason}.")


def may_start_again(spec: ResourceSpec) -> bool:
    """Returns True if the number of restarts so far is below the limit."""
    return earlier_starts().count < spec.max_restarts


def restart(lost: LostRun, spec: ResourceSpec, builder: BuildsStrategy | None = None) -> None:
    """Restarts the script at its end if that can help; else logs the reason why the run ends.

    Args:
        lost: the run, which has ended everywhere.
        spec: machines of that run.
        builder: its strategy builder. On a mesh, the machines that remain form whole rows.
    """
    earlier, limit = earlier_starts(), spec.max_restarts
    away = () if lost.chief_leaves else nodes_to_leave_out(lost.away, spec, builder)
    # A start that some machines have missed has trained nothing, so it does not count as a restart.
    if away:
        _leave_out(lost, away, spec, earlier)
        return
    if spec.is_elastic and lost.away and not lost.chief_leaves:
        _start_without_lost(lost, spec, earlier)
        return
    if limit == 0 and not lost.chief_leaves:
        return  # `min_nodes` alone is for machines that are away
    reason = reason_not_to_restart(earlier, lost, limit)
    if reason is not None:
        log.error("not started again: %s", reason)
        if lost.chief_leaves:
            watch_script_end().end_by(signal.SIGTERM)
        return
    if spec.is_given and not isinstance(lost.error, WorkerFailedError):
        return  # its processes have received its end
    count, wait = earlier.count + 1, backoff(earlier.count + 1, lost.is_of_machines)
    left_out = nodes_to_leave_out(lost.leaving, spec, builder)
    log.warning(
        "all workers start again from %s%s (restart %d of %d, in %g s), since %s %s.%s%s",
        source_of(lost), _format_workers(lost, spec), count, limit, wait, lost.place, lost.fault,
        f" {_format_left_out(left_out, spec)}." if left_out else "",
        " What was read of standard input is gone." if has_lost_input() else "",
    )  # fmt: skip
    left_out = earlier.left_out if spec.is_given else left_out
    state = replace(earlier, count=count, fault=lost.fault, step=lost.step, left_out=left_out, joined=())
    Event().wait(wait)
    are_known = not left_out and not lost.missing
    start_again(state, lost, environment_of(spec, WorkerLaunch.current_script()) if are_known else None)


def _format_workers(lost: LostRun, spec: ResourceSpec) -> str:
    """Formats the number of workers with which an elastic run goes on; "" if it is the same, and for other runs."""
    rendezvous = elastic_rendezvous()
    left = len(spec.workers) if rendezvous is None else rendezvous.count_workers(_expected(lost.leaving))
    if left == len(spec.workers):
        return ""
    needed = f" (`min_nodes` is {spec.min_nodes}: others are waited for)" if left < (spec.min_nodes or 0) else ""
    return f", on {left} worker{'s' if left > 1 else ''} instead of {len(spec.workers)}{needed}"


def _expected(not_back: Collection[str]) -> tuple[int, ...]:
    """Returns the numbers of the processes of an elastic run that join its next start.

    Args:
        not_back: numbers of processes that do not.
    """
    rendezvous = elastic_rendezvous()
    return () if rendezvous is None else tuple(p for p in rendezvous.expected if str(p) not in not_back)


def _format_left_out(addresses: Sequence[str], spec: ResourceSpec) -> str:
    return f"{', '.join(addresses)} {'is' if len(addresses) == 1 else 'are'} left out (`min_nodes` is {spec.min_nodes})"


def _leave_out(lost: LostRun, away: tuple[str, ...], spec: ResourceSpec, earlier: EarlierStarts) -> None:
    left = len(spec.nodes) - len(away)
    log.warning(
        "no answer: %s, and the run starts from %s on %d node%s, among which variables and the global batch are "
        "distributed again.", _format_left_out(away, spec), source_of(lost), left, "" if left == 1 else "s",
    )  # fmt: skip
    start_again(replace(earlier, left_out=(*earlier.left_out, *away), joined=()), lost)


def _start_without_lost(lost: LostRun, spec: ResourceSpec, earlier: EarlierStarts) -> None:
    """Starts an elastic run again without processes that have left; they may join, unless that has failed often."""
    failed = earlier.count_failed_join(lost.away)
    left_out = tuple(process for process in lost.away if failed[process] >= MOST_FAILED_JOINS)
    wait = backoff(max(failed[process] for process in lost.away), is_of_machines=False)
    log.warning(
        "all workers start again from %s%s, in %g s, since %s left before the run had started.%s",
        source_of(lost), _format_workers(lost, spec), wait, _format_processes(lost.away),
        f" From now on the run refuses {_format_processes(left_out)}, after {MOST_FAILED_JOINS} such starts."
        if left_out else "",
    )  # fmt: skip
    Event().wait(wait)
    state = replace(earlier, left_out=(*earlier.left_out, *left_out), joined=(), failed_joins=failed)
    start_again(state, lost)


def _format_processes(numbers: Sequence[str]) -> str:
    return " and ".join(f"process {number}" for number in numbers)


def start_again(state: EarlierStarts, lost: LostRun, early_launch: Mapping[str, str] | None = None) -> None:
    """Starts the script again at its end, from the last checkpoint of a run.

    Args:
        state: state for the next start, without what follows from the run: the seeds, the checkpoint, missing nodes.
        lost: the run.
        early_launch: the environment of a start whose other workers are known; None: they follow from the script.
    """
    left_out = tuple(dict.fromkeys((*state.left_out, *lost.missing)))
    state = replace(
        state, seeds=tuple(_seeds), saved=lost.saved, saved_as=lost.saved_as, left_out=left_out, refused=lost.refused,
        expected=_expected((*left_out, *lost.leaving)),
    )  # fmt: skip
    state = _without_checkpoint(state) if is_gone(lost.saved_as) else state  # logged by then
    try:
        re_exec_at_the_end({VARIABLE: state.encode().decode(), **(early_launch or no_early_launch())})
    except OSError as error:
        log.error("not started again: %s. Leave the directory where the script was started.", error)


def source_of(lost: LostRun) -> str:
    """Returns text about the checkpoint from which the next start resumes."""
    if lost.saved is None:
        return "the script's beginning (no checkpoint was saved)"
    if is_gone(lost.saved_as):
        return f"what is left of its checkpoints ({lost.saved_as}, of step {lost.saved}, was removed)"
    return f"the checkpoint of step {lost.saved}"


def is_gone(saved_as: str | None) -> bool:
    """Returns True if the checkpoint with this path no longer exists."""
    return saved_as is not None and not os.path.exists(f"{saved_as}.index")


def backoff(count: int, is_of_machines: bool) -> float:
    """Returns the seconds before a restart: a machine needs time to come back, and its processes must end.

    If all machines are there, all processes have ended, and the first restart comes at once.

    Args:
        count: number of this restart, from 1.
        is_of_machines: True if the machine caused the failure.
    """
    if count == 1 and not is_of_machines:
        return 0.0
    return min(_LONGEST_WAIT, _SHORTEST_WAIT * 2 ** (count - 1))


def reason_not_to_restart(earlier: EarlierStarts, lost: LostRun, limit: int) -> str | None:
    """Returns the reason why a run is not restarted; None if it is.

    Args:
        earlier: state of the starts before it.
        lost: the failure.
        limit: the number of restarts allowed.
    """
    error = lost.error
    if lost.chief_leaves:
        return "SIGTERM came, which ends the run."
    if not isinstance(error, WorkerFailedError) and earlier.count == 0:
        return "the workers could not be started, which is no loss"
    if isinstance(error, WorkerFailedError) and would_repeat(error):
        return "the script would fail in the same way again."
    if (
        earlier.count
        and _is_same_failure(earlier, lost)
        and isinstance(error, WorkerFailedError)
        and not is_of_machines(error)
    ):
        return f"it has failed so {lost.place} twice in a row, and would a third time."
    if earlier.count >= limit:
        return f"{limit} restart{'s' if limit > 1 else ''} were made, and `max_restarts` allows no more."
    return None


def _is_same_failure(earlier: EarlierStarts, lost: LostRun) -> bool:
    """Returns True if the previous start was lost by the same failure in the same step.

    A script's error in the step after a checkpoint occurs, in the next start, before all workers have joined.
    """
    if _without_numbers(lost.fault) != _without_numbers(earlier.fault):
        return False
    is_after_checkpoint = lost.step is None and lost.saved is not None and earlier.step == lost.saved + 1
    return lost.step == earlier.step or (is_after_checkpoint and " ended with exit status " in lost.fault)


def _without_numbers(fault: str) -> str:
    """Removes numbers that vary between starts, for example seconds; keeps the worker's name."""
    return re.sub(r"(?<= )\d+(?= s\b)", "N", fault)
