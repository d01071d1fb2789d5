"""Records the states of NumPy's and Python's random generators in `fit`, for a resumed `fit` to draw the same."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from keras.src.trainers.epoch_iterator import EpochIterator  # makes the batches of each epoch of `fit`

from autodist.capture.keras.skipped_batches import reads_on
from autodist.checkpoint.script import DRAWS
from autodist.runtime.draws import Draws

_FIT = "fit"


class FitDraws:
    """Records the states of the random generators at the points of a `fit` that a resumed `fit` passes again.

    Data sets in Python (`PyDataset`, a generator function) draw while they are read, which is ahead of the training and
    in another thread. They draw the order of an epoch at its end. A resumed `fit` repeats their draws for batches
    already trained on, from the state at the start of that epoch. It also repeats the draws at the end of each finished
    epoch, from the state at that point. Callbacks and the step itself may draw from a random generator that the data
    does not use. It continues from the state after the last batch.
    """

    def __init__(self) -> None:
        self._begin = self._epoch = self._noted = Draws.now()
        self._ends: list[dict[str, Any]] = []
        self._over: list[dict[str, Any]] = []
        self._saved: Mapping[str, Any] = {}
        self._then = self._noted
        self._start = self._begin

    def state(self) -> dict[str, Any]:
        """Returns the state to be saved."""
        fit = {
            "begin": self._begin.to_json(),
            "epoch": self._epoch.to_json(),
            "ends": _changes(self._ends),
            "over": self._over,
        }
        return {DRAWS: self._noted.to_json(), _FIT: fit}

    # -- recording -------------------------------------------------------------------------------------------------

    def begin_fit(self) -> None:
        """Called at the start of a `fit`, before it inspects its data."""
        self._begin = self._noted = Draws.now()
        self._ends = []

    def begin_epoch(self) -> None:
        """Called after all callbacks have begun an epoch, before its data is read."""
        self._epoch = self._noted = Draws.now()

    def after_batch(self) -> None:
        """Called after all callbacks have ended a batch."""
        self._noted = Draws.now()

    def end_epoch(self) -> None:
        """Called at the end of an epoch; its data has ended it after the last batch."""
        self._ends.append(self._noted.to_json())

    def end_fit(self) -> None:
        """Called at the end of a `fit`."""
        self._noted = Draws.now()
        self._over.append(self._noted.to_json())

    # -- resuming --------------------------------------------------------------------------------------------------

    def resume(self, state: Mapping[str, Any]) -> None:
        """Loads a saved state."""
        self._saved = state.get(_FIT, {})
        self._then = Draws.from_json(state.get(DRAWS, {}))

    def begin_again(self) -> None:
        """Called instead of `begin_fit` for the `fit` to be resumed."""
        self._begin = Draws.from_json(self._saved["begin"]) if self._saved else Draws.now()
        self._begin.resume()
        self._ends = _all(self._saved.get("ends", []))

    def pass_fit(self) -> None:
        """Called instead of `end_fit` for a `fit` that was finished in the earlier run."""
        over = self._saved.get("over", [])
        if len(self._over) < len(over):
            Draws.from_json(over[len(self._over)]).resume()
        self.end_fit()

    def pass_epoch(self, epoch: int) -> None:
        """Called before the data ends an epoch that was finished in the earlier run; `epoch` is 0 for the first one."""
        if epoch < len(self._ends):
            Draws.from_json(self._ends[epoch]).resume()

    def begin_epoch_again(self, batches: EpochIterator) -> None:
        """Called at the start of the epoch to be resumed, before any of its data is read."""
        if self._saved and not reads_on(batches):
            self._epoch = Draws.from_json(self._saved["epoch"])
            self._epoch.resume()

    def before_batches(self, batches: EpochIterator) -> None:
        """Called after the data has begun the epoch, before the batches already trained on are read."""
        self._start = self._begin if reads_on(batches) else Draws.now()

    def after_batches(self) -> None:
        """Called after the batches already trained on are read."""
        self._then.resume(self._start.unmoved())
        self._noted = Draws.now()


def _changes(states: Sequence[dict[str, Any]]) -> list[dict[str, Any] | None]:
    """Returns the states, with None for each that equals the previous one."""
    texts = [json.dumps(state) for state in states]
    return [None if k and texts[k] == texts[k - 1] else state for k, state in enumerate(states)]


def _all(changes: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for state in changes:
        found.append(found[-1] if state is None else state)
    return found
