"""FitDraws: what NumPy's and Python's generators draw in `fit`, so that one that goes on draws it once more."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from keras.src.trainers.epoch_iterator import EpochIterator  # which makes the batches of each epoch of `fit`

from autodist.capture.skipped_batches import reads_on
from autodist.checkpoint.script import DRAWS
from autodist.runtime.draws import Draws

_FIT = "fit"


class FitDraws:
    """Notes the generators' states where a `fit` that goes on comes by once more.

    Data that are Python's code (`PyDataset`, a generator) draw where they are read, ahead of the training and in
    another thread, and an epoch's order where it ends. What they drew for batches that were trained on they draw once
    more, from the state with which that epoch began; and at the ends of epochs that are over, each from the state that
    it had there. Of a generator from which reading draws nothing, callbacks and the step itself may have drawn: it goes
    on from the state after the last batch.
    """

    def __init__(self) -> None:
        self._begin = self._epoch = self._noted = Draws.now()
        self._ends: list[dict[str, Any]] = []
        self._over: list[dict[str, Any]] = []
        self._saved: Mapping[str, Any] = {}
        self._then = self._noted
        self._start = self._begin

    def state(self) -> dict[str, Any]:
        """What is saved of it."""
        fit = {
            "begin": self._begin.told(),
            "epoch": self._epoch.told(),
            "ends": _changes(self._ends),
            "over": self._over,
        }
        return {DRAWS: self._noted.told(), _FIT: fit}

    # -- as it goes ------------------------------------------------------------------------------------------------

    def begin_fit(self) -> None:
        """A `fit` is called, and has not looked at its data yet."""
        self._begin = self._noted = Draws.now()
        self._ends = []

    def begin_epoch(self) -> None:
        """All callbacks know of an epoch, of which nothing was read."""
        self._epoch = self._noted = Draws.now()

    def after_batch(self) -> None:
        """All callbacks know that a batch is over."""
        self._noted = Draws.now()

    def end_epoch(self) -> None:
        """An epoch is over; its data have ended it after its last batch."""
        self._ends.append(self._noted.told())

    def end_fit(self) -> None:
        """A `fit` is over."""
        self._noted = Draws.now()
        self._over.append(self._noted.told())

    # -- as another goes on ----------------------------------------------------------------------------------------

    def resume(self, state: Mapping[str, Any]) -> None:
        """Takes in what was saved."""
        self._saved = state.get(_FIT, {})
        self._then = Draws.of(state.get(DRAWS, {}))

    def begin_again(self) -> None:
        """The `fit` that was under way is called once more, in place of `begin_fit`."""
        self._begin = Draws.of(self._saved["begin"]) if self._saved else Draws.now()
        self._begin.resume()
        self._ends = _all(self._saved.get("ends", []))

    def pass_fit(self) -> None:
        """A `fit` that was over is, without a step, in place of `end_fit`."""
        over = self._saved.get("over", [])
        if len(self._over) < len(over):
            Draws.of(over[len(self._over)]).resume()
        self.end_fit()

    def pass_epoch(self, epoch: int) -> None:
        """The data end an epoch that was over; counted from the first of the `fit`."""
        if epoch < len(self._ends):
            Draws.of(self._ends[epoch]).resume()

    def begin_epoch_again(self, batches: EpochIterator) -> None:
        """The epoch that was under way is begun, before anything of it is read."""
        if self._saved and not reads_on(batches):
            self._epoch = Draws.of(self._saved["epoch"])
            self._epoch.resume()

    def before_batches(self, batches: EpochIterator) -> None:
        """Its data have begun it, and its batches that were trained on are read now."""
        self._start = self._begin if reads_on(batches) else Draws.now()

    def after_batches(self) -> None:
        """They are read."""
        self._then.resume(self._start.unmoved())
        self._noted = Draws.now()


def _changes(states: Sequence[dict[str, Any]]) -> list[dict[str, Any] | None]:
    """Each, or None where it is as the one before."""
    told = [json.dumps(state) for state in states]
    return [None if k and told[k] == told[k - 1] else state for k, state in enumerate(states)]


def _all(changes: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for state in changes:
        found.append(found[-1] if state is None else state)
    return found
