from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from autodist.errors import ClusterError
from autodist.runtime.interruptible import InterruptibleExecutor


def in_threads(*works: Callable[[], object]) -> tuple[list[threading.Thread], list[BaseException]]:
    """Starts each function in a thread; returns the threads, and a list that collects their exceptions."""
    raised: list[BaseException] = []

    def work_and_note(work: Callable[[], object]) -> None:
        try:
            work()
        except ValueError as error:
            raised.append(error)

    threads = [threading.Thread(target=work_and_note, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    return threads, raised


def test_results_and_errors_of_a_function_reach_the_caller() -> None:
    caller = InterruptibleExecutor()
    assert caller.call(lambda x: x + 1, 2) == 3
    with pytest.raises(ZeroDivisionError):
        caller.call(lambda: 1 / 0)
    assert caller.is_idle


def test_all_threads_that_wait_are_told_of_a_failure_and_nothing_is_called_after_it() -> None:
    caller, entered, leave, called = InterruptibleExecutor(), threading.Event(), threading.Event(), []

    def stuck() -> None:
        entered.set()
        leave.wait()

    first, raised = in_threads(lambda: caller.call(stuck))
    assert entered.wait(10)
    others, raised_later = in_threads(*[lambda: caller.call(called.append, 1)] * 3)
    while len(caller._waiting) < 4:
        pass
    assert caller.state[0] and not caller.is_idle
    failure = ValueError("gone")
    caller.fail(failure)
    for thread in (*first, *others):
        thread.join(10)
    assert raised == [failure] and raised_later == [failure] * 3
    with pytest.raises(ValueError, match="gone"):
        caller.call(called.append, 2)
    assert not caller.state[0] and not caller.is_idle  # the first function still runs
    leave.set()
    while not caller.is_idle:
        pass
    assert not called


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_is_told_that_it_takes_no_part() -> None:
    """It would wait for ever for a thread that it does not have."""
    caller, heard, said = InterruptibleExecutor(), *os.pipe()
    caller._lock.acquire()  # as some other thread may have it at the moment
    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        try:
            caller.call(int)
        except ClusterError as error:
            os.write(said, str(error).encode())
        finally:
            os._exit(0)
    caller._lock.release()
    os.close(said)
    with open(heard) as told:
        assert told.read().startswith(f"Process {child} was forked from a worker's, as those of `multiprocessing` are")
    os.waitpid(child, 0)
    assert caller.call(int) == 0


def test_running_calls_are_awaited_up_to_a_limit() -> None:
    caller, go = InterruptibleExecutor(), threading.Event()
    waits = threading.Thread(target=lambda: caller.call(go.wait))
    waits.start()
    while caller.is_idle:
        waits.join(0.001)
    caller.wait_until_idle(0.01)
    assert not caller.is_idle
    go.set()
    caller.wait_until_idle(20)
    waits.join(20)
    assert caller.call(lambda: 1) == 1
