"""State of a `fit` outside the model's variables: callbacks, the history, and metrics of the current epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

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
