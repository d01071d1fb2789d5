"""Restarts: where a run has lost a worker, all workers start again, from the last checkpoint, and not for ever.

The other workers have ended by then, and the chief's process runs its script once more (`cluster.begin_anew`), which
starts the others as ever. What it has to know of the starts before it stands in its environment.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace

from autodist.cluster.failure import is_of_machines, would_repeat
from autodist.cluster.re_exec import cannot_re_exec, has_lost_input, re_exec_at_the_end
from autodist.cluster.script_end import watch_script_end
from autodist.errors import ClusterError, ResourceSpecError, WorkerFailedError
from autodist.resources import ResourceSpec

log = logging.getLogger("autodist")

VARIABLE = "AUTODIST_RESTARTS"
"""Environment variable by which a process that begins anew is told what came before, as JSON."""

_SHORTEST_WAIT, _LONGEST_WAIT = 1.0, 60.0


@dataclass(frozen=True)
class Before:
    """What came before the start of this process's script.

    Attributes:
        count: how often it has begun anew.
        fault: why, the last time.
        step: that was under way then; None: nobody had made one.
        saved: step of the last checkpoint; None: none was saved.
        saved_as: path of that checkpoint.
        seeds: of the runs that the script had made, in order, which it makes again.
        left_out: addresses of nodes that were away.
    """

    count: int = 0
    fault: str = ""
    step: int | None = None
    saved: int | None = None
    saved_as: str | None = None
    seeds: tuple[int, ...] = ()
    left_out: tuple[str, ...] = ()


def _without_checkpoint(told: Before) -> Before:
    return replace(told, saved=None, saved_as=None)


@functools.cache
def before() -> Before:
    """What came before this start; taken from the environment, so that what the script starts does not find it."""
    told = os.environ.pop(VARIABLE, None)
    if told is None:
        return Before()
    found = Before(**json.loads(told))
    if is_gone(found.saved_as):
        log.warning(
            "%s, the checkpoint of step %d from which all workers were to start again, was removed: the script goes on "
            "from what is left in its folder, or begins at its first step.", found.saved_as, found.saved,
        )  # fmt: skip
        return _without_checkpoint(found)
    return found


_seeds: list[int] = []
"""Of the runs that this process's script has made."""


def seed_of_next_run(draw: Callable[[], int]) -> int:
    """The seed of the run that the script makes now: the same each time that it begins anew.

    Args:
        draw: makes one for the first time.
    """
    drawn = before().seeds
    _seeds.append(drawn[len(_seeds)] if len(drawn) > len(_seeds) else draw())
    return _seeds[-1]


def require_can_restart(spec: ResourceSpec) -> None:
    """Passes where the script that makes a run of these machines could begin anew, if it may.

    Raises:
        ResourceSpecError: it could not.
    """
    if spec.max_restarts == 0:
        if spec.min_nodes is not None:
            raise ResourceSpecError(
                f"min_nodes is {spec.min_nodes}, and says how many nodes have to be there when a run starts again; say "
                "`max_restarts`, too."
            )
        return
    reason = cannot_re_exec()
    if spec.is_given:
        reason = (
            "a scheduler has started the processes (`nodes: given`), and AutoDist cannot start one again; let the "
            "scheduler start the job again, whose script goes on from its last checkpoint"
        )
    elif len(spec.workers) == 1:
        reason = "there is one worker, the script's own process, and nobody who would start it again; say 0"
    if reason is not None:
        raise ResourceSpecError(f"max_restarts is {spec.max_restarts}, and cannot be done here: {reason}.")


@dataclass(frozen=True)
class LostRun:
    """What a run was lost by.

    Attributes:
        error: as it was told to the script.
        step: the training step that was under way; None: none was made.
        saved: step of the last checkpoint; None: none was saved.
        away: addresses of nodes, where it could not start without them and nothing else was wrong.
        leaving: addresses of nodes that have said, by SIGTERM, that they go away; the chief's is none of them.
        chief_leaves: whether SIGTERM has come to this process.
        saved_as: path of the last checkpoint.
    """

    error: ClusterError
    step: int | None
    saved: int | None
    away: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    chief_leaves: bool = False
    saved_as: str | None = None

    @property
    def fault(self) -> str:
        """In words, as a part of a sentence."""
        error = self.error
        if isinstance(error, WorkerFailedError):
            return f"{error.worker} {error.reason}".rstrip(".")
        told = str(error).rstrip(".")
        return told[:1].lower() + told[1:]

    @property
    def place(self) -> str:
        return "before the first step" if self.step is None else f"in step {self.step}"


def may_start_again(spec: ResourceSpec) -> bool:
    """Whether a run may start again as far as its number of starts goes."""
    return before().count < spec.max_restarts


