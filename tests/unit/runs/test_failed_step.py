"""A worker that failed in a step takes part in no later one."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from autodist.errors import ClusterError, WorkerFailedError
from autodist.runs.failed_step import FailedStepGuard


def test_a_step_that_others_wait_for_is_the_last():
    missed = FailedStepGuard(lambda: True)
    with missed.guarding():
        pass
    assert not missed
    with pytest.raises(ValueError, match="too long"), missed.guarding():
        raise ValueError("too long")
    assert missed
    reached = []
    with pytest.raises(ClusterError, match=r"earlier step \(ValueError: too long\)"), missed.guarding():
        reached.append(True)
    assert not reached


def test_a_step_is_missed_too_if_its_error_has_no_text():
    class Textless(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    missed = FailedStepGuard(lambda: True)
    with pytest.raises(Textless), missed.guarding():
        raise Textless
    with pytest.raises(ClusterError, match=r"earlier step \(Textless: <exception str\(\) failed>\)"), missed.guarding():
        pass


def test_a_worker_that_is_alone_may_try_again():
    missed = FailedStepGuard(lambda: False)
    with pytest.raises(ValueError, match="too long"), missed.guarding():
        raise ValueError("too long")
    with missed.guarding():
        pass
    assert not missed


def test_the_error_before_the_first_step_is_kept_for_the_end_of_a_script_that_catches_it():
    guard = FailedStepGuard(lambda: False)
    with pytest.raises(ValueError, match="too long"), guard.guarding(is_step=False, is_before=True):
        raise ValueError("too long")
    assert guard.refused == "ValueError: too long" and not guard.has_stepped
    with pytest.raises(TypeError), guard.guarding_until_step():  # by `fit`, before a step of its own
        raise TypeError("no data")
    assert guard.refused == "TypeError: no data"
    with guard.guarding():
        pass
    assert guard.has_stepped


def test_an_interrupted_step_is_missed_too():
    missed = FailedStepGuard(lambda: True)
    with pytest.raises(KeyboardInterrupt), missed.guarding():
        raise KeyboardInterrupt
    assert missed


def test_it_is_known_whether_a_step_was_made_since():
    missed, began = FailedStepGuard(lambda: True), time.monotonic()
    with missed.guarding(is_step=False):
        pass
    assert not missed.has_stepped_since(began)
    with missed.guarding():
        pass
    assert missed.has_stepped_since(began) and not missed.has_stepped_since(time.monotonic())


def test_every_thread_is_told_that_another_worker_failed():
    missed = FailedStepGuard(lambda: True)
    failure = WorkerFailedError("b", "was ended by SIGKILL", ())
    with pytest.raises(WorkerFailedError), missed.guarding():
        raise failure
    with pytest.raises(WorkerFailedError) as caught, missed.guarding():
        pass
    assert caught.value is failure and missed.error is failure


def test_threads_take_turns_where_they_have_to():
    turn = threading.Lock()
    missed = FailedStepGuard(lambda: True, turn)
    with missed.guarding():
        assert turn.locked()
    assert not turn.locked()


def test_after_a_refusal_that_all_workers_meet_the_run_goes_on():
    missed = FailedStepGuard(lambda: True, is_met_by_all=lambda error, is_before: isinstance(error, ValueError))
    with pytest.raises(ValueError, match="too long"), missed.guarding():
        raise ValueError("too long")
    with missed.guarding():
        pass
    assert not missed


def test_the_others_are_ended_once_where_a_script_goes_on_after_a_step_that_it_alone_missed():
    ended: list[BaseException] = []
    missed = FailedStepGuard(lambda: True, on_survived=ended.append)
    error = ValueError("too long")
    with pytest.raises(ValueError, match="too long"), missed.guarding():
        raise error
    assert not ended  # the script may end by it
    for _ in range(2):
        with pytest.raises(ClusterError, match="too long"), missed.guarding():
            pass
    assert ended == [error]


def test_the_others_are_ended_where_a_script_makes_no_step_after_the_one_that_it_alone_missed():
    ended: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    missed = FailedStepGuard(lambda: True, on_survived=ended.put, end_limit=0.01)
    error = ValueError("too long")
    with pytest.raises(ValueError, match="too long"), missed.guarding():
        raise error
    assert ended.get(timeout=20) is error
    with pytest.raises(ClusterError, match="too long"), missed.guarding():
        pass
    assert ended.empty()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), WorkerFailedError("b", "was ended by SIGKILL", ())])
def test_the_others_are_not_ended_by_what_ends_the_run_itself(error: BaseException):
    ended: list[BaseException] = []
    missed, before = (
        FailedStepGuard(lambda: True, on_survived=ended.append, end_limit=60.0),
        set(threading.enumerate()),
    )
    with pytest.raises(type(error)), missed.guarding():
        raise error
    assert set(threading.enumerate()) <= before and not ended


def test_nobody_is_ended_where_the_script_ends_by_the_step_that_it_missed():
    ended: list[BaseException] = []
    missed, before = (
        FailedStepGuard(lambda: True, on_survived=ended.append, end_limit=60.0),
        set(threading.enumerate()),
    )
    with pytest.raises(ValueError, match="too long"), missed.guarding():
        raise ValueError("too long")
    (timer,) = set(threading.enumerate()) - before
    missed.close()
    timer.join(20)
    assert not timer.is_alive() and not ended


def test_the_others_are_ended_at_the_end_of_a_script_that_ends_well_in_spite_of_a_missed_step():
    ended: list[BaseException] = []
    missed = FailedStepGuard(lambda: True, on_survived=ended.append, end_limit=60.0)
    missed.close(is_survived=True)
    error = ValueError("too long")
    with pytest.raises(ValueError, match="too long"), missed.guarding():
        raise error
    missed.close(is_survived=True)
    assert ended == [error]


@pytest.mark.parametrize("is_alike", [True, False])
def test_an_error_that_leaves_several_contexts_is_settled_once(is_alike: bool):
    asked: list[bool] = []

    def is_met_by_all(error: BaseException, is_before: bool) -> bool:
        asked.append(is_before)
        return is_alike

    missed = FailedStepGuard(lambda: True, is_met_by_all=is_met_by_all)
    with pytest.raises(TypeError), missed.guarding(), missed.guarding(is_step=False, is_before=True):
        raise TypeError
    assert asked == [True] and bool(missed) is not is_alike
    missed.close()


def fails_after_a_step(missed: FailedStepGuard) -> None:
    with missed.guarding_until_step():
        with missed.guarding():
            pass
        raise TypeError


def test_an_error_before_a_step_refuses_it_and_one_after_it_does_not():
    asked: list[bool] = []

    def is_met_by_all(error: BaseException, is_before: bool) -> bool:
        asked.append(is_before)
        return is_before

    missed = FailedStepGuard(lambda: True, is_met_by_all=is_met_by_all)
    with pytest.raises(TypeError), missed.guarding(is_step=False, is_before=True):
        raise TypeError
    with pytest.raises(TypeError), missed.guarding_until_step():
        raise TypeError
    assert asked == [True, True] and not missed
    with pytest.raises(TypeError):
        fails_after_a_step(missed)
    assert asked == [True, True] and not missed
    with pytest.raises(TypeError), missed.guarding():
        raise TypeError
    assert asked == [True, True, False] and missed
    missed.close()
