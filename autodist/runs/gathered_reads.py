"""Reads by the script: the values that they bring up to date, gathered from other workers if there is room."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from autodist.errors import StrategyError
from autodist.logs.formatting import readable_bytes
from autodist.runtime.deferred_values import deferred
from autodist.runtime.variable_slices import in_groups
from autodist.runtime.variables import LARGE, TrackedVariable

log = logging.getLogger("autodist")

NOTED = 100 << 20
"""Bytes of gathered values from which memory is checked and the log says so."""

_SHARE = 2
"""Gathered values take at most this fraction (one half) of the memory: the steps need the rest."""


class GatheredReads:
    """Chooses the variables whose values a read by the script brings up to date.

    Args:
        worker: index of this worker.
        variables: all variables of the script's steps.
        memory: returns the bytes of this worker's memory; 0 if they are not known.
    """

    def __init__(self, worker: int, variables: Iterable[TrackedVariable], memory: Callable[[], int]) -> None:
        self._worker, self._variables, self._memory = worker, variables, memory

    def of(self, read: TrackedVariable | None) -> Sequence[TrackedVariable]:
        """Returns the variables that are brought up to date together, so that not each read needs a transfer.

        Of those that this worker holds, all small ones, or a group of large ones: `fit` reads a metric after each
        epoch, for which the script needs no copy of the model. All that other workers hold, if there is room.

        Args:
            read: the one that the script reads; None if it requests all. One that only steps of other workers may have
                written is brought up to date alone.

        Raises:
            StrategyError: there is no room for the values that other workers hold.
        """
        behind = self._behind(read)
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

    def _behind(self, read: TrackedVariable | None) -> Sequence[TrackedVariable]:
        if read is None:
            return [t for t in self._variables if t.may_be_behind]
        if not read.is_behind:
            return [read]
        behind = [t for t in self._variables if t.is_behind and self._is_here(t) == self._is_here(read)]
        if not self._is_here(read):
            return behind
        if read.byte_size < LARGE:
            return [t for t in behind if t.byte_size < LARGE]
        large = [t for t in behind if t.byte_size >= LARGE]
        return next(in_groups(large[large.index(read) :]))

    def _elsewhere(self, variables: Iterable[TrackedVariable]) -> int:
        """Returns the bytes of those variables that this worker does not hold whole."""
        return sum(t.byte_size for t in variables if not self._is_here(t))

    def _is_here(self, tracked: TrackedVariable) -> bool:
        return tracked.holder.is_held_by(self._worker)