def restart(lost: LostRun, spec: ResourceSpec) -> None:
    """Lets the script begin anew when it has ended, if that may help; else says why it ends for good.

    Args:
        lost: the run, of which nothing is left.
        spec: of that run.
    """
    earlier, limit = before(), spec.max_restarts
    if earlier.count and lost.away and not lost.chief_leaves and _are_enough_without(lost.away, spec):
        # This start has trained nothing, so that it is none of those which are counted.
        _leave_out(lost, spec, earlier)
        return
    reason = why_not(earlier, lost, limit)
    if reason is not None:
        log.error("not started again: %s", reason)
        if lost.chief_leaves:
            watch_script_end().end_by(signal.SIGTERM)
        return
    count, wait = earlier.count + 1, backoff(earlier.count + 1)
    left_out = lost.leaving if _are_enough_without(lost.leaving, spec) else ()
    log.warning(
        "all workers start again from %s (restart %d of %d, in %g s), since %s %s.%s%s",
        _source(lost), count, limit, wait, lost.place, lost.fault,
        f" {_told_left_out(left_out, spec)}." if left_out else "",
        " What was read of standard input is gone." if has_lost_input() else "",
    )  # fmt: skip
    told = Before(count, lost.fault, lost.step, lost.saved, lost.saved_as, tuple(_seeds), left_out)
    told = _without_checkpoint(told) if is_gone(lost.saved_as) else told  # which is told above
    threading.Event().wait(wait)
    _begin(told)


def _are_enough_without(addresses: Collection[str], spec: ResourceSpec) -> bool:
    return len(spec.nodes) - len(addresses) >= (spec.min_nodes or len(spec.nodes))


def _told_left_out(addresses: Sequence[str], spec: ResourceSpec) -> str:
    return f"{', '.join(addresses)} {'is' if len(addresses) == 1 else 'are'} left out (`min_nodes` is {spec.min_nodes})"


def _leave_out(lost: LostRun, spec: ResourceSpec, earlier: Before) -> None:
    left = len(spec.nodes) - len(lost.away)
    log.warning(
        "no answer: %s, and the run starts from %s on %d node%s, to which variables are dealt anew, and the global "
        "batch.", _told_left_out(lost.away, spec), _source(lost), left, "" if left == 1 else "s",
    )  # fmt: skip
    _begin(replace(earlier, seeds=tuple(_seeds), left_out=(*earlier.left_out, *lost.away)))


def _begin(told: Before) -> None:
    try:
        re_exec_at_the_end({VARIABLE: json.dumps(asdict(told))})
    except OSError as error:
        log.error("not started again: %s. Leave the directory where the script was started.", error)


def _source(lost: LostRun) -> str:
    if lost.saved is None:
        return "the script's beginning (no checkpoint was saved)"
    if is_gone(lost.saved_as):
        return f"what is left of its checkpoints ({lost.saved_as}, of step {lost.saved}, was removed)"
    return f"the checkpoint of step {lost.saved}"


def is_gone(saved_as: str | None) -> bool:
    """Whether the checkpoint of a path is not there any more."""
    return saved_as is not None and not os.path.exists(f"{saved_as}.index")


def backoff(count: int) -> float:
    """Seconds before a start: a machine needs time to come back, and its work has to end."""
    return min(_LONGEST_WAIT, _SHORTEST_WAIT * 2 ** (count - 1))


def why_not(earlier: Before, lost: LostRun, limit: int) -> str | None:
    """Why a run is not started again; None: it is.

    Args:
        earlier: what came before it.
        lost: how it was lost.
        limit: how often it may be started again.
    """
    error = lost.error
    if lost.chief_leaves:
        return "SIGTERM came, which ends the run."
    if not isinstance(error, WorkerFailedError) and earlier.count == 0:
        return "the workers could not be started, which is no loss"
    if isinstance(error, WorkerFailedError) and would_repeat(error):
        return "the script would fail so again."
    if (
        earlier.count
        and _is_alike(earlier, lost)
        and isinstance(error, WorkerFailedError)
        and not is_of_machines(error)
    ):
        return f"it has failed so {lost.place} twice in a row, and would a third time."
    if earlier.count >= limit:
        return f"{limit} restart{'s' if limit > 1 else ''} were made, and `max_restarts` allows no more."
    return None


def _is_alike(earlier: Before, lost: LostRun) -> bool:
    """Whether the start before was lost by the same, in the same step.

    What a script raises in the step that follows a checkpoint comes, in the next start, before all have joined.
    """
    if _without_numbers(lost.fault) != _without_numbers(earlier.fault):
        return False
    is_after_checkpoint = lost.step is None and lost.saved is not None and earlier.step == lost.saved + 1
    return lost.step == earlier.step or (is_after_checkpoint and " ended with exit status " in lost.fault)


def _without_numbers(fault: str) -> str:
    """A fault without what differs from time to time, seconds say; which worker it was belongs to it."""
    return re.sub(r"(?<= )\d+(?= s\b)", "N", fault)
