"""Callbacks of `fit` on several workers: recorders act on the chief only, all others on every worker.

A recorder (`ModelCheckpoint`, `TensorBoard`, a tracker's callback) does not change the training, and its files, uploads
and runs are needed once. The other workers do not call it, so that it misses no file that it did not write. Other
callbacks may change the training, so every worker calls them. Their files are written as outside of `fit`: by the
chief if all workers name the same path, otherwise by each worker.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
from keras import callbacks

from autodist.capture.keras.libraries import callbacks_of, legacy_keras
from autodist.capture.shared_files import saving_alone, saving_with_chief
from autodist.errors import AutoDistError
from autodist.tf_compat.patches import BACKUPS, LEGACY_BACKUPS, patched

log = logging.getLogger("autodist")

C = TypeVar("C")

RECORDERS = frozenset({"ModelCheckpoint", "CSVLogger", "TensorBoard", "RemoteMonitor", "OrbaxCheckpoint"})
"""Names of Keras's callbacks that record; a version of Keras need not have each."""

TRACKERS = frozenset(
    {
        "aim", "clearml", "comet_ml", "dvclive", "mlflow", "neptune", "neptune_tensorflow_keras", "swanlab", "trackio",
        "wandb",
    }
)  # fmt: skip
"""Packages whose callbacks record."""

_EVERYWHERE = "_autodist_on_every_worker"
_HOOKS = tuple(name for name in dir(callbacks.Callback) if name.startswith("on_"))


def on_every_worker(callback: C) -> C:
    """Marks a recorder as a callback that every worker calls, and returns it."""
    vars(callback)[_EVERYWHERE] = True
    return callback


def acts_on_chief_alone(callback: Any) -> bool:
    """Returns True for a recorder: its class is, or derives from, a recording class of Keras or of a tracker."""
    return not getattr(callback, _EVERYWHERE, False) and any(map(_records, type(callback).__mro__))


def _records(kind: type) -> bool:
    package = kind.__module__.partition(".")[0]
    return package in TRACKERS or (package in ("keras", "tf_keras") and kind.__name__ in RECORDERS)


def names_of_recorders(given: Iterable[Any]) -> list[str]:
    """Returns the names of the recorders, including mlflow's autologging."""
    names = {type(callback).__name__ for callback in given if acts_on_chief_alone(callback)}
    return [*sorted(names), *(["mlflow's autologging"] if _autologs() else [])]


# -- on the chief ----------------------------------------------------------------------------------------------------


