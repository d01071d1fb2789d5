"""The search for machines or processes that can join a run, at an interval, in a thread of the chief."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from autodist.runs.lost_run import Joining
from autodist.waits import Event

DEFAULT_INTERVAL = 60.0

_END_LIMIT = 5.0
"""Seconds to wait for the thread, which ends its programs, at the end of the run."""


class JoiningSearch(ABC):
    """Looks at an interval until some machines or processes can join the run.

    Args:
        interval: seconds between two looks; None: 60.
        on_found: called once, from the thread, with those that can join.

    Attributes:
        addresses: addresses of the nodes that the run does not have.
        refused: for each address, the logged reason why it cannot be used.
    """

    addresses: tuple[str, ...] = ()
    refused: Mapping[str, str] = {}

    def __init__(self, interval: float | None, on_found: Callable[[Joining], None]) -> None:
        self._interval, self._on_found = interval or DEFAULT_INTERVAL, on_found
        self._over = Event()
        self._thread = threading.Thread(target=self._run, name="autodist-joining-search", daemon=True)

    def begin(self) -> None:
        """Starts to look."""
        self._thread.start()

    def end(self) -> None:
        """Ends a look in progress."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_END_LIMIT)

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            joining = self._look()
            if joining is not None and not self._over.is_set():
                self._on_found(joining)
                return

    @abstractmethod
    def _look(self) -> Joining | None:
        """Returns those that can join now; None if there are none."""
