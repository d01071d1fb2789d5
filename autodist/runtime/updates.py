"""Background updates of stale variables and their cached copies, which run in a thread in parallel with the steps."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Updates:
    """Runs updates one at a time, in the order in which steps have released them.

    Their number is limited by the number of steps that may run ahead, since a step takes a token that an update
    returns. An update that waits for a worker that has gone may never return; its thread is then abandoned.

    Args:
        on_failure: called in the thread with an update's error; its result is raised in `release` and `wait`. No update
            runs after that.
    """

    def __init__(self, on_failure: Callable[[BaseException], BaseException]) -> None:
        self._on_failure = on_failure
        self._released: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending = 0
        self._failure: BaseException | None = None
        self._is_started = False

    def release(self, update: Callable[[], object]) -> None:
        """Queues `update` behind all that were released before it.

        Raises:
            BaseException: an earlier one failed.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._pending += 1
            if not self._is_started:
                self._is_started = True
                threading.Thread(target=self._serve, name="autodist-updates", daemon=True).start()
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

    @property
    def have_begun(self) -> bool:
        """True if an update was ever released."""
        return self._is_started

    @property
    def is_idle(self) -> bool:
        """True if no update is in progress."""
        return not self._pending

    def _serve(self) -> None:
        while True:
            update = self._released.get()
            try:
                update()
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that trains
                failure = self._on_failure(error)
                with self._changed:
                    self._failure = failure
                    self._pending = 0
                    self._changed.notify_all()
                return
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()
