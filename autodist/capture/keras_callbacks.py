"""Callbacks of `fit` on several workers: those that record act on the chief alone, all others on every worker.

A callback that records (`ModelCheckpoint`, `TensorBoard`, a tracker's) changes nothing of the training, and its files,
uploads and runs are wanted once. The other workers do not call it, so that it misses no file that it did not write.
The rest of the callbacks may change the training, so that every worker calls them. What they save is written as outside
of `fit`: by the chief, if all workers name the same path, and by each worker itself otherwise.
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

from autodist.capture.keras_libraries import callbacks_of, legacy_keras
from autodist.capture.patches import BACKUPS, LEGACY_BACKUPS, patched
from autodist.capture.shared_files import saving_alone, saving_with_chief
from autodist.errors import AutoDistError

log = logging.getLogger("autodist")

Given = TypeVar("Given")

RECORDERS = frozenset({"ModelCheckpoint", "CSVLogger", "TensorBoard", "RemoteMonitor", "OrbaxCheckpoint"})
"""Callbacks of Keras that record, by name: a version of Keras need not have each."""

TRACKERS = frozenset(
    {
        "aim", "clearml", "comet_ml", "dvclive", "mlflow", "neptune", "neptune_tensorflow_keras", "swanlab", "trackio",
        "wandb",
    }
)  # fmt: skip
"""Packages whose callbacks record."""

_EVERYWHERE = "_autodist_on_every_worker"
_HOOKS = tuple(name for name in dir(callbacks.Callback) if name.startswith("on_"))


def on_every_worker(callback: Given) -> Given:
    """Marks a callback that records as one that every worker calls, and returns it."""
    vars(callback)[_EVERYWHERE] = True
    return callback


def acts_on_chief_alone(callback: Any) -> bool:
    """Returns True if a callback records, by a class of Keras or of a tracker that it is or derives from."""
    return not getattr(callback, _EVERYWHERE, False) and any(map(_records, type(callback).__mro__))


def _records(kind: type) -> bool:
    package = kind.__module__.partition(".")[0]
    return package in TRACKERS or (package in ("keras", "tf_keras") and kind.__name__ in RECORDERS)


def names_of_recorders(given: Iterable[Any]) -> list[str]:
    """The names of what acts on the chief alone, mlflow's autologging included."""
    names = {type(callback).__name__ for callback in given if acts_on_chief_alone(callback)}
    return [*sorted(names), *(["mlflow's autologging"] if _autologs() else [])]


# -- on the chief ----------------------------------------------------------------------------------------------------


@contextmanager
def acting_alone(given: Iterable[Any]) -> Iterator[None]:
    """While it is open, what the callbacks that act on the chief alone save is written without the other workers."""

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
    """While it is open, callbacks leave to the chief what it writes, and mlflow does not log by itself.

    Args:
        given: the callbacks that this worker calls.
        have_joined: returns True if the workers can agree on which of them writes a file.
    """
    with ExitStack() as stack:
        stack.enter_context(_writing_no_backups())
        stack.enter_context(_autologging_off())
        for callback in itertools.filterfalse(acts_on_chief_alone, given):
            follower = _Follower(callback)
            stack.enter_context(_hooks_replaced(callback, functools.partial(follower.hook, have_joined=have_joined)))
        yield


class _Follower:
    """A callback on another worker than the chief, which may read what the chief has written on its own machine."""

    def __init__(self, callback: Any) -> None:
        self._name, self._left, self._is_dropped = type(callback).__name__, list[str](), False

    def hook(self, hook: Callable[..., Any], have_joined: Callable[[], bool]) -> Callable[..., Any]:
        """A method of the callback; once that has missed one of the chief's files, nothing is called any more."""

        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_dropped:
                return None
            try:
                with saving_with_chief(have_joined, self._left.append):
                    return hook(*args, **kwargs)
            except AutoDistError:
                raise
            except Exception as error:
                missing = next((path for path in self._left if not _is_here(path)), None)
                if missing is None:
                    raise
                self._is_dropped = True
                log.warning(
                    "%s ended with %s: %s. The chief has written %s, which this worker does not see, so %s acts on the "
                    "chief alone from here on. Save where all machines see it, or on the chief (ad.is_chief).",
                    self._name, type(error).__name__, error, missing, self._name,
                )  # fmt: skip
                return None

        return call


def _is_here(path: str) -> bool:
    return os.path.exists(path) or os.path.exists(f"{path}.index")  # a checkpoint is named by the prefix of its files


@contextmanager
def _writing_no_backups() -> Iterator[None]:
    """Lets `BackupAndRestore`, which every worker calls, leave its files to the chief.

    The methods of Keras's class are replaced, not the callbacks, so that a script's own subclasses behave alike.
    """
    rows = BACKUPS + (LEGACY_BACKUPS if legacy_keras() is not None else [])
    with patched(dict.fromkeys(rows, _nothing)):  # the chief's values come with the next step
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in place of a function that writes files."""


def leave_to_chief(given: Iterable[Any], model: Any) -> list[Any]:
    """The callbacks that this worker calls; those that act on the chief alone know the model, and no more."""
    called, base = [], callbacks_of(model).Callback
    for callback in given:
        if not acts_on_chief_alone(callback):
            called.append(callback)
        elif isinstance(callback, base):
            base.set_model(callback, model)
    return called


# -- what recorders keep in mind -------------------------------------------------------------------------------------


def numbers_of(given: Iterable[Any]) -> str:
    """The numbers that callbacks keep which act on the chief alone (the best loss so far), as JSON."""
    return json.dumps({key: _numbers(callback) for key, callback in _keyed(given)})


def set_numbers(given: Iterable[Any], told: str) -> None:
    """Gives such callbacks the chief's numbers, which a script may look at when `fit` has returned."""
    found = json.loads(told)
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
    """While it is open, the methods that Keras calls on a callback, and that it defines, are wrapped ones."""
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
