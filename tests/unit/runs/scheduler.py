"""Scheduler: runs the threads of a simulation one at a time, in an order that the test draws.

A thread hands over only where it waits or sends. The scheduler then selects the next thread that can go on, or lets the
time limit of a wait expire. So a run depends on its schedule alone, and never on a clock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Generic, TypeVar, cast

import pytest

from autodist.runs import coordination, failed_step
from autodist.runtime import call_matching, messages, write_consensus

T = TypeVar("T")

LAST_RESORT = float("inf")
"""A time limit that expires only if no thread can go on."""

_END_LIMIT = 20.0
"""Seconds until a thread that does not hand over fails the test."""

_MOST_TURNS = 20_000
"""Turns after which a simulation counts as endless."""


class Killed(BaseException):
    """Ends a thread of a killed worker, or of a simulation that is over."""


class DeadlockError(AssertionError):
    """Error raised if no thread can go on and no wait has a time limit."""


class Task:
    """A thread of the simulation.

    Args:
        name: name for messages.
        call: content of the thread.
        owner: the worker that it belongs to.
        may_wait: False for a thread that takes messages, which may wait for the next message only.

    Attributes:
        interrupt: returns the error that a wait raises instead of going on; None if there is none.
        waits_for: description of the present wait.
    """

    def __init__(self, name: str, call: Callable[[], object], owner: object, may_wait: bool) -> None:
        self.name, self._call, self.owner, self.may_wait = name, call, owner, may_wait
        self.interrupt: Callable[[], BaseException | None] = lambda: None
        self.waits_for, self.limit = "its start", cast(float | None, None)
        self.is_done = self.is_killed = False
        self.error: BaseException | None = None
        self._is_ready: Callable[[], bool] = lambda: True
        self._has_expired = False
        self._turn, self._handed_over = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._handed_over.acquire()
        self._thread = threading.Thread(target=self._run, name=f"simulated-{name}", daemon=True)

    @property
    def can_run(self) -> bool:
        return not self.is_done and (self.is_killed or self._is_ready() or self.interrupt() is not None)

    @property
    def can_expire(self) -> bool:
        return not self.is_done and self.limit is not None

    def take_turn(self, expires: bool = False) -> None:
        """Lets the thread go on until its next wait."""
        self._has_expired = expires
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()
        assert self._handed_over.acquire(timeout=_END_LIMIT), f"{self.name} does not hand over"
        if self.is_done:
            self._thread.join(_END_LIMIT)

    def wait(self, is_ready: Callable[[], bool], limit: float | None, waits_for: str) -> bool:
        """Hands over until `is_ready` returns True; returns False if the time limit has expired before."""
        if self.is_killed:
            raise Killed
        self._is_ready, self.limit, self.waits_for = is_ready, limit, waits_for
        self._handed_over.release()
        self._turn.acquire()
        self.limit = None
        if self.is_killed:
            raise Killed
        error = self.interrupt()
        if error is not None:
            raise error
        return not self._has_expired

    def end(self) -> None:
        """Ends the thread at its present wait."""
        self.is_killed = True
        if self._thread.ident is None:
            self.is_done = True
        while not self.is_done:
            self.take_turn()

    def _run(self) -> None:
        try:
            self._call()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by the scheduler
            self.error = error
        self.is_done = True
        self._handed_over.release()


class Scheduler:
    """Runs tasks one at a time.

    Args:
        schedule: selects the next turn among those that are possible, one byte each. Once it is used up, the first
            task that can go on does so, and time limits expire only if there is none.

    Attributes:
        tasks: all tasks.
        turns: number of turns so far.
        on_stall: called if no task can go on; returns True if that has changed something.
    """

    def __init__(self, schedule: bytes) -> None:
        self._schedule = deque(schedule)
        self.tasks: list[Task] = []
        self._current: Task | None = None
        self.turns = 0
        self.on_turn: Callable[[], None] = lambda: None
        self.on_stall: Callable[[], bool] = lambda: False

    @property
    def current(self) -> Task:
        assert self._current is not None, "a task waits, and nothing else"
        return self._current

    def start(self, name: str, call: Callable[[], object], owner: object = None, may_wait: bool = True) -> Task:
        self.tasks.append(task := Task(name, call, owner, may_wait))
        return task

    def wait(self, is_ready: Callable[[], bool], waits_for: str, limit: float | None = None) -> bool:
        """Lets the current task wait; see `Task.wait`."""
        return self.current.wait(is_ready, limit, waits_for)

    def hand_over(self) -> None:
        """Lets other tasks go on before the current one."""
        self.wait(lambda: True, "its turn")

    def run(self, until: Callable[[], bool]) -> None:
        """Runs tasks until a condition holds.

        Raises:
            DeadlockError: no task can go on.
        """
        while not until():
            self.turns += 1
            assert self.turns < _MOST_TURNS, f"the simulation does not end: {self}"
            self.on_turn()
            task, expires = self._next()
            if task is not None:
                self._take_turn(task, expires)
            elif not until() and not self.on_stall():
                raise DeadlockError(f"no worker can go on: {self}")

    def end(self, owner: object) -> None:
        """Ends all tasks of a worker at their present waits."""
        before = self._current
        for task in [task for task in self.tasks if task.owner is owner and task is not before]:
            self._current = task
            task.end()
            self.tasks.remove(task)
            assert task.error is None, f"{task.name} ended by {task.error!r}"
        self._current = before

    def close(self) -> None:
        for owner in {id(task.owner): task.owner for task in self.tasks}.values():
            self.end(owner)

    def _take_turn(self, task: Task, expires: bool) -> None:
        self._current = task
        task.take_turn(expires)
        self._current = None
        if task.is_done:
            self.tasks.remove(task)
        if task.error is not None:
            raise task.error

    def _next(self) -> tuple[Task | None, bool]:
        ready = [(task, False) for task in self.tasks if task.can_run]
        late = [(task, True) for task in self.tasks if task.can_expire and not task.can_run]
        drawn = ready + [one for one in late if one[0].limit != LAST_RESORT]
        if self._schedule and drawn:
            return drawn[self._schedule.popleft() % len(drawn)]
        return min(ready or late or [(None, False)], key=lambda one: 0 if one[0] is None else one[0].limit or 0)

    def __str__(self) -> str:
        return "; ".join(f"{task.name} waits for {task.waits_for}" for task in self.tasks if not task.is_done)

    # -- replacements for what the control code waits with ---------------------------------------------------------

    @contextmanager
    def replacing_waits(self) -> Iterator[None]:
        """Context in which the waits of the control code hand over to the scheduler."""
        with pytest.MonkeyPatch.context() as patch:
            for module in (call_matching, write_consensus):
                patch.setattr(module, "Condition", lambda: Condition(self))
            patch.setattr(coordination, "Event", lambda: Event(self))
            patch.setattr(messages, "queue", SimpleNamespace(SimpleQueue=lambda: Queue(self)))
            timer = lambda *arguments: Timer(self, *arguments)  # noqa: E731
            patch.setattr(failed_step, "threading", SimpleNamespace(Timer=timer, Lock=threading.Lock))
            yield


class Condition:
    """As `autodist.waits.Condition`; a wait goes on only after `notify_all`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._notified = scheduler, 0
        self._holder: Task | None = None

    def __enter__(self) -> None:
        if self._holder is not None:
            self._scheduler.wait(lambda: self._holder is None, "a lock")
        self._holder = self._scheduler.current

    def __exit__(self, *error: object) -> None:
        if self._holder is self._scheduler.current:
            self._holder = None

    def notify_all(self) -> None:
        self._notified += 1

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        assert self._scheduler.current.may_wait, "a thread that takes messages waits"
        is_in_time = True
        while not (result := predicate()) and is_in_time:
            self._holder = None
            is_in_time = self._scheduler.wait(self._notification(), predicate.__qualname__, timeout)
            self.__enter__()
        return result

    def _notification(self) -> Callable[[], bool]:
        seen = self._notified
        return lambda: self._notified > seen and self._holder is None


