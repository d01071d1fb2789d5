"""`with ad.stage(k)`: assigns variables, operations and Keras layers of the script to pipeline stages."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import tensorflow as tf

from autodist.graph.stage_marks import STAGE_MARK
from autodist.tf_compat.patches import LAYER_INIT, SYMBOLIC_CALLS, patched


class _Open(threading.local):
    """The stages that the script has opened in a thread, innermost last."""

    def __init__(self) -> None:
        self.by_script: list[int] = []


_open = _Open()


class StageMark:
    """Assigns variables and operations that are created in its context to a pipeline stage.

    An operation on examples belongs to the stage in which it is created. Those of a Keras layer that is created here,
    or called on symbolic inputs here, belong to the stage at each call. The innermost stage applies,
    also for nested layers.

    Args:
        stage: index of the stage, counted from 0.

    Raises:
        ValueError: `stage` is no index of a stage.
    """

    def __init__(self, stage: int) -> None:
        if type(stage) is not int or stage < 0:  # excludes bool, a subclass of int
            raise ValueError(f"ad.stage({stage!r}): pass the number of a pipeline stage, counted from 0.")
        self._stage = stage
        self._opened: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as opened:
            _open.by_script.append(self._stage)
            opened.callback(_open.by_script.pop)
            opened.enter_context(_marking(self._stage))
            opened.enter_context(_noting_layers(self._stage))
            self._opened.append(opened.pop_all())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.pop().close()


def stage_of_variable(variable: object) -> int | None:
    """Returns the pipeline stage of a variable, or None."""
    noted = getattr(variable, STAGE_MARK, None)
    return noted if isinstance(noted, int) else None


@contextmanager
def _marking(stage: int) -> Iterator[None]:
    """Marks variables and operations that are created while the context is open."""

    def make(next_creator: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        variable = next_creator(**options)  # an outer stage marks it first
        setattr(variable, STAGE_MARK, stage)
        return variable

    here: Any = tf.compat.v1.get_default_graph()
    with tf.init_scope():  # the graph of variables outside of the traced function
        outside: Any = tf.compat.v1.get_default_graph()
    with ExitStack() as opened:
        for graph in dict.fromkeys((here, outside)):
            opened.enter_context(graph._variable_creator_scope(make))
        if not tf.executing_eagerly():
            opened.enter_context(here._attr_scope({STAGE_MARK: tf.compat.v1.AttrValue(i=stage)}))
        yield


# -- layers of Keras -----------------------------------------------------------------------------------------------


class _LayerStages:
    """The stages in which a layer was created, and in which it was called on symbolic inputs."""

    def __init__(self) -> None:
        self.made: int | None = None
        self.called: set[int] = set()

    @property
    def computing(self) -> int | None:
        """Stage of the layer's operations; None for several: each call then belongs to the last stage of its inputs."""
        if len(self.called) > 1:
            return None
        return next(iter(self.called), self.made)


_NOTED = "_autodist_stages"


@contextmanager
def _noting_layers(stage: int) -> Iterator[None]:
    """Records layers that are created, and Keras operations called on symbolic inputs, while the context is open."""

    def note_made(make: Any, self: Any, /, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        _stages_of(self).made = stage

    def note_called(plain: Any, self: Any, /, *args: Any, **options: Any) -> Any:
        _stages_of(self).called.add(stage)
        return plain(self, *args, **options)

    calls = [row for row in SYMBOLIC_CALLS if row.exists]
    with patched({LAYER_INIT: note_made, **dict.fromkeys(calls, note_called)}):
        yield


def _stages_of(operation: Any) -> _LayerStages:
    """Returns the recorded stages of a layer or other Keras operation, and makes it open its stage from now on."""
    own = vars(operation)
    if _NOTED not in own:
        noted = own[_NOTED] = _LayerStages()
        own["call"] = _within(operation.call, lambda: noted.computing)
        if hasattr(operation, "build"):
            own["build"] = _within(operation.build, lambda: noted.made)
    stages: _LayerStages = own[_NOTED]
    return stages


def _within(method: Callable[..., Any], stage_of: Callable[[], int | None]) -> Callable[..., Any]:
    """Wraps a method of a layer to open the layer's stage, unless the script has opened one around the call."""

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        stage = stage_of()
        if stage is None or _open.by_script:
            return method(*args, **options)
        with _marking(stage):
            return method(*args, **options)

    return call
