"""Talk: what the workers of a run tell one another between two steps."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from autodist.errors import (
    CaptureError,
    CaptureMismatchError,
    CheckpointError,
    ClusterError,
    ReductionError,
    RewriteError,
    StrategyError,
    UnevenBatchError,
)
from autodist.logs.formatting import words_of
from autodist.runs.failed_step import FailedStepGuard
from autodist.runs.peers import Peers
from autodist.runs.whole_batches import GatheredInput, WholeFed, bring_together
from autodist.runtime.arrays import combine_parts, pack_part, require_reduction, unpack
from autodist.runtime.call_matching import Call, CallMatching, Note
from autodist.runtime.mailbox import Mailbox, Send
from autodist.runtime.messages import Messages

log = logging.getLogger("autodist")

_REFUSALS = (CaptureError, ReductionError, RewriteError, StrategyError, UnevenBatchError)
"""Errors by which a step may be refused before any part of it has run."""

FIT = "fit"
RESTORE = "ad.checkpoint(…).restore"


class Coordination:
    """One worker's side of it. All workers say, and hear, the same things in the same order.

    Args:
        index: of this worker; the chief's is 0.
        workers: how many there are.
        peers: the other workers.
        missed_step: of this worker's script.
        join: brings this worker together with the others, unless it is already, and lets the talk `begin`.
        land: waits until all is written that this worker's steps have asked for.

    Attributes:
        messages: by which most of it is sent; None: the workers have not joined.
        is_told_apart: whether the script has asked which worker it is on, so that workers may do different things.
        has_agreed: whether the workers have told one another what they read of files that are dealt out.
        has_work: whether they have agreed on something, or reduced something.
    """

    def __init__(
        self,
        index: int,
        workers: int,
        peers: Peers,
        failed_step: FailedStepGuard,
        join: Callable[[], None],
        land: Callable[[], None],
    ) -> None:
        self._index, self._workers, self._peers, self._missed_step = index, workers, peers, failed_step
        self._join, self._land = join, land
        self.messages: Messages | None = None
        self._calls: CallMatching | None = None
        self._mailbox: Mailbox | None = None
        self._give_up: Send | None = None
        self.are_workers_distinguished = self.has_agreed = self.has_work = False
        self._has_told_of_evaluation = False

    # -- begin and end ---------------------------------------------------------------------------------------------

    def begin(self, messages: Messages, mailbox: Mailbox | None) -> None:
        """Begins the talk, when all workers have joined.

        Args:
            messages: of the run.
            mailbox: which is read from now on; None where there is one worker.

        Raises:
            CheckpointError, ClusterError: the workers have come to different calls; on all workers.
        """
        self.messages = messages
        if mailbox is not None:
            send = mailbox.open_box(lambda message: calls.receive(Note.decode(message)))
            self._calls = calls = CallMatching(self._index, self._workers, lambda to, note: send(to, note.encode()))
            self._give_up = mailbox.open_box(lambda message: self._peers.give_up(*json.loads(message)))
            self._mailbox = mailbox
            mailbox.start()
            self._require_alike()

    def _require_alike(self) -> None:
        """Passes where all workers have made the calls in which the chief has spoken before they joined."""
        parts = self.gather(json.dumps(self._peers.apart).encode())
        apart = {w: told for w, part in enumerate(parts) if (told := json.loads(part)) is not None}
        found = json.dumps(next(iter(apart.items()), None)).encode()
        first = json.loads(self.exchange(found))
        if first is not None:
            worker, (mine, chiefs) = first
            told = f"{_who(worker)} has come to {mine or 'a step'}, and the chief to {chiefs or 'a step'}"
            raise _not_alike(told, RESTORE if RESTORE in (mine, chiefs) else FIT)

    def close(self) -> None:
        """This worker's script says no more."""
        if self._calls is not None and self._mailbox is not None:
            self._peers.guard(self._calls.leave)
        self.end_reading()

    def end_reading(self) -> None:
        """Reads no more of what other workers tell this one at any time."""
        if self._mailbox is not None:
            self._mailbox.close()

    # -- what all do alike -----------------------------------------------------------------------------------------

    def passes(self) -> None:
        """This worker comes to what all workers do alike: a step, or what they tell one another between two."""
        if self._calls is not None and self._calls.passes():
            self._peers.guard(self._calls.answer)

    def exchange(self, said: bytes = b"") -> bytes:
        """What the chief says, once all others have come to it; all of them call it alike."""
        heard: bytes = self._peers.guard(self._begun.exchange, said)
        return heard

    def gather(self, said: bytes) -> list[bytes]:
        """On the chief, what each worker says; on the others nothing. All of them call it alike."""
        heard: list[bytes] = self._peers.guard(self._begun.gather, said)
        return heard

    def meet(self) -> None:
        """On the chief, waits until all others have finished their last step."""
        self._land()
        self.passes()
        self._peers.guard(self._begun.meet)

    def wait_for_chief(self, say: bytes = b"set") -> None:
        """On another worker, returns once the chief has called it as well."""
        self.exchange(say)

    @property
    def _begun(self) -> Messages:
        assert self.messages is not None, "the workers have joined"
        return self.messages

    # -- what comes before there are others, too -------------------------------------------------------------------

    def reduce(self, value: Any, how: str) -> np.ndarray:
        """The mean, sum, largest or smallest of a value over all workers; all of them call it alike.

        Raises:
            ReductionError: it cannot be reduced so; on all workers.
        """
        with self._missed_step.noted(is_step=False, is_before=True):
            require_reduction(how)
            mine = pack_part(value, how)
        if self._workers == 1:
            return unpack(combine_parts([mine]))
        self.has_work = True
        with self._missed_step.turn:
            self._join()
            self._land()  # what the script reads next has what all workers' steps have asked for
            self.passes()
            parts = self.gather(mine)
            return unpack(self.exchange(combine_parts(parts) if parts else b""))

    def flush_together(self) -> None:
        """Returns once all is written that the steps of all workers have asked for; all of them call it alike."""
        with self._missed_step.noted():
            self._land()
            self.passes()
            self.gather(b"")
            self.exchange()

    def bring_together(self, fed: Sequence[GatheredInput]) -> WholeFed:
        """What all workers feed to a step, brought to the chief; all of them call it alike, before the step.

        Raises:
            CaptureError: the parts cannot be joined; on all workers.
            EmptyBatchError: no worker has examples; on all workers.
        """
        self.passes()
        return bring_together(fed, self._index, self.gather, self.exchange)

    def agree(self, said: str, decide: Callable[[list[str]], str]) -> str:
        """What the chief decides of what each worker says, on every worker; all of them call it alike, between steps.

        Args:
            said: by this worker.
            decide: is called on the chief with what they say, by worker.
        """
        self.has_work = self.has_agreed = True
        return self._decided(said, decide)

    def is_true_everywhere(self, here: bool) -> bool:
        """Whether something holds on all workers; all of them call it alike, between steps."""
        return bool(json.loads(self._decided(json.dumps(here), lambda said: json.dumps("false" not in said))))

    def _decided(self, said: str, decide: Callable[[list[str]], str]) -> str:
        with self._missed_step.noted():
            self._join()
            self.passes()
            heard = [one.decode() for one in self.gather(said.encode())]
            return self.exchange(decide(heard).encode() if heard else b"").decode()

    def share(self, said: str, what: str = FIT, is_certain: bool = True) -> str:
        """What the chief says, on every worker; all of them call it alike, also before there are others.

        Args:
            said: by the chief.
            what: is called, by the script, in which they do.
            is_certain: whether all are known to call it. Before they have joined, those that do not are found out then.

        Raises:
            CheckpointError, ClusterError: they do not; where it comes out as they join, on all workers.
        """
        if self.messages is None:
            self._peers.check()
            if self._index == 0:
                self._peers.say(what, said)
                return said
            heard = self._peers.hear(what)
            if heard is not None:
                return heard
            with self._missed_step.noted():
                self._join()  # which raises, on all workers
        with self._missed_step.noted(but=CheckpointError):
            if not is_certain and self._calls is not None:
                if not self._peers.guard(self._calls.are_made_together, Call(what), True):
                    raise _not_alike(f"{_who(self._index)} calls {what}, and others do not", what)
            self.passes()
            return self.exchange(said.encode()).decode()

    def all_make(self, describe: Callable[[], tuple[str, str]], is_certain: bool) -> bool:
        """Whether all workers make a call that each can also make for itself; the first may wait for them to join.

        Before they have joined nobody can be asked. Then it is all workers' if the script cannot know which it is on,
        and else nobody else's: one that runs on the chief alone would wait for others, which have no part in it.

        Args:
            describe: says what is called, and with which data.
            is_certain: whether all workers are known to come to it.
        """
        if self._workers == 1:
            return True
        if self._missed_step:  # by Ctrl-C, say: the others wait in it, and come to nothing that follows
            return False
        if self.messages is None:
            self._peers.check()
            if self.are_workers_distinguished:
                self._tell_of_evaluation_alone()
                return False
            is_certain = True
            self._join()
        assert self._calls is not None, "there are several workers"
        with self._missed_step.noted(is_step=False):  # it may turn out to be this worker's alone
            return bool(self._peers.guard(self._calls.are_made_together, Call(*describe()), is_certain))

    def _tell_of_evaluation_alone(self) -> None:
        if not self._has_told_of_evaluation:
            self._has_told_of_evaluation = True
            log.info(
                "before the first training step, evaluations run on this worker alone, since the script has asked "
                "which worker it is; all workers share those that come before ad.is_chief and ad.worker_index."
            )

    # -- what has failed -------------------------------------------------------------------------------------------

    def is_refused_by_all(self, error: BaseException, is_before: bool = False) -> bool:
        """Returns True if all workers refuse the same step before any part of it has run; waits for their answers.

        A worker that has refused a step has not come to its `passes`, by which the others answer.

        Args:
            error: raised in the step on this worker.
            is_before: whether it was raised before the step, which any exception refuses.
        """
        if self._calls is None or isinstance(error, CaptureMismatchError):
            return False
        if not isinstance(error, Exception if is_before else _REFUSALS):
            return False
        if isinstance(error, UnevenBatchError) and error.has_run:
            return False
        call = Call("a refusal", type(error).__name__)
        try:
            return bool(self._peers.guard(self._calls.are_made_together, call, True))
        except ClusterError:  # another worker has ended meanwhile; what comes next says so
            return False

    def give_up(self, told: str) -> None:
        """On another worker, ends the run by what this worker has failed by; nobody waits for it."""
        if self._give_up is None:
            return
        try:
            self._peers.guard(self._give_up, [0], json.dumps([self._index, told]).encode())
        except (ClusterError, tf.errors.OpError, RuntimeError) as error:
            log.debug("the run had ended when this worker gave up: %s", words_of(error))

    # -- last words ------------------------------------------------------------------------------------------------

    def leave_final_message(self, words: bytes) -> None:
        """At the end of another worker's script, leaves the chief something to hear at the end of its own."""
        self._peers.guard(self._begun.leave, words)

    def final_messages(self) -> list[bytes]:
        """On the chief, at the end of its script, what all others have left; nothing where one does something else."""
        if self._calls is None or not self._peers.guard(self._calls.have_all_left):
            return []
        heard: list[bytes] = self._peers.guard(self._begun.left)
        return heard


def _who(worker: int) -> str:
    return f"worker {worker}" if worker > 0 else "the chief"


def _not_alike(told: str, what: str) -> CheckpointError | ClusterError:
    """What to raise where workers call different things."""
    mend = f"Call {what} on every worker at the same place, and not under `if ad.is_chief:`."
    if what == RESTORE:
        return CheckpointError(f"{told}. All workers restore what the chief has found, or none. {mend}")
    return ClusterError(f"{told}. {mend}")
