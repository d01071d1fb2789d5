"""The end of a run, at the end of the script."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NoReturn, Protocol

from autodist.cluster.environments.start_rendezvous import elastic_rendezvous
from autodist.cluster.script_end import watch_script_end
from autodist.errors import AutoDistError, ClusterError, MachinesAwayError, WorkerFailedError
from autodist.logs.formatting import words_of
from autodist.logs.quiet import quiet_tensorflow
from autodist.logs.quiet_stream import quiet_stream
from autodist.resources import ResourceSpec
from autodist.runs.failed_step import FailedStepGuard
from autodist.runs.lost_run import Joining, LostRun
from autodist.runs.peers import Peers
from autodist.runs.restarts import earlier_starts

if TYPE_CHECKING:
    from autodist.runs.joining_search import JoiningSearch

log = logging.getLogger("autodist")

_INTERRUPTED = "the chief was interrupted"

_STARTS_AGAIN = 75
"""Exit status of a script that is to start again, if that fails; EX_TEMPFAIL of sysexits.h."""


class CodeEnd(Protocol):
    """The end of the code that trains; `ScriptEnd` documents the attributes."""

    uncaught: list[BaseException]
    interrupted_at: float | None
    is_terminated: bool

    @property
    def is_bad(self) -> bool: ...

    @property
    def raised(self) -> BaseException | None: ...

    @property
    def is_held(self) -> bool: ...

    def end_by(self, number: signal.Signals) -> None: ...


class RunEnd:
    """The end of one run on one worker.

    Args:
        spec: the machines.
        is_chief: True on the chief.
        peers: the other workers.
        failed_step: failed-step guard of this worker's script.
        await_updates: waits for the background updates.
        close_session: closes the connections to the other workers' servers.
        end_threads: makes threads return from TensorFlow that a failure has left there. If a signal interrupts the
            call, another call goes on.

    Attributes:
        end_threads: the argument.
        before: callbacks for the end of the script, called while all values still exist; if one raises, the run fails
            with that error.
        reason: the reason for stopping the others, if the script fails.
        error: the error of the run's end, after the script itself has ended; None if there was none.
        code_end: the end of the script, or of the function; `host` sets the latter.
        is_leaving: True if this process has received SIGTERM and ends once everything is saved.
        joining: machines with which the run starts again at the end of the script; None: none.
        missing_machines: looks for machines that the run does not have; None: nothing does.
    """

    def __init__(
        self,
        spec: ResourceSpec,
        is_chief: bool,
        peers: Peers,
        failed_step: FailedStepGuard,
        await_updates: Callable[[], None],
        close_session: Callable[[], None],
        end_threads: Callable[[], None],
    ) -> None:
        self._spec, self._is_chief, self._peers, self._failed_step = spec, is_chief, peers, failed_step
        self._await_updates, self._close_session, self.end_threads = await_updates, close_session, end_threads
        self.code_end: CodeEnd = watch_script_end()
        peers.on_observed = self._note_if_held
        self._filters_log = is_chief  # other workers' agents filter their output all the time
        self._filters_stream = is_chief
        self._filter = ExitStack()
        self.before: list[Callable[[], None]] = []
        self.reason = "the chief's script failed"
        self.error: AutoDistError | None = None
        self.is_leaving = False
        self.joining: Joining | None = None
        self.missing_machines: JoiningSearch | None = None

    def host(self, end: CodeEnd) -> None:
        """Ends the run with a function, whose output no agent filters.

        Args:
            end: the end of the function.
        """
        self.code_end, self._filters_log = end, True
        self._filters_stream = False  # the process and its outputs are the engine's

    def filter_log(self) -> None:
        """Removes TensorFlow's routine lines from the chief's standard error until the run has ended."""
        self._filter.enter_context(quiet_stream(self._filters_stream))

    @property
    def is_lost(self) -> bool:
        """On the chief, True if another worker's failure has ended the run, so that no further step can run."""
        return self._peers.failure is not None

    @property
    def is_bad(self) -> bool:
        """True if the script ends before its part of the run is done."""
        failed = self.code_end.is_bad or self.is_lost or self.joining is not None or bool(self._failed_step)
        return failed or self._is_interrupted

    def _note_if_held(self) -> None:
        """Records the script's exception if its process does not end, which the others would wait for."""
        error = self.code_end.raised
        if error is not None and self.code_end.is_held:
            self._failed_step.note(error)

    def how_it_failed(self, error: BaseException) -> str:
        """Describes a worker that takes part in no later step, and has not ended either, for its failure's message."""
        kind = ("autodist.errors." if isinstance(error, AutoDistError) else "") + type(error).__name__
        if error is not self.code_end.raised or not self.code_end.is_held:  # a notebook keeps the last cell's error
            return f"failed in a step ({kind}: {words_of(error)}), and its script went on"
        threads = [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
        held = ", ".join(f"thread {one.name}" for one in threads)
        return (
            f"has ended its script by an exception ({kind}: {words_of(error)}), but not its process, which waits for "
            + (f"its {held} (a thread with daemon=True would not keep it)" if held else "an exit handler")
        )

    @property
    def _is_interrupted(self) -> bool:
        """True if Ctrl-C came after the script's last step, even if the script caught it and continued."""
        moment = self.code_end.interrupted_at
        return moment is not None and not self._failed_step.has_stepped_since(moment)

    @contextmanager
    def noting_interrupts(self, is_shared: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Context of a collective call of several steps: after Ctrl-C in it, this worker may make no later step.

        The others continue with the call's next step, and would match it with this worker's first step after the call.

        Args:
            is_shared: returns True after Ctrl-C if the workers make this call together.
        """
        before = self.code_end.interrupted_at
        try:
            yield
        except KeyboardInterrupt as error:
            if self._peers.have_joined and self.code_end.interrupted_at != before and is_shared():
                self._failed_step.note(error)
            raise

    def decide_with(self, starts_again: Callable[[], bool]) -> None:
        """On the chief, registers a function to be called at the end of an elastic run.

        Args:
            starts_again: returns True if the run starts again, for which its processes then wait.
        """
        self._peers.starts_again = starts_again

    def watch_leaving(self, on_leaving: Callable[[str], None]) -> None:
        """On the chief, registers a function that is called, in another thread, with each worker that gets SIGTERM."""
        self._peers.on_leaving = on_leaving

    def start_again_with(self, joining: Joining) -> NoReturn:
        """On the chief, ends the script, so that the run can start again with more machines.

        Raises:
            SystemExit: always; if the script catches it, the run ends all the same when the script does.
        """
        self.joining, self.reason = joining, f"the run starts again, since {joining.reason}"
        sys.exit(_STARTS_AGAIN)

    def lose(self, worker: str, reason: str) -> NoReturn:
        """On the chief, ends the run as if a worker had failed.

        Raises:
            WorkerFailedError: always, for that worker.
        """
        self._peers.lose(worker, reason)

    def lost(self, step: int | None, saved_step: int | None, saved_as: str | None = None) -> LostRun | None:
        """On the chief, returns how this run was lost; None if it was not, or the script ended for a reason of its own.

        Args:
            step: the training step in progress; None before the first.
            saved_step: step of the last checkpoint; None if there is none.
            saved_as: path of that checkpoint.
        """
        fault = self._fault(self.code_end.raised)
        if fault is None or self._is_interrupted or self.code_end.is_terminated:
            return None
        away = self._nodes_of(fault.workers if isinstance(fault, MachinesAwayError) else ())
        failed = self._nodes_of((fault.worker,) if isinstance(fault, WorkerFailedError) else ())
        leaving = self._nodes_of(self._peers.leaving)
        machines = self.missing_machines
        missing, refused = ((), {}) if machines is None else (machines.addresses, machines.refused)
        return LostRun(
            fault, step, saved_step, saved_as=saved_as, away=away, failed=failed, leaving=leaving,
            chief_leaves=self.is_leaving, missing=missing, refused=refused, joining=self.joining,
        )  # fmt: skip

    def _fault(self, ended_by: BaseException | None) -> AutoDistError | None:
        """Returns the error by which the run was lost; None if the script ended for a reason of its own."""
        if ended_by is not None and not _is_about_others(ended_by):
            return ended_by if isinstance(ended_by, AutoDistError) and earlier_starts().joined else None
        if self.joining is not None and self._peers.fault is None:
            return ClusterError(self.reason)
        return self._peers.fault

    def _nodes_of(self, workers: Collection[str]) -> tuple[str, ...]:
        """Returns the addresses of the nodes, except the chief's, that run one of these workers.

        In an elastic run, returns the numbers of their processes.
        """
        rendezvous = elastic_rendezvous() if self._spec.is_elastic else None
        if rendezvous is not None:
            numbered = zip(self._spec.workers, rendezvous.machines.processes, strict=True)
            return tuple(str(process) for worker, process in numbered if worker.name in workers)
        others = (worker for worker in self._spec.workers if not worker.node.chief)
        return tuple(dict.fromkeys(worker.node.address for worker in others if worker.name in workers))

    def finish(self) -> None:
        """Ends the run at the end of the script: the chief waits for all workers, the others wait for the chief."""
        has_begun = False
        try:
            self._failed_step.close(is_survived=not self.code_end.is_bad)
            # The filter of the descriptor also drops what Python's log cannot write, as on a full disk.
            with self._filter, quiet_tensorflow(self._filters_log and self._peers.have_joined):
                has_begun = True
                self._finish_and_end_threads()
        except KeyboardInterrupt:
            if not has_begun:
                self._peers.abort(_INTERRUPTED)
            raise

    def _finish_and_end_threads(self) -> None:
        try:
            self._finish()
        except KeyboardInterrupt:
            self._peers.abort(_INTERRUPTED)
            raise
        finally:
            self.end_threads()

    def _finish(self) -> None:
        try:
            if not self.is_bad:
                self._await_updates()
        except Exception:
            self._close_session()
            self._peers.abort("the chief's updates failed")
            raise
        failures = [] if self.is_bad else list(self._run_callbacks())
        # Before the other workers end, since closing contacts their servers.
        self._close_session()
        if self.is_bad:  # another worker only leaves; its agent reports that to the chief
            if self._is_interrupted and not self._is_chief:  # the chief reports it as the reason of this worker's end
                self.code_end.end_by(signal.SIGINT)
            self._peers.abort(_INTERRUPTED if self._is_interrupted else self.reason)
            for error in self._run_callbacks():  # after the others are notified; the outcome is already known
                log.error("%s", error)
            self._raise_hidden_failure()
        else:
            self._peers.finish()
            for error in failures:
                raise error

    def _run_callbacks(self) -> Iterator[AutoDistError]:
        """Calls the `before` callbacks, last first; yields the errors that they raise."""
        while self.before:
            try:
                self.before.pop()()
            except AutoDistError as error:
                yield error

    def _raise_hidden_failure(self) -> None:
        """On the chief, raises a failure that the script's own exit status would not show.

        Raises:
            WorkerFailedError: another worker failed while the script was in no step.
            ClusterError: a step failed in a thread of the script that is not joined.
        """
        if not self._is_chief:
            return  # the chief reports it
        if self.code_end.is_bad and not self._peers.have_joined:
            return  # the script's own error is the first cause; other workers may have raised the same
        if self._peers.failure is not None and not (self._peers.is_raised and self.code_end.is_bad):
            raise self._peers.failure
        if self._failed_step.error is not None and not self.code_end.is_bad and not self._is_interrupted:
            error = self._failed_step.error
            raise ClusterError(
                f"a step failed and the script continued: {type(error).__name__}: {words_of(error)}"
            ) from error
        for error in self.code_end.uncaught:
            if error is self._failed_step.error or isinstance(error, AutoDistError):
                raise ClusterError(
                    f"a step failed in a thread of the script: {type(error).__name__}: {words_of(error)}"
                ) from error


def _is_about_others(error: BaseException | None) -> bool:
    """Returns True if an exception, or one in its chain of causes and contexts, is about other workers."""
    while error is not None and not isinstance(error, ClusterError):
        error = error.__cause__ or error.__context__
    return error is not None
