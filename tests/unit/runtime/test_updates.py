"""Updates run concurrently with the steps, in their order; their failures reach the training thread."""

from __future__ import annotations

import threading

import pytest

from autodist.runtime.updates import STANDING, Updates

LIMIT = 10.0


def keep(error: BaseException) -> BaseException:
    return error


def test_without_updates_there_is_nothing_to_wait_for():
    updates = Updates(keep)
    updates.wait()
    assert updates.is_idle


def test_updates_run_in_their_order_and_nobody_waits_for_them_before_the_end():
    updates, done, may_run = Updates(keep), [], threading.Event()

    def update(number: int) -> None:
        assert may_run.wait(LIMIT)
        done.append(number)

    for number in range(5):
        updates.release(lambda n=number: update(n))
    assert not done
    assert not updates.is_idle
    may_run.set()
    updates.wait()
    assert done == [0, 1, 2, 3, 4]
    assert updates.is_idle


def test_a_failure_is_told_and_raised_from_then_on_and_no_later_update_runs():
    told, done = [], []

    def tell(error: BaseException) -> BaseException:
        told.append(error)
        return RuntimeError("the cause")

    updates, may_fail = Updates(tell), threading.Event()

    def fail() -> None:
        assert may_fail.wait(LIMIT)
        raise ValueError("what followed")

    updates.release(fail)
    updates.release(lambda: done.append(1))
    may_fail.set()
    with pytest.raises(RuntimeError, match="the cause"):
        updates.wait()
    with pytest.raises(RuntimeError, match="the cause"):
        updates.release(lambda: done.append(2))
    assert [str(error) for error in told] == ["what followed"]
    assert not done
    assert updates.is_idle


def test_two_runs_of_a_standing_update_wait_until_they_are_ended():
    updates, steps, done, ended = Updates(keep), threading.Semaphore(0), threading.Semaphore(0), threading.Event()
    waiting = []

    def run() -> None:
        waiting.append(threading.get_ident())
        steps.acquire()
        if ended.is_set():
            raise ValueError("its session is closed")
        done.release()

    updates.repeat(run)
    for _ in range(5):
        steps.release()
        assert done.acquire(timeout=LIMIT)
    assert len(set(waiting)) == STANDING
    assert updates.are_standing
    assert updates.is_idle
    updates.end_standing()
    ended.set()
    steps.release(STANDING)
    updates.wait_until_ended(LIMIT)
    assert not updates.are_standing
    updates.wait()


def test_the_failure_of_a_standing_update_is_told_and_raised():
    told = []

    def tell(error: BaseException) -> BaseException:
        told.append(error)
        return RuntimeError("the cause")

    def fail() -> None:
        raise ValueError("what followed")

    updates = Updates(keep, tell)
    updates.repeat(fail)
    updates.wait_until_ended(LIMIT)
    assert all(str(error) == "what followed" for error in told)
    assert told
    with pytest.raises(RuntimeError, match="the cause"):
        updates.wait()
