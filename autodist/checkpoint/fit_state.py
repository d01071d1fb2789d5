"""State of a `fit` outside the model's variables: callbacks, the history, and metrics of the current epoch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.trainers.epoch_iterator import EpochIterator  # makes the batches of each epoch of `fit`

from autodist.capture.keras.skipped_batches import reads_on
from autodist.checkpoint.extra_state import DRAWS
from autodist.runtime.draws import Draws

_STATES: Mapping[type[keras.callbacks.Callback], tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: ("best", "_batches_seen_since_last_saving", "_last_batch_seen"),
    keras.callbacks.History: ("epoch", "history"),
}
"""State fields of Keras's callbacks. A callback of the script implements `get_state()` and `set_state(state)`."""

_ARRAY = "array"


def states_of(callbacks: Iterable[keras.callbacks.Callback]) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Returns the callbacks' states as JSON, and the arrays that they refer to."""
    arrays: dict[str, np.ndarray] = {}
    states = [
        {"class": type(one).__name__, "state": _as_json(state, arrays)}
        for one in callbacks
        if (state := _state_of(one)) is not None
    ]
    return states, arrays


def set_states(
    callbacks: Iterable[keras.callbacks.Callback], states: Sequence[Any], arrays: Mapping[str, np.ndarray]
) -> None:
    """Restores callbacks' states; each callback takes the first remaining state of its class."""
    left = list(states)
    for callback in callbacks:
        own = next((one for one in left if one["class"] == type(callback).__name__), None)
        if own is not None and _state_of(callback) is not None:
            left.remove(own)
            _set_state(callback, _from_json(own["state"], arrays))


def _state_of(callback: keras.callbacks.Callback) -> Any:
    if hasattr(callback, "get_state") and hasattr(callback, "set_state"):
        return callback.get_state()
    names = next((names for kind, names in _STATES.items() if isinstance(callback, kind)), ())
    return {name: vars(callback)[name] for name in names if name in vars(callback)} or None


def _set_state(callback: keras.callbacks.Callback, state: Any) -> None:
    if hasattr(callback, "get_state") and hasattr(callback, "set_state"):
        callback.set_state(state)
    else:
        vars(callback).update(state)


def _as_json(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Converts a value without loss: Python prints floats exactly, and arrays are stored separately."""
    if isinstance(value, Mapping):
        return {str(name): _as_json(one, arrays) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(one, arrays) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    array = np.asarray(value)
    name = f"{_ARRAY}{len(arrays)}"
    arrays[name] = array
    return {_ARRAY: name}


def _from_json(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, Mapping):
        if value.keys() == {_ARRAY}:
            array = arrays[value[_ARRAY]]
            return array if array.ndim else array[()]
        return {name: _from_json(one, arrays) for name, one in value.items()}
    return [_from_json(one, arrays) for one in value] if isinstance(value, list) else value


def without_arrays(states: Sequence[Any]) -> list[Any]:
    """Removes arrays, such as the best weights, from states made by `states_of`.

    For a callback of the script, the complete state is kept or removed.
    """
    ours = {kind.__name__ for kind in _STATES}
    found = []
    for one in states:
        if one["class"] in ours:
            found.append({**one, "state": {k: value for k, value in one["state"].items() if not _has_array(value)}})
        elif not _has_array(one["state"]):
            found.append(one)
    return found


def _has_array(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.keys() == {_ARRAY} or any(map(_has_array, value.values()))
    return isinstance(value, list) and any(map(_has_array, value))


def writer_of(arrays: Mapping[str, np.ndarray]) -> Callable[[str], None]:
    """Returns a function that writes arrays to a path."""

    def write(path: str) -> None:
        with open(path, "wb") as opened:
            named: dict[str, Any] = dict(arrays)
            np.savez(opened, **named)

    return write


def arrays_in(path: str) -> dict[str, np.ndarray]:
    """Returns the arrays written by `writer_of`."""
    with np.load(path, allow_pickle=False) as opened:
        return {name: opened[name] for name in opened.files}


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

    def go_on(self) -> None:
        """Called before `begin_again` for a `fit` that was over and has further epochs now."""
        self._saved = {**self._saved, "epoch": self._then.to_json()}

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
