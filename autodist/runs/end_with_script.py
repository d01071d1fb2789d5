"""The end of a run with the script, or with the function of another program, that has created its AutoDist."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import signal

from autodist.cluster.environments.start_rendezvous import elastic_rendezvous
from autodist.cluster.hosted_function import HostedFunction
from autodist.cluster.script_end import watch_script_end
from autodist.errors import AutoDistError
from autodist.logs.formatting import summary_of
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.reading.file_sharding import NO_FILES_SHARDED
from autodist.runs.growth import continue_after, starts_again_after
from autodist.runs.lost_run import LostRun
from autodist.runs.run import Run
from autodist.runs.undistributed import UndistributedScript

log = logging.getLogger("autodist")


def end_with_script(run: Run, alone: UndistributedScript) -> None:
    """Ends the run when the script ends, and starts the script again if that is requested and can help.

    Args:
        run: the run.
        alone: what the script trains by itself.
    """
    if run.spec.is_elastic:
        run.end.decide_with(functools.partial(_starts_again, run))
    atexit.register(end_at_exit, run, alone, os.getpid())


def end_with_function(run: Run, alone: UndistributedScript, hosted: HostedFunction) -> None:
    """Ends the run when a function ends; its process goes on.

    Args:
        run: the run.
        alone: what the function trains by itself.
        hosted: the function. Its `at_the_end` raises an AutoDistError if the run has failed and it does not know.
    """
    hosted.at_the_end = functools.partial(_end_function, run, alone, hosted)


def end_at_exit(run: Run, alone: UndistributedScript, process: int) -> None:
    """Ends the run as Python ends, or starts the script again; an exit handler.

    Args:
        run: the run.
        alone: what the script trains by itself.
        process: the id of the worker's process, in which alone the run is ended.
    """
    if os.getpid() != process:
        return  # forked from the worker's process, whose run is still active
    try:
        _end_well_or_restart(run, alone)
    except SystemExit:  # SIGTERM ends the process with this exception
        # The chief stops this worker while it ends, for example if all scripts raise the same error.
        run.end.end_threads()
    except KeyboardInterrupt:
        watch_script_end().end_by(signal.SIGINT)
        run.end.end_threads()


def _end_well_or_restart(run: Run, alone: UndistributedScript) -> None:
    if not watch_script_end().is_bad:
        _warn_at_the_end(run, alone)
    is_well = _finishes_well(run)
    if run.spec.is_elastic and (rendezvous := elastic_rendezvous()):
        rendezvous.dismiss(not is_well and _starts_again(run), "" if is_well else run.end.reason)
    if not is_well:
        _restart(run)


def _end_function(run: Run, alone: UndistributedScript, hosted: HostedFunction) -> None:
    try:
        if hosted.end.raised is None:
            _warn_at_the_end(run, alone)
            run.pull()  # the function may read the variables after the end, when no other worker is there
        else:
            run.end.reason = f"the chief's function raised {summary_of(hosted.end.raised)}"
        run.end.finish()
    finally:
        alone.stop()
        run.leave_process()


def _warn_at_the_end(run: Run, alone: UndistributedScript) -> None:
    alone.leave_state(run.has_idle_workers)
    is_refused = run.failed_step.refused is not None and not run.failed_step.has_stepped
    if is_refused and run.workers > 1 and run.index == 0:  # the others may have waited for the step
        log.warning("No training step was distributed: the script has caught %s", run.failed_step.refused)
    if run.shards_files and not run.coordination.has_agreed:
        log.warning("%s", NO_FILES_SHARDED, extra=ALIKE_EVERYWHERE)


def _finishes_well(run: Run) -> bool:
    was_lost = run.end.is_lost
    try:
        run.end.finish()
    except AutoDistError as error:
        run.end.error = error
        # The loss was logged when it came, and the script has gone on since.
        log.error("%s%s", "the script ends with a bad status, since the run had failed: " if was_lost else "", error)
        watch_script_end().fail()
        return False
    return not (watch_script_end().is_bad or run.end.joining)


def _restart(run: Run) -> None:
    lost = _lost(run)
    if lost is not None:
        continue_after(lost, run.spec, run.builder)


def _starts_again(run: Run) -> bool:
    lost = _lost(run)
    return lost is not None and starts_again_after(lost, run.spec)


def _lost(run: Run) -> LostRun | None:
    """Returns how the run was lost; None if it was not, or if it starts again after no loss."""
    if run.recorder is not None or (run.spec.max_restarts == 0 and run.spec.min_nodes is None):
        return None
    return run.end.lost(run.step + 1 if run.have_joined else None, run.saved_step, run.saved_as)
