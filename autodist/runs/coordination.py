"""Coordination: the control plane between the workers of a run, used between two steps."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from autodist.batch.gathered import GatheredFeeds, GatheredInput, gather_feeds
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
from autodist.runtime.arrays import combine_parts, pack_part, pack_value, require_reduction, unpack, unpack_values
from autodist.runtime.call_matching import Call, CallMatching, CallMessage
from autodist.runtime.mailbox import Mailbox, Send
from autodist.runtime.messages import Messages
from autodist.waits import Event

log = logging.getLogger("autodist")

_REFUSALS = (CaptureError, ReductionError, RewriteError, StrategyError, UnevenBatchError)
"""Errors that can refuse a step before it has begun."""

_GIVING_UP_LIMIT = 5.0
"""Seconds to wait for the chief to end the run, which it does at once unless it has ended."""

FIT = "fit"
RESTORE = "ad.checkpoint(…).restore"


class Coordination:
    """One worker's end of the control plane. All workers make the same calls in the same order.

    Args:
        index: index of this worker; 0 for the chief.
        workers: number of workers.
        peers: the other workers.
        failed_step: failed-step guard of this worker's script.
        join: connects this worker to the others, unless it is connected; calls `begin`.
        flush: waits until all writes requested by this worker's steps have been applied.

    Attributes:
        messages: transport of most control messages; None before the workers have joined.
        are_workers_distinguished: True if the script has read its worker's index, so that workers may diverge.
        has_agreed: True if the workers have exchanged what they read of sharded files.
        has_work: True if the workers have agreed on something or reduced a value.
        waiting: returns the context of each wait for the chief.
    """

    def __init__(
        self,
        index: int,
        workers: int,
        peers: Peers,
        failed_step: FailedStepGuard,
        join: Callable[[], None],
        flush: Callable[[], None],
    ) -> None:
        self._index, self._workers, self._peers, self._failed_step = index, workers, peers, failed_step
        self._join, self._flush = join, flush
        self.messages: Messages | None = None
        self._calls: CallMatching | None = None
        self._mailbox: Mailbox | None = None
        self._give_up: Send | None = None
        self.are_workers_distinguished = self.has_agreed = self.has_work = False
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self._has_given_up = Event()
        self._has_logged_evaluation = False

    # -- begin and end ---------------------------------------------------------------------------------------------

    def begin(self, messages: Messages, mailbox: Mailbox | None) -> None:
        """Starts coordination once all workers have joined.

        Args:
            messages: transport of the run.
            mailbox: starts to be read here; None with one worker.

        Raises:
            CheckpointError, ClusterError: the workers have reached different calls; raised on all workers.
        """
        self.messages = messages
        if mailbox is not None:
            send = mailbox.open_box(lambda _, message: calls.receive(CallMessage.decode(message)))
            self._calls = calls = CallMatching(self._index, self._workers, lambda to, note: send(to, note.encode()))
            self._give_up = mailbox.open_box(self._receive_giving_up)
            self._mailbox = mailbox
            mailbox.on_loss = self._peers.fail  # calls that wait for a message raise it
            mailbox.start()
            self._check_calls_match()

    def _check_calls_match(self) -> None:
        """Checks that all workers have made the calls in which the chief has sent a message before they joined."""
        parts = self.gather(json.dumps(self._peers.call_mismatch).encode())
        apart = {w: calls for w, part in enumerate(parts) if (calls := json.loads(part)) is not None}
        mismatch = json.dumps(next(iter(apart.items()), None)).encode()
        first = json.loads(self.broadcast(mismatch))
        if first is not None:
            worker, (call, chief_call) = first
            raise _different_calls(worker, call, chief_call)

    def close(self) -> None:
        """Announces that this worker's script makes no more calls, and stops reading the mailbox."""
        if self._calls is not None and self._mailbox is not None:
            self._peers.guard(self._calls.leave)
        self.end_reading()

    def end_reading(self) -> None:
        """Stops reading messages that other workers send at any time."""
        if self._mailbox is not None and self.messages is not None:
            self._mailbox.close()
            self.messages.close()

    # -- collective calls ------------------------------------------------------------------------------------------

    def reach_collective(self) -> None:
        """Records that this worker has reached a collective call: a step, or an exchange of messages between steps."""
        if self._calls is not None and self._calls.reach_collective():
            self._peers.guard(self._calls.answer)

    @property
    def calls_reached(self) -> int | None:
        """The number of collective calls that this worker has reached; None before the workers have joined."""
        return None if self._calls is None else self._calls.reached

    def broadcast(self, message: bytes = b"") -> bytes:
        """Returns the chief's message, on every worker, once all have made this collective call."""
        with self.waiting():
            return self._peers.guard(self._transport.broadcast, message)

    def gather(self, message: bytes) -> list[bytes]:
        """Returns on the chief the message of each worker, on the others an empty list; a collective call."""
        return self._peers.guard(self._transport.gather, message)

    def flush_for_chief(self) -> None:
        """Waits for the writes of this worker's steps; the chief also waits for those of all other workers.

        The other workers do not wait for each other; see `flush_together`.
        """
        self._flush()
        self.reach_collective()
        self.gather(b"")

    def wait_for_chief(self) -> None:
        """On another worker, returns once the chief has made the matching call."""
        self.broadcast(b"set")

    @property
    def _transport(self) -> Messages:
        assert self.messages is not None, "the workers have joined"
        return self.messages

    # -- calls that may come before the workers have joined --------------------------------------------------------

    def reduce(self, value: Any, how: str) -> np.ndarray:
        """Returns the mean, sum, maximum or minimum of a value over all workers; a collective call.

        Raises:
            ReductionError: the value cannot be reduced this way; raised on all workers.
        """
        with self._failed_step.guarding(is_step=False, is_before=True):
            require_reduction(how)
            part = pack_part(value, how)
        return unpack(self._combine(part))

    def gather_values(self, value: Any, how: str) -> list[Any]:
        """Returns the Python values of all workers, in their order; a collective call.

        Args:
            value: this worker's value.
            how: name of the script's call: "gather", "broadcast" or "barrier".

        Raises:
            ReductionError: a value cannot be pickled, or a worker makes another call; raised on all workers. Or a value
                cannot be unpickled on this worker; raised on this worker.
        """
        with self._failed_step.guarding(is_step=False, is_before=True):
            part = pack_value(value, how)
        return unpack_values(self._combine(part))

    def _combine(self, part: bytes) -> bytes:
        if self._workers == 1:
            return combine_parts([part])
        self.has_work = True
        with self._failed_step.step_lock:
            self._join()
            self._flush()  # the script reads next, and must see all writes requested by the steps of all workers
            self.reach_collective()
            parts = self.gather(part)
            return self.broadcast(combine_parts(parts) if parts else b"")

    def flush_together(self) -> None:
        """Returns once all writes requested by the steps of all workers have been applied; a collective call."""
        with self._failed_step.guarding():
            self._flush()
            self.reach_collective()
            self.gather(b"")
            self.broadcast()

    def gather_feeds(self, fed: Sequence[GatheredInput]) -> GatheredFeeds:
        """Gathers on the chief the values that all workers feed to a step; a collective call before the step.

        Raises:
            CaptureError: the parts cannot be concatenated; raised on all workers.
            EmptyBatchError: no worker has examples; raised on all workers.
        """
        self.reach_collective()
        return gather_feeds(fed, self._index, self.gather, self.broadcast)

    def decide_by_chief(self, message: str, decide: Callable[[list[str]], str]) -> str:
        """Returns on every worker the chief's decision about the workers' messages; a collective call between steps.

        Args:
            message: this worker's message.
            decide: called on the chief with all messages, indexed by worker.
        """
        self.has_work = self.has_agreed = True
        return self._gather_and_decide(message, decide)

    def is_true_everywhere(self, condition: bool) -> bool:
        """Returns True if a condition holds on all workers; a collective call between steps."""
        decide = lambda messages: json.dumps("false" not in messages)  # noqa: E731
        return self._gather_and_decide(json.dumps(condition), decide) == "true"

    def _gather_and_decide(self, message: str, decide: Callable[[list[str]], str]) -> str:
        with self._failed_step.guarding():
            self._join()
            self.reach_collective()
            messages = [one.decode() for one in self.gather(message.encode())]
            return self.broadcast(decide(messages).encode() if messages else b"").decode()

    def share_text(self, text: str, name: str, is_certain: bool = True) -> str:
        """Returns the chief's text on every worker; a collective call, possible before the workers have joined.

        Args:
            text: the chief's text.
            name: name of the call that the script makes, or of its part: all workers have to make the same. No other
                call has this name, so that workers in different calls are detected.
            is_certain: True if all workers are known to make the call. Before they have joined, a worker that does not
                make it is detected when it joins.

        Raises:
            CheckpointError, ClusterError: some workers make another call; raised on all workers if it is detected as
                they join.
        """
        if self.messages is None:
            self._peers.check()
            if self._index == 0:
                self._peers.send_text(name, text)
                return text
            received = self._peers.receive_text(name)
            if received is not None:
                return received
            with self._failed_step.guarding():
                self._join()  # which raises, on all workers
        with self._failed_step.guarding(but=CheckpointError):
            if not is_certain and self._calls is not None:
                if not self._are_made_together(self._calls, Call(name, is_required=True), True):
                    raise _mismatch_error(f"{_worker_name(self._index)} calls {name}, and others do not", name)
            self.reach_collective()
            chief_name, chiefs_text = json.loads(self.broadcast(json.dumps([name, text]).encode()))
            if chief_name != name:
                raise _different_calls(self._index, name, chief_name)
            return str(chiefs_text)

    def is_made_by_all(self, describe: Callable[[], tuple[str, str]], is_certain: bool) -> bool:
        """Returns True if all workers make a call that each can also make alone; the first may wait until they join.

        Before they have joined, no worker can be queried. The call then counts as collective unless the script has read
        its worker's index: a call under `if ad.is_chief:` would wait forever for workers that do not make it.

        Args:
            describe: returns the name of the call and its data.
            is_certain: True if all workers are known to make it.
        """
        if self._workers == 1:
            return True
        if self._failed_step:  # after Ctrl-C, for example: the others wait in that step and make no later call
            return False
        if self.messages is None:
            self._peers.check()
            if self.are_workers_distinguished:
                self._log_local_evaluation()
                return False
            is_certain = True
            self._join()
        assert self._calls is not None, "there are several workers"
        with self._failed_step.guarding(is_step=False):  # this worker may be alone in it
            return self._are_made_together(self._calls, Call(*describe()), is_certain)

    def _are_made_together(self, calls: CallMatching, call: Call, is_certain: bool) -> bool:
        with self.waiting():
            return self._peers.guard(calls.are_made_together, call, is_certain)

    def _log_local_evaluation(self) -> None:
        if not self._has_logged_evaluation:
            self._has_logged_evaluation = True
            log.info(
                "before the first training step, evaluations run on this worker alone, since the script has read its "
                "worker's index; evaluations before the first ad.is_chief or ad.worker_index are shared by all workers."
            )

    # -- failures --------------------------------------------------------------------------------------------------

    def is_refused_by_all(self, error: BaseException, is_before: bool) -> bool:
        """Returns True if all workers refuse the same step before any part of it has run; waits for their answers.

        A worker that has refused a step has not reached its `reach_collective`, which answers the others.

        Args:
            error: raised in the step on this worker.
            is_before: True if it was raised before the step; any exception then refuses the step.
        """
        if self._calls is None or isinstance(error, CaptureMismatchError):
            return False
        if not isinstance(error, Exception if is_before else _REFUSALS):
            return False
        if isinstance(error, UnevenBatchError) and error.has_run:
            return False
        call = Call("a refusal", type(error).__name__, is_required=True)
        try:
            return self._are_made_together(self._calls, call, True)
        except ClusterError:  # another worker has ended meanwhile; the next call raises that, and not this error
            return True

    def give_up(self, reason: str) -> None:
        """On another worker, ends the run with this worker's failure as the reason; waits until the chief does so."""
        if self._give_up is None:
            return
        try:
            self._peers.guard(self._give_up, [0], reason.encode())
            self._has_given_up.wait(_GIVING_UP_LIMIT)
        except (ClusterError, tf.errors.OpError, RuntimeError) as error:
            log.debug("the run had ended when this worker gave up: %s", words_of(error))

    def _receive_giving_up(self, worker: int, reason: bytes) -> None:
        """Ends the run, on the chief, and answers; on another worker, which may end now, this is the answer."""
        if self._index == 0 and self._give_up is not None:
            self._peers.give_up(worker, reason.decode())
            self._give_up([worker], b"")
        self._has_given_up.set()

    # -- final messages --------------------------------------------------------------------------------------------

    def leave_final_message(self, words: bytes) -> None:
        """On another worker, leaves a message that the chief reads at the end of its script."""
        self._peers.guard(self._transport.leave, words)

    def final_messages(self) -> list[bytes]:
        """On the chief, returns the final message of every other worker; empty if any worker makes another call."""
        if self._calls is None or not self._peers.guard(self._calls.have_all_left):
            return []
        return self._peers.guard(self._transport.left)


def _worker_name(worker: int) -> str:
    return f"worker {worker}" if worker > 0 else "the chief"


def _different_calls(worker: int, call: str, chief_call: str) -> CheckpointError | ClusterError:
    calls = f"{_worker_name(worker)} has reached {call or 'a step'}, and the chief {chief_call or 'a step'}"
    return _mismatch_error(calls, RESTORE if RESTORE in (call, chief_call) else FIT)


def _mismatch_error(fault: str, name: str) -> CheckpointError | ClusterError:
    """Returns the error for workers that make different calls."""
    fix = f"Call {name} on every worker at the same place, and not under `if ad.is_chief:`."
    if name == RESTORE:
        return CheckpointError(f"{fault}. All workers restore the checkpoint that the chief finds, or none does. {fix}")
    return ClusterError(
        f"{fault}. {fix} If a script catches an error of {name} that only some workers raise, as of a callback that "
        "the chief alone calls, it has to end with that error."
    )
