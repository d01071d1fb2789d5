"""`fit` on several workers: all take the same decisions, and only the chief shows progress and records."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import tree

from autodist.capture.keras.call_arguments import (
    argument,
    arguments_of,
    comparable_arguments,
    require_same_arguments,
    set_argument,
    takes,
    with_bound_arguments,
)
from autodist.capture.keras.callbacks import (
    acting_alone,
    following,
    leave_to_chief,
    names_of_recorders,
    numbers_of,
    set_numbers,
)
from autodist.capture.keras.libraries import callbacks_of, is_legacy, legacy_keras

log = logging.getLogger("autodist")

SHOW_PROGRESS = ("fit", "evaluate", "predict")
"""Methods of a model that show a progress bar and take callbacks."""

Share = Callable[[str, str], str]
"""Returns the chief's text on every worker; a collective call, whose name is the second argument."""


@dataclass(frozen=True, eq=False)
class _Call:
    """A call in progress of a method of `SHOW_PROGRESS`."""

    model: Any
    name: str
    is_validation: bool


class Fits:
    """Fits models on one worker of several.

    Every worker takes the logs, the decisions to stop and the first epoch from the chief: validation that every worker
    computes alone may differ in its last bits, and clocks and files differ altogether. When `fit` returns, the steps of
    all workers are complete and the chief's callbacks have written their files.

    Args:
        is_chief: True if this worker is the chief.
        share: returns the chief's text on every worker.
        flush_together: returns once all writes by the steps of all workers are applied; a collective call.
        on_reset: called with a model whose metrics Keras has reset on every worker.
        is_global: True if every worker passes the same data to `fit`, and none reads files of its own.
        have_joined: returns True if the workers can agree on the one that writes a file.
        refusing: context around each call, in which this worker may reject the call before its first step.
    """

    def __init__(
        self,
        is_chief: bool,
        share: Share,
        flush_together: Callable[[], None],
        on_reset: Callable[[Any], None] = lambda model: None,
        is_global: bool = True,
        have_joined: Callable[[], bool] = lambda: True,
        refusing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._is_chief, self._share, self._flush_together = is_chief, share, flush_together
        self._on_reset = on_reset
        self._is_global, self._have_joined, self._refusing = is_global, have_joined, refusing
        self._calls: list[_Call] = []
        self._has_logged = False

    def validates(self, model: keras.Model) -> bool:
        """Returns True if a model is being validated by its own `fit`."""
        return any(call.model is model and call.is_validation for call in self._calls)

    def wrapped(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a bound method of `SHOW_PROGRESS` for this worker."""
        model, name = method.__self__, method.__name__  # type: ignore[attr-defined]

        def call(bound: inspect.BoundArguments) -> Any:
            is_nested = any(one.model is model and one.name == name for one in self._calls)
            if is_nested or not (takes(bound.signature, "verbose") and takes(bound.signature, "callbacks")):
                return method(*bound.args, **bound.kwargs)
            given = callbacks_in(argument(bound, "callbacks"))
            called = given if self._is_chief else self._leave_to_chief(given, model)
            if name == "fit":
                self._agree(bound)
                set_argument(
                    bound, "callbacks", self._with_own_callbacks(model, argument(bound, "callbacks"), called, given)
                )
            elif len(called) < len(given):
                set_argument(bound, "callbacks", _without(argument(bound, "callbacks"), given, called))
            if not self._is_chief:
                set_argument(bound, "verbose", 0)
            refusing = self._refusing() if name == "fit" else nullcontext()
            is_validation = bool(argument(bound, "_use_cached_eval_dataset"))  # which only `fit` passes
            with refusing, self._in_call(_Call(model, name, is_validation)), self._acting(given):
                return method(*bound.args, **bound.kwargs)

        return with_bound_arguments(method, call)

    def _agree(self, bound: inspect.BoundArguments) -> None:
        """Compares a call of `fit` with the chief's, and takes the chief's first epoch.

        Raises:
            ClusterError: an argument differs.
        """
        own = comparable_arguments(arguments_of(bound), self._is_global)
        first = argument(bound, "initial_epoch")
        chiefs, first = json.loads(self._share(json.dumps([own, None if first is None else int(first)]), "fit"))
        require_same_arguments(chiefs, own)
        if first is not None or argument(bound, "initial_epoch") is not None:
            set_argument(bound, "initial_epoch", first or 0)

    @contextmanager
    def _in_call(self, call: _Call) -> Iterator[None]:
        self._calls.append(call)
        try:
            yield
        finally:
            self._calls.remove(call)

    def _acting(self, given: Sequence[keras.callbacks.Callback]) -> AbstractContextManager[None]:
        """Makes only the chief record, and logs that once."""
        if not self._is_chief:
            return following(given, self._have_joined)
        recorders = names_of_recorders(given)
        if recorders and not self._has_logged:
            self._has_logged = True
            log.info(
                "%s: on the chief alone, since one record is enough; ad.on_every_worker(callback) makes a "
                "callback record on each worker.", ", ".join(recorders),
            )  # fmt: skip
        return acting_alone(given)

    def _leave_to_chief(self, given: Sequence[keras.callbacks.Callback], model: Any) -> list[keras.callbacks.Callback]:
        """Returns the callbacks that a worker other than the chief calls."""
        progress = callbacks_of(model).ProgbarLogger
        return [c for c in leave_to_chief(given, model) if not isinstance(c, progress)]

    def _with_own_callbacks(
        self,
        model: Any,
        passed: Any,
        called: Sequence[keras.callbacks.Callback],
        given: Sequence[keras.callbacks.Callback],
    ) -> Any:
        logs, decisions, library = _ChiefsLogs, _ChiefsDecisions, callbacks_of(model)
        if is_legacy(model):
            logs, decisions = _of_legacy(_Logs), _of_legacy(_LegacyDecisions)
        first = logs(self._share, self._is_chief, self._flush_together, self._on_reset)
        last = decisions(self._share, self._is_chief, given)
        ours: list[keras.callbacks.Callback] = [first, *called, last]
        if not isinstance(passed, library.CallbackList):
            return ours
        for one in (first, last):
            one.set_model(passed.model)
            one.set_params(passed.params)
        passed.callbacks[:] = ours  # Keras takes such a list as it is, and `fit` passes it to `evaluate`
        return passed


class _Logs:
    """First callback: sets the chief's logs at the end of an epoch for all other callbacks.

    At the start of an epoch, Keras has just reset the metrics on every worker. At the end of training, the steps of all
    workers are complete before the other callbacks run.
    """

    model: Any

    def __init__(
        self, share: Share, is_chief: bool, flush_together: Callable[[], None], on_reset: Callable[[Any], None]
    ) -> None:
        super().__init__()
        self._share, self._is_chief, self._flush_together, self._on_reset = share, is_chief, flush_together, on_reset

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._on_reset(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        own = json.dumps({name: _plain(value) for name, value in (logs or {}).items()})
        chiefs_text = self._share(own, "the end of an epoch")
        if not self._is_chief and logs is not None:
            logs.update(
                {name: _as_logged(value) for name, value in json.loads(chiefs_text).items() if value is not None}
            )

    def on_train_end(self, logs: Any = None) -> None:
        self._flush_together()


class _Decisions:
    """Last callback: training starts and stops on every worker as on the chief."""

    model: Any

    def __init__(self, share: Share, is_chief: bool, given: Sequence[keras.callbacks.Callback]) -> None:
        super().__init__()
        self._share, self._is_chief, self._given = share, is_chief, given

    def _begin(self, initial_epoch: Any, is_restored: bool) -> Any:
        """Returns the chief's start of the training; values that the chief has restored go to all workers."""
        own = json.dumps({"initial_epoch": initial_epoch, "is_restored": is_restored})
        start = json.loads(self._share(own, "the start of the training in fit"))
        if start["is_restored"]:  # by the chief alone: an assignment on every worker sends its values to the others
            optimizer = getattr(self.model.optimizer, "variables", ())
            for variable in (*self.model.variables, *(optimizer() if callable(optimizer) else optimizer)):
                variable.assign(variable)
        return start["initial_epoch"]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        own = json.dumps(bool(self.model.stop_training))
        self.model.stop_training = json.loads(self._share(own, "the decision to stop after an epoch"))

    def on_train_end(self, logs: Any = None) -> None:
        chiefs_text = self._share(numbers_of(self._given), "the end of fit")
        if not self._is_chief:
            set_numbers(self._given, chiefs_text)


class _ChiefsLogs(_Logs, keras.callbacks.Callback):
    """A callback of Keras 3."""


class _ChiefsDecisions(_Decisions, keras.callbacks.Callback):
    """A callback of Keras 3."""

    def on_train_begin(self, logs: Any = None) -> None:
        backups = [c for c in self._given if isinstance(c, keras.callbacks.BackupAndRestore)]
        is_restored = any(os.path.exists(backup._weights_path) for backup in backups)
        self.model._initial_epoch = self._begin(self.model._initial_epoch, is_restored)


class _LegacyDecisions(_Decisions):
    """A callback of tf_keras, whose models read their first epoch and batch after training has started."""

    def on_train_begin(self, logs: Any = None) -> None:
        model = self.model

        def initial_counters(*args: Any) -> Any:
            state = model._training_state
            plain = type(model)._maybe_load_initial_counters_from_ckpt(model, *args)
            is_restored = self._is_chief and state is not None and int(state._ckpt_saved_epoch.numpy()) >= 0
            return tuple(self._begin([int(n) for n in plain], is_restored))

        vars(model)["_maybe_load_initial_counters_from_ckpt"] = initial_counters

    def on_train_end(self, logs: Any = None) -> None:
        vars(self.model).pop("_maybe_load_initial_counters_from_ckpt", None)
        super().on_train_end(logs)


@functools.cache
def _of_legacy(kind: type[Any]) -> Any:
    """Returns a class of callbacks of tf_keras."""
    return type(kind.__name__, (kind, legacy_keras().callbacks.Callback), {})  # type: ignore[union-attr]


def callbacks_in(passed: Any) -> list[keras.callbacks.Callback]:
    """Returns the script's own callbacks, from a list or from Keras's CallbackList."""
    flat = getattr(passed, "callbacks", None)
    return [c for c in (tree.flatten(passed) if flat is None else flat) if c is not None and not isinstance(c, _OURS)]


_OURS = (_Logs, _Decisions)


def _without(passed: Any, given: Sequence[Any], called: list[Any]) -> Any:
    """Returns the callbacks argument of `evaluate` or `predict` without those that this worker does not call."""
    if getattr(passed, "callbacks", None) is None:
        return called
    left_out = {id(c) for c in given} - {id(c) for c in called}
    passed.callbacks[:] = [
        c for c in passed.callbacks if id(c) not in left_out
    ]  # AutoDist's own stay in that of a `fit`
    return passed


def _plain(value: Any) -> Any:
    """Returns a log as an exact JSON value; None if it is no number."""
    array = np.asarray(value)
    return array.tolist() if array.dtype.kind in "fiub" else None


def _as_logged(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, list) else value