class Event:
    """As `autodist.waits.Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._is_set = scheduler, False

    def set(self) -> None:
        self._is_set = True

    def wait(self, timeout: float | None = None) -> bool:
        return self._scheduler.wait(lambda: self._is_set, "an event", timeout)


class Queue(Generic[T]):
    """As `queue.SimpleQueue`; a capacity makes `put` wait.

    Args:
        scheduler: the scheduler.
        capacity: number of items that fit in; None: any.
    """

    def __init__(self, scheduler: Scheduler, capacity: int | None = None) -> None:
        self._scheduler, self._capacity = scheduler, capacity
        self.items: deque[T] = deque()

    def put(self, item: T) -> None:
        if self._capacity is not None:
            self._scheduler.wait(lambda: len(self.items) < (self._capacity or 0), "room in a queue")
        self.items.append(item)

    def get(self) -> T:
        self._scheduler.wait(lambda: bool(self.items), "a message")
        return self.items.popleft()


class Timer:
    """As `threading.Timer`."""

    def __init__(
        self, scheduler: Scheduler, seconds: float, call: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        self._scheduler, self._seconds, self._call, self._arguments = scheduler, seconds, call, arguments
        self.name, self.daemon, self._is_cancelled = "", False, False

    def start(self) -> None:
        owner = self._scheduler.current
        self._scheduler.start(f"a timer of {owner.name}", self._run, owner.owner)

    def cancel(self) -> None:
        self._is_cancelled = True

    def _run(self) -> None:
        if not self._scheduler.wait(lambda: self._is_cancelled, "its time", self._seconds):
            self._call(*self._arguments)
