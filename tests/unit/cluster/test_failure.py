from __future__ import annotations

import pytest

from autodist.cluster.failure import Ending, choose_cause, exit_reason, why_agent_ended, would_repeat
from autodist.errors import WorkerFailedError

KILLED = Ending("a", "was ended by SIGKILL")
FAILED = Ending("b", "ended with exit status 1", ("ValueError: no such word",))
ECHO = Ending("c", "ended with exit status 1", ("x", "tensorflow...errors_impl.UnavailableError: Socket closed", "y"))
LOST = Ending("d", "was lost: …", ("UnavailableError",), is_lost=True)


@pytest.mark.parametrize(
    ("endings", "cause"),
    [
        ([FAILED], FAILED),
        ([ECHO], ECHO),
        ([KILLED, FAILED], KILLED),
        ([FAILED, KILLED], FAILED),
        ([ECHO, KILLED], KILLED),
        ([ECHO, LOST, FAILED], LOST),
        ([ECHO, ECHO], ECHO),
    ],
)
def test_first_that_is_no_echo_is_the_cause(endings: list[Ending], cause: Ending) -> None:
    assert choose_cause(endings) is cause


def test_an_end_by_sigkill_or_a_lost_machine_is_no_consequence_of_another_end() -> None:
    assert [one.is_first_cause for one in (KILLED, LOST, FAILED, ECHO)] == [True, True, False, False]
    assert not Ending("a", KILLED.reason, ECHO.last_lines).is_echo


@pytest.mark.parametrize("line", ["CancelledError: step", "AbortedError", "UNAVAILABLE: x", "Connection reset by peer"])
def test_tensorflows_words_for_a_lost_peer_make_an_echo(line: str) -> None:
    assert Ending("a", "ended", (line,)).is_echo


def test_own_errors_make_no_echo() -> None:
    assert not Ending("a", "ended", ("InvalidArgumentError: shapes", "OSError: unavailable")).is_echo


def test_error_carries_worker_reason_and_last_lines() -> None:
    error = FAILED.error()
    assert (error.worker, error.reason, error.last_lines) == ("b", FAILED.reason, FAILED.last_lines)
    assert "no such word" in str(error)


@pytest.mark.parametrize(
    ("reason", "repeats"),
    [
        ("failed in a step (autodist.errors.CaptureError: refused), and its script went on", True),
        ("failed in a step (autodist.errors.CheckpointError: no space), and its script went on", False),
        ("failed in a step (OSError: no space), and its script went on", False),
    ],
)
def test_a_refusal_that_a_script_survived_would_come_again(reason: str, repeats: bool) -> None:
    assert would_repeat(WorkerFailedError("a", reason)) is repeats


@pytest.mark.parametrize(
    ("status", "joined", "done", "words"),
    [
        (-9, True, True, "was ended by SIGKILL"),
        (-64, True, False, "was ended by SIGRTMAX"),
        (-99, True, False, "was ended by signal 99"),
        (3, False, False, "ended with exit status 3"),
        (0, False, False, "without creating an AutoDist"),
        (0, True, False, "in the middle of the run"),
        (0, True, True, "did not wait for the other workers"),
    ],
)
def test_exit_reason(status: int, joined: bool, done: bool, words: str) -> None:
    assert words in exit_reason(status, joined, done)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("/usr/bin/python3: No module named autodist", "autodist is not installed"),
        ("ModuleNotFoundError: No module named 'autodist.cluster'", "the AutoDist there is another version"),
        ("Error while finding module specification (No module named 'autodist')", "autodist is not installed"),
        ("Unknown option: -P\nusage: python", "older than 3.11"),
        ("unknown option -P\nusage: python", "older than 3.11"),
        ("env: '/venv/bin/python': No such file or directory", "there is no Python"),
        ("Killed", "its agent ended with the output:\nKilled"),
        ("This service allows sftp connections only.", "let the login there run the requested command"),
        ("", "without any output: it was killed"),
        ("This account is currently not available.", "may not log in there; give its SSH group a `username`"),
    ],
)
def test_why_an_agent_ended(said: str, words: str) -> None:
    assert words in why_agent_ended(said)


def test_what_stopped_the_rest_is_reported_in_sentences() -> None:
    assert "a ended; the other workers were stopped." in str(WorkerFailedError("a", "ended"))
    assert "see to it. The other workers were stopped." in str(WorkerFailedError("a", "waits: see to it."))
