"""A signal that comes just before a wait ends it, where Python's own waits would notice it only afterwards."""

import _thread
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from autodist import waits
from autodist.runtime.interruptible import InterruptibleExecutor
from autodist.waits import Condition, Event, join, result_of, take


def a_condition() -> None:
    with (changed := Condition()):
        changed.wait_for(lambda: False)


def a_condition_with_a_limit() -> None:
    with (changed := Condition()):
        changed.wait_for(lambda: False, 600)


def an_event() -> None:
    Event().wait()


def an_event_with_a_limit() -> None:
    Event().wait(600)


def a_thread() -> None:
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    join(thread)


def a_queue() -> None:
    take(queue.SimpleQueue())


def a_future() -> None:
    result_of(Future())


def a_step() -> None:
    InterruptibleExecutor().call(threading.Event().wait)


@pytest.mark.parametrize(
    "wait",
    [a_condition, a_condition_with_a_limit, an_event, an_event_with_a_limit, a_thread, a_queue, a_future, a_step],
)
def test_an_interrupt_without_a_system_call_to_end_is_noticed(
    monkeypatch: pytest.MonkeyPatch, wait: Callable[[], None]
) -> None:
    monkeypatch.setattr(waits, "_LONGEST", 0.2)
    # `interrupt_main` does what a signal does to a thread that is not in a system call: it sets a flag.
    threading.Timer(0.1, _thread.interrupt_main).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        wait()
    assert time.monotonic() - began < 30


def test_what_is_waited_for_ends_the_wait() -> None:
    happened, changed, items, future = Event(), Condition(), queue.SimpleQueue[int](), Future[int]()
    values: list[int] = []

    def act() -> None:
        happened.set()
        items.put(3)
        future.set_result(4)
        with changed:
            values.append(5)
            changed.notify_all()

    thread = threading.Timer(0.1, act)
    thread.start()
    with changed:
        assert changed.wait_for(lambda: values)
    assert happened.wait() and (take(items), result_of(future)) == (3, 4)
    join(thread)
    assert not thread.is_alive()


def test_a_limit_holds() -> None:
    assert not Event().wait(0.01)
    with (changed := Condition()):
        assert not changed.wait_for(lambda: False, 0.01)


def test_the_error_of_a_future_is_raised_even_if_it_is_that_of_a_timeout() -> None:
    future = Future[int]()
    future.set_exception(TimeoutError("of the call"))
    with pytest.raises(TimeoutError, match="of the call"):
        result_of(future)