@contextmanager
def acting_alone(given: Iterable[Any]) -> Iterator[None]:
    """Makes the recorders' files be written without the other workers while the context is open."""

    def alone(hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            with saving_alone():
                return hook(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for callback in given:
            if acts_on_chief_alone(callback) or "BackupAndRestore" in (
                kind.__name__ for kind in type(callback).__mro__
            ):
                stack.enter_context(_hooks_replaced(callback, alone))
        yield


# -- on the other workers --------------------------------------------------------------------------------------------


@contextmanager
def following(given: Iterable[Any], have_joined: Callable[[], bool]) -> Iterator[None]:
    """Makes callbacks leave their files to the chief, and stops mlflow's autologging, while the context is open.

    Args:
        given: the callbacks that this worker calls.
        have_joined: returns True if the workers can agree on the one that writes a file.
    """
    with ExitStack() as stack:
        stack.enter_context(_writing_no_backups())
        stack.enter_context(_autologging_off())
        for callback in itertools.filterfalse(acts_on_chief_alone, given):
            follower = _Follower(callback)
            stack.enter_context(_hooks_replaced(callback, functools.partial(follower.hook, have_joined=have_joined)))
        yield


class _Follower:
    """A callback on a worker that is not the chief; it may read the chief's files if they are on the same machine."""

    def __init__(self, callback: Any) -> None:
        self._name, self._chiefs_files, self._is_dropped = type(callback).__name__, list[str](), False

    def hook(self, hook: Callable[..., Any], have_joined: Callable[[], bool]) -> Callable[..., Any]:
        """Wraps a method of the callback; after a missing file of the chief, no method is called any more."""

        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_dropped:
                return None
            try:
                with saving_with_chief(have_joined, self._chiefs_files.append):
                    return hook(*args, **kwargs)
            except AutoDistError:
                raise
            except Exception as error:
                missing = next((path for path in self._chiefs_files if not _is_here(path)), None)
                if missing is None:
                    raise
                self._is_dropped = True
                log.warning(
                    "%s failed with %s: %s. The chief has written %s, which this worker does not see, so %s acts on "
                    "the chief alone from now on. Save to a path that all machines see, or on the chief (ad.is_chief).",
                    self._name, type(error).__name__, error, missing, self._name,
                )  # fmt: skip
                return None

        return call


def _is_here(path: str) -> bool:
    return os.path.exists(path) or os.path.exists(f"{path}.index")  # a checkpoint is named by the prefix of its files


@contextmanager
def _writing_no_backups() -> Iterator[None]:
    """Makes `BackupAndRestore`, which every worker calls, leave its files to the chief.

    Methods of Keras's class are replaced, not those of the callbacks, so that the script's subclasses behave alike.
    """
    rows = BACKUPS + (LEGACY_BACKUPS if legacy_keras() is not None else [])
    with patched(dict.fromkeys(rows, _nothing)):  # the next step brings the chief's values
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces a function that writes files."""


def leave_to_chief(given: Iterable[Any], model: Any) -> list[Any]:
    """Returns the callbacks that this worker calls; recorders only get the model."""
    called, base = [], callbacks_of(model).Callback
    for callback in given:
        if not acts_on_chief_alone(callback):
            called.append(callback)
        elif isinstance(callback, base):
            base.set_model(callback, model)
    return called


# -- numbers of recorders --------------------------------------------------------------------------------------------


def numbers_of(given: Iterable[Any]) -> str:
    """Returns the numeric attributes of recorders (such as the best loss so far) as JSON."""
    return json.dumps({key: _numbers(callback) for key, callback in _keyed(given)})


def set_numbers(given: Iterable[Any], text: str) -> None:
    """Sets the chief's numbers on recorders, which a script may read after `fit`."""
    found = json.loads(text)
    for key, callback in _keyed(given):
        vars(callback).update(found.get(key, {}))


def _keyed(given: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    seen: Counter[str] = Counter()
    for callback in filter(acts_on_chief_alone, given):
        name = type(callback).__qualname__
        seen[name] += 1
        yield f"{name} {seen[name]}", callback


def _numbers(callback: Any) -> dict[str, Any]:
    kept = {name: value for name, value in vars(callback).items() if isinstance(value, int | float | np.number)}
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in kept.items()}


# -- the methods of one callback -------------------------------------------------------------------------------------


@contextmanager
def _hooks_replaced(callback: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Wraps the methods that Keras calls on a callback, and that it defines, while the context is open."""
    own = vars(callback)
    before = {name: own[name] for name in _HOOKS if name in own}  # as a LambdaCallback has them
    for name in _HOOKS:
        hook = getattr(callback, name, None)
        if hook is not None and not getattr(hook, "_is_default", False):
            own[name] = wrap(hook)
    try:
        yield
    finally:
        for name in _HOOKS:
            own.pop(name, None)
        own.update(before)


# -- mlflow's autologging, which puts itself into `fit` --------------------------------------------------------------


def _autologs() -> bool:
    logging_of_mlflow = sys.modules.get("mlflow.utils.autologging_utils")
    is_off = getattr(logging_of_mlflow, "autologging_is_disabled", lambda flavor: True)
    return not all(is_off(flavor) for flavor in ("tensorflow", "keras"))


def _autologging_off() -> AbstractContextManager[None]:
    if not _autologs():
        return nullcontext()
    off: AbstractContextManager[None] = sys.modules["mlflow.utils.autologging_utils"].disable_autologging()
    return off
