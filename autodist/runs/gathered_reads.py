"""Reads of variables that other workers hold: their values are gathered if there is room for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from autodist.errors import StrategyError
from autodist.logs.formatting import readable_bytes
from autodist.runtime.deferred_values import deferred
from autodist.runtime.variables import TrackedVariable

log = logging.getLogger("autodist")

NOTED = 100 << 20
"""Bytes of gathered values from which memory is checked and the log says so."""

_SHARE = 2
"""Gathered values take at most this fraction (one half) of the memory: the steps need the rest."""


class GatheredReads:
    """Chooses what a read by the script gathers.

    Args:
        worker: index of this worker.
        variables: all variables of the script's steps.
        memory: returns the bytes of this worker's memory; 0 if they are not known.
    """

    def __init__(self, worker: int, variables: Iterable[TrackedVariable], memory: Callable[[], int]) -> None:
        self._worker, self._variables, self._memory = worker, variables, memory

    def of(self, behind: Sequence[TrackedVariable], read: TrackedVariable | None) -> Sequence[TrackedVariable]:
        """Returns the variables whose values are brought up to date: all that are behind, if there is room.

        Args:
            behind: the variables that are behind.
            read: the one that the script reads; None if it requests all.

        Raises:
            StrategyError: there is no room for the values that other workers hold.
        """
        size = self._elsewhere(behind)
        if size < NOTED:
            return behind
        memory = self._memory()
        held = self._elsewhere(t for t in self._variables if not t.may_be_behind and deferred(t.source) is None)
        room = memory // _SHARE - held
        if memory == 0 or size <= room:
            log.info("gathering %s of variables that other workers hold, to read them here", readable_bytes(size))
            return behind
        if read is not None and read.byte_size <= room:
            return [read]
        what = "all variables" if read is None else read.source.name
        size = size if read is None else read.byte_size
        raise StrategyError(
            f"reading {what} on this worker gathers {readable_bytes(size)} that other workers hold, and half of its "
            f"memory ({readable_bytes(memory)}) has room for {readable_bytes(max(room, 0))}. Call `evaluate` and "
            "`predict` on all workers, which compute with their parts, or a function under `@ad.function`. To keep "
            "the values, use `ad.checkpoint`, which writes them part by part."
        )

    def _elsewhere(self, variables: Iterable[TrackedVariable]) -> int:
        """Returns the bytes of those variables that this worker does not hold whole."""
        return sum(t.byte_size for t in variables if not t.holder.is_held_by(self._worker))
