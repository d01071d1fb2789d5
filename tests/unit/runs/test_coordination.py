"""Coordination: decisions depend on the control messages of all workers, and each call's first message arrives."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from autodist.errors import CheckpointError, ClusterError
from autodist.runs.coordination import FIT, RESTORE, Coordination
from autodist.runs.failed_step import FailedStepGuard


class Mailbox:
    """A worker's mailbox to which no worker writes."""

    def open_box(self, receive: Callable[[int, bytes], None]) -> Callable[..., None]:
        return lambda workers, content: None

    def start(self) -> None:
        """Nothing comes."""


class Peers:
    """Other workers that have sent messages, and the calls that waited for them."""

    def __init__(self, said: str | None = None, apart: tuple[str, str] | None = None) -> None:
        self.said, self.call_mismatch, self.heard = said, apart, []
        self.guarded: list[str] = []

    def check(self) -> None:
        """All are well."""

    def send_text(self, what: str, text: str) -> None:
        self.heard.append((what, text))

    def receive_text(self, what: str) -> str | None:
        return self.said

    def guard(self, call: Callable[..., Any], *args: Any) -> Any:
        self.guarded.append(call.__name__)
        return call(*args)

    def fail(self, error: BaseException) -> None:
        raise error


def talk_of(index: int, peers: Peers, *parts: Any) -> Coordination:
    """Returns the coordination of one of two workers, whose chief gathers `parts` with its own when they join."""

    def exchange(said: bytes) -> bytes:
        return said

    def gather(said: bytes) -> list[bytes]:
        return [said, *(json.dumps(part).encode() for part in parts)]

    def pending() -> None:
        if coordination.messages is None:
            coordination.begin(SimpleNamespace(broadcast=exchange, gather=gather), Mailbox())  # type: ignore[arg-type]

    coordination = Coordination(index, 2, peers, FailedStepGuard(lambda: True), pending, lambda: None)  # type: ignore[arg-type]
    return coordination


def test_the_chief_says_something_before_the_others_have_joined_and_waits_for_nobody() -> None:
    peers = Peers()
    coordination = talk_of(0, peers)
    assert coordination.share_text("7", FIT) == "7"
    assert (peers.heard, coordination.messages) == ([(FIT, "7")], None)


def test_another_worker_hears_it_in_the_same_call() -> None:
    coordination = talk_of(1, Peers(said="7"))
    assert (coordination.share_text("1", FIT), coordination.messages) == ("7", None)


@pytest.mark.parametrize("what, error", [(FIT, ClusterError), (RESTORE, CheckpointError)])
def test_workers_that_have_come_to_different_calls_are_told_so_as_they_join(what: str, error: type[Exception]) -> None:
    coordination = talk_of(0, Peers(), [what, ""])
    with pytest.raises(error, match="worker 1 has reached .*, and the chief a step. .*Call .* on every worker"):
        coordination.decide_by_chief("", "".join)


def test_a_worker_in_another_part_of_fit_than_the_chief_is_told_so() -> None:
    """It took the chief's next fit for logs of its epoch if the script had caught the error of a callback."""
    chiefs = iter([b"null", json.dumps(["fit", "[1]"]).encode()])
    coordination = Coordination(1, 2, Peers(), FailedStepGuard(lambda: True), lambda: None, lambda: None)  # type: ignore[arg-type]
    transport = SimpleNamespace(broadcast=lambda said: next(chiefs), gather=lambda said: [])
    coordination.begin(transport, Mailbox())  # type: ignore[arg-type]
    told = "worker 1 has reached the end of an epoch, and the chief fit. Call fit .*callback that the chief alone calls"
    with pytest.raises(ClusterError, match=told):
        coordination.share_text("{}", "the end of an epoch")


def test_all_that_is_said_waits_under_guard() -> None:
    """So that the error names the worker that has gone away."""
    peers = Peers()
    coordination = talk_of(0, peers, None)
    assert coordination.decide_by_chief("mine", ",".join) == "mine,null"
    assert peers.guarded == ["gather", "exchange"] * 2
    assert coordination.has_agreed
    assert coordination.has_work


def test_evaluations_are_each_workers_own_where_the_script_knew_which_it_is(caplog: pytest.LogCaptureFixture) -> None:
    coordination = talk_of(1, Peers())
    coordination.are_workers_distinguished = True
    with caplog.at_level(logging.INFO, "autodist"):
        assert not coordination.is_made_by_all(lambda: ("evaluate", ""), is_certain=False)
        assert not coordination.is_made_by_all(lambda: ("evaluate", ""), is_certain=False)
    assert caplog.text.count("evaluations run on this worker alone") == 1
    assert coordination.messages is None


def test_a_reduction_of_one_worker_needs_no_others() -> None:
    coordination = Coordination(0, 1, Peers(), FailedStepGuard(lambda: False), pytest.fail, lambda: None)  # type: ignore[arg-type]
    assert coordination.reduce(3.0, "mean") == 3.0
    assert coordination.gather_values({"a": 1}, "gather") == [{"a": 1}]
    assert not coordination.has_work


@pytest.mark.parametrize("call", [lambda c: c.reduce(1.0, "sum"), lambda c: c.gather_values(None, "barrier")])
def test_a_worker_that_missed_a_step_exchanges_no_values(call: Callable[[Coordination], Any]) -> None:
    """The others wait in that step, and would take the message of `ad.barrier` for a part of it."""
    guard = FailedStepGuard(lambda: True, end_limit=0.0)
    coordination = Coordination(1, 2, Peers(), guard, pytest.fail, lambda: None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="in a step"), guard.guarding():
        raise ValueError("in a step")
    with pytest.raises(ClusterError, match="this worker failed in an earlier step .*in a step"):
        call(coordination)


@pytest.mark.parametrize(
    ("call", "messages"),
    [(Coordination.flush_for_chief, ["gather"]), (Coordination.flush_together, ["gather", "broadcast"])],
)
def test_a_flush_for_the_chief_waits_for_no_answer_of_the_chief(
    call: Callable[[Coordination], None], messages: list[str]
) -> None:
    made: list[str] = []
    guard = FailedStepGuard(lambda: True)
    coordination = Coordination(1, 2, Peers(), guard, lambda: None, lambda: made.append("flush"))  # type: ignore[arg-type]
    coordination.messages = SimpleNamespace(  # type: ignore[assignment]
        broadcast=lambda message: made.append("broadcast"), gather=lambda message: made.append("gather")
    )
    call(coordination)
    assert made == ["flush", *messages]
