"""Compares the copies of variables that the workers of a mesh hold, and makes copies that differ equal again."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autodist.logs.formatting import some_of
from autodist.placement.holder import Holder
from autodist.runtime.variable_slices import VariableSlices
from autodist.runtime.variables import StoredVariable

log = logging.getLogger("autodist")


class CopyCheck:
    """Compares checksums of all copies.

    Workers of one row of a mesh compute the gradient of a whole variable each for itself. Processors or libraries of
    several kinds may round it differently, so that copies drift apart.

    Args:
        worker: index of this worker.
        slices: storage of the values.
        reduce: returns the maximum ("max") or minimum ("min") of an array over all workers.
    """

    def __init__(self, worker: int, slices: VariableSlices, reduce: Callable[[np.ndarray, str], np.ndarray]) -> None:
        self._worker, self._slices, self._reduce = worker, slices, reduce

    def compare(self, variables: Iterable[tuple[str, StoredVariable]], step: int) -> None:
        """Compares all copies and makes them equal; a collective call between two steps.

        Args:
            variables: all variables of the steps with their names, in the same order on all workers.
            step: number of training steps so far, for the warning.
        """
        copied = [(name, part) for name, kept in variables for part in _parts(kept) if len(_workers(part)) > 1]
        own = [self._checksum(part) if self._worker in _workers(part) else None for _, part in copied]
        most, least = (
            self._reduce(np.array([outside if one is None else one for one in own], np.float64), how)
            for how, outside in (("max", -np.inf), ("min", np.inf))
        )
        apart = [copied[k] for k in np.flatnonzero(most != least)]
        if not apart:
            return
        differences = self._reduce(np.array([self._equalise(part) for _, part in apart]), "max")
        if self._worker == 0:
            log.warning(
                "After step %d, the workers' copies of %s differ, by %.3g at most. Each worker now has the value of "
                "the first one that holds a copy. The workers round differently, as processors, numbers of threads "
                "or libraries of different kinds do.",
                step, some_of(list(dict.fromkeys(name for name, _ in apart))), differences.max(),
            )  # fmt: skip

    def _checksum(self, part: StoredVariable) -> int:
        return zlib.crc32(self._slices.read(part, self._worker).tobytes())

    def _equalise(self, part: StoredVariable) -> float:
        """Gives this worker's copy the value of the first holder; returns the largest difference of an element."""
        first, *others = _workers(part)
        if self._worker not in others:
            return 0.0
        own, value = self._slices.read(part, self._worker), self._slices.read(part, first)
        self._slices.set([_Value(part, value)], workers=[self._worker])
        return float(np.max(np.abs(value.astype(np.float64) - own.astype(np.float64)), initial=0.0))


@dataclass(frozen=True)
class _Value:
    """The value of a part."""

    stored: StoredVariable
    value: np.ndarray

    @property
    def byte_size(self) -> int:
        return self.value.nbytes

    def read(self) -> np.ndarray:
        return self.value


def _workers(part: StoredVariable) -> Sequence[int]:
    """Returns the workers that hold the only slice of a part."""
    return part.slices[0].group.workers


def _parts(kept: StoredVariable) -> Iterator[StoredVariable]:
    """Yields each slice of a variable as a variable of its own."""
    for one in kept.slices:
        whole = replace(one, name="", begin=(0,) * len(one.shape))
        yield replace(kept, shared_name=kept.shared_name + one.name, shape=one.shape, holder=Holder((whole,)))
