"""RunEnd: how a run ends, where the script does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import NoReturn

from autodist.cluster.script_end import watch_script_end
from autodist.errors import AutoDistError, ClusterError, MachinesAwayError
from autodist.logs.formatting import words_of
from autodist.resources import ResourceSpec
from autodist.runs.failed_step import FailedStepGuard
from autodist.runs.peers import Peers
from autodist.runs.restarts import LostRun

log = logging.getLogger("autodist")

_INTERRUPTED = "the chief was interrupted"


class RunEnd:
    """The end of one run on one worker.

    Args:
        spec: the machines.
        is_chief: whether this is the chief.
        peers: the other workers.
        missed_step: of this worker's script.
        await_updates: waits for updates that run beside the steps.
        close_session: takes leave of the other workers' servers.
        end_threads: brings threads back from TensorFlow that a bad end has left there.

    Attributes:
        before: called at the end of the script, while all values are still there; if one raises, the run ends badly by
            that.
        reason: why the others are stopped where the script ends badly by itself.
        error: by what the run's end failed, after the script itself had ended; None: by nothing.
        is_leaving: whether SIGTERM has come to this process, by which it ends once all is saved.
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
        self._spec, self._is_chief, self._peers, self._missed_step = spec, is_chief, peers, failed_step
        self._await_updates, self._close_session, self._end_threads = await_updates, close_session, end_threads
        self._script_end = watch_script_end()
        self.before: list[Callable[[], None]] = []
        self.reason = "the chief's script failed"
        self.error: AutoDistError | None = None
        self.is_leaving = False

    @property
    def is_lost(self) -> bool:
        """On the chief, whether another worker's end has ended the run, in which no step is made any more."""
        return self._peers.failure is not None

    @property
    def is_bad(self) -> bool:
        """Whether the script ends before its part of the run is done."""
        failed = self._script_end.is_bad or self._peers.failure is not None or bool(self._missed_step)
        return failed or self._is_interrupted

    @property
    def _is_interrupted(self) -> bool:
        """Whether Ctrl-C came after the script's last step, even where the script caught it and went on."""
        moment = self._script_end.interrupted_at
        return moment is not None and not self._missed_step.has_made_one_since(moment)

    @contextmanager
    def noting_interrupts(self, is_shared: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Around a call of several steps that all workers make: a worker that Ctrl-C ends in it makes no later step.

        The others go on with the call's next step, and would take this worker's step after the call for that one.

        Args:
            is_shared: tells, after Ctrl-C, whether the workers make this call together.
        """
        before = self._script_end.interrupted_at
        try:
            yield
        except KeyboardInterrupt as error:
            if self._peers.have_joined and self._script_end.interrupted_at != before and is_shared():
                self._missed_step.note(error)
            raise

    def heed_leaving(self, heed: Callable[[str], None]) -> None:
        """On the chief, from now on calls `heed`, in another thread, with each worker to which SIGTERM has come."""
        self._peers.on_leaving = heed

    def lose(self, worker: str, reason: str) -> NoReturn:
        """On the chief, ends the run as if a worker had ended badly.

        Raises:
            WorkerFailedError: it.
        """
        self._peers.lose(worker, reason)

    def lost(self, step: int | None, saved_step: int | None, saved_as: str | None = None) -> LostRun | None:
        """On the chief, how this run was lost; None where it was not, or the script ended for a reason of its own.

        Args:
            step: the training step that was under way; None: before the first.
            saved_step: of the last checkpoint; None: there was none.
            saved_as: path of that checkpoint.
        """
        fault, ended_by = self._peers.fault, self._script_end.raised
        is_ended = self._is_interrupted or self._script_end.is_terminated
        if fault is None or is_ended or not (ended_by is None or _comes_of_others(ended_by)):
            return None
        away = self._nodes_of(fault.workers if isinstance(fault, MachinesAwayError) else ())
        leaving = self._nodes_of(self._peers.leaving)
        return LostRun(fault, step, saved_step, away, leaving, self.is_leaving, saved_as)

    def _nodes_of(self, workers: Collection[str]) -> tuple[str, ...]:
        """Addresses of other nodes than the chief's that run one of these workers."""
        others = (worker for worker in self._spec.workers if not worker.node.chief)
        return tuple(dict.fromkeys(worker.node.address for worker in others if worker.name in workers))

    def finish(self) -> None:
        """Ends the run where the script ends: on the chief when all workers are done, on others when the chief is."""
        self._missed_step.close()
        try:
            self._take_leave()
        except KeyboardInterrupt:
            self._peers.abort(_INTERRUPTED)
            raise
        finally:
            self._end_threads()

    def _take_leave(self) -> None:
        try:
            if not self.is_bad:
                self._await_updates()
        except Exception:
            self._close_session()
            self._peers.abort("the chief's updates failed")
            raise
        failures = [] if self.is_bad else list(self._close_what_is_open())
        # Before the other workers end: closing takes leave of their servers.
        self._close_session()
        if self.is_bad:  # another worker just leaves, which is told to the chief
            self._peers.abort(_INTERRUPTED if self._is_interrupted else self.reason)
            for error in self._close_what_is_open():  # the others are told first; how it ends is known already
                log.error("%s", error)
            self._tell_what_no_status_tells()
        else:
            self._peers.finish()
            for error in failures:
                raise error

    def _close_what_is_open(self) -> Iterator[AutoDistError]:
        """Calls what is to be called before the run ends, the last first; yields what that raises."""
        while self.before:
            try:
                self.before.pop()()
            except AutoDistError as error:
                yield error

    def _tell_what_no_status_tells(self) -> None:
        """On the chief, raises a failure that the script's own exit status would not show.

        Raises:
            WorkerFailedError: another worker ended badly while the script was in no step.
            ClusterError: a step failed in a thread of the script, which nobody waits for.
        """
        if not self._is_chief:
            return  # its chief tells
        if self._script_end.is_bad and not self._peers.have_joined:
            return  # the script's own error is the first cause; others have come to the same, maybe
        if self._peers.failure is not None and not (self._peers.is_told and self._script_end.is_bad):
            raise self._peers.failure
        if self._missed_step.error is not None and not self._script_end.is_bad and not self._is_interrupted:
            error = self._missed_step.error
            raise ClusterError(
                f"a step failed and the script went on: {type(error).__name__}: {words_of(error)}"
            ) from error
        for error in self._script_end.uncaught:
            if error is self._missed_step.error or isinstance(error, AutoDistError):
                raise ClusterError(
                    f"a step failed in a thread of the script: {type(error).__name__}: {words_of(error)}"
                ) from error


def _comes_of_others(error: BaseException | None) -> bool:
    """Whether an exception, or one that it was raised from or during, tells of other workers."""
    while error is not None and not isinstance(error, ClusterError):
        error = error.__cause__ or error.__context__
    return error is not None
