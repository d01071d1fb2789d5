"""Updates that run in threads in parallel with the steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from autodist.waits import Condition, join_all, start_thread

STANDING = 2
"""Runs of a standing update that have begun. With 1, the next one would begin a round trip after the last has ended."""


class Updates:
    """Runs updates of stale variables one at a time, in the order in which steps have released them.

    Their number is limited by the number of steps that may run ahead, since a step takes a token that an update
    returns. An update that waits for a worker that has gone may never return; its thread is then abandoned.

    Standing updates run all the time: a run waits for the next step that it belongs to.

    Args:
        on_failure: called in the thread with an update's error; its result is raised in `release` and `wait`. No update
            runs after that.
        on_standing_failure: called in the thread with the error of a standing update; None: `on_failure`.
    """

    def __init__(
        self,
        on_failure: Callable[[BaseException], BaseException],
        on_standing_failure: Callable[[BaseException], BaseException] | None = None,
    ) -> None:
        self._on_failure, self._on_standing_failure = on_failure, on_standing_failure or on_failure
        self._standing: list[threading.Thread] = []
        self._is_ending = False
        self._released: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._changed = Condition()
        self._pending = 0
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def release(self, update: Callable[[], object]) -> None:
        """Queues `update` behind all that were released before it.

        Raises:
            BaseException: an earlier one failed.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._pending += 1
            if self._thread is None:
                self._thread = start_thread("updates", self._serve)
        self._released.put(update)

    def wait(self) -> None:
        """Returns when all released updates are done.

        Raises:
            BaseException: one of them failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._pending or self._failure is not None)
            if self._failure is not None:
                raise self._failure

    def close(self, limit: float) -> None:
        """Ends the thread after the update in progress, for which it waits up to `limit` seconds; none may follow."""
        self._released.put(None)
        if self._thread is not None:
            self._thread.join(limit)

    def repeat(self, update: Callable[[], object]) -> None:
        """Runs a standing update again and again; `STANDING` runs wait at a time."""
        for _ in range(STANDING):
            self._standing.append(start_thread("standing-update", self._repeat, update))

    def end_standing(self) -> None:
        """Ends the standing updates with the sessions that run them, which the caller closes next."""
        self._is_ending = True

    @property
    def are_standing(self) -> bool:
        """True if a run of a standing update has not ended."""
        return any(thread.is_alive() for thread in self._standing)

    def wait_until_ended(self, limit: float) -> None:
        """Returns when no standing update is left, or after about `limit` seconds."""
        join_all(self._standing, limit)

    @property
    def have_begun(self) -> bool:
        """True if an update was ever released."""
        return self._thread is not None

    @property
    def is_idle(self) -> bool:
        """True if no update is in progress."""
        return not self._pending

    def _serve(self) -> None:
        while (update := self._released.get()) is not None:
            try:
                update()
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that trains
                self._fail(self._on_failure(error))
                return
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()

    def _repeat(self, update: Callable[[], object]) -> None:
        try:
            while not self._is_ending:
                update()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that trains
            if not self._is_ending:
                self._fail(self._on_standing_failure(error))

    def _fail(self, failure: BaseException) -> None:
        with self._changed:
            self._failure = failure
            self._pending = 0
            self._changed.notify_all()
