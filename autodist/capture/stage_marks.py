"""`with ad.stage(k)`: notes of which pipeline stage the script makes variables, operations and Keras layers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import tensorflow as tf

from autodist.capture.patches import LAYER_INIT, SYMBOLIC_CALLS, patched
from autodist.graph.stage_marks import STAGE_MARK


class _Open(threading.local):
    """The stages that are open in a thread, the innermost last: by the script's `with`, and around calls of layers."""

    def __init__(self) -> None:
        self.by_script: list[int] = []
        self.by_layers: list[int] = []


_open = _Open()


class StageMark:
    """What is made while it is open belongs to a pipeline stage.

    A variable that is made here does. So does an operation on examples: as it is built, or, of a Keras layer that is
    made here or called on symbolic inputs, whenever the layer is called. The stage that is opened last counts; of
    layers within each other the inner one's.

    Args:
        stage: counted from 0.

    Raises:
        ValueError: it is no number of a stage.
    """

    def __init__(self, stage: int) -> None:
        if type(stage) is not int or stage < 0:  # nor a truth value, which is an int, too
            raise ValueError(f"ad.stage({stage!r}): give the number of a pipeline stage, counted from 0.")
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
    """The pipeline stage in which the script has made a variable; None: in none."""
    noted = getattr(variable, STAGE_MARK, None)
    return noted if isinstance(noted, int) else None


@contextmanager
def _marking(stage: int) -> Iterator[None]:
    """Marks the variables and operations that are made."""

    def make(next_creator: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        variable = next_creator(**options)  # which an outer stage notes first
        setattr(variable, STAGE_MARK, stage)
        return variable

    here: Any = tf.compat.v1.get_default_graph()
    with tf.init_scope():  # where variables are made that stand outside of the function that is traced
        outside: Any = tf.compat.v1.get_default_graph()
    with ExitStack() as opened:
        for graph in dict.fromkeys((here, outside)):
            opened.enter_context(graph._variable_creator_scope(make))
        if not tf.executing_eagerly():
            opened.enter_context(here._attr_scope({STAGE_MARK: tf.compat.v1.AttrValue(i=stage)}))
        yield


# -- layers of Keras -----------------------------------------------------------------------------------------------


class _LayerStages:
    """The stages in which a layer was made and in which it was called on symbolic inputs."""

    def __init__(self) -> None:
        self.made: int | None = None
        self.called: set[int] = set()

    @property
    def computing(self) -> int | None:
        """The stage of its operations; None where it is called in several: each call is as late as its inputs are."""
        if len(self.called) > 1:
            return None
        return next(iter(self.called), self.made)


_NOTED = "_autodist_stages"


@contextmanager
def _noting_layers(stage: int) -> Iterator[None]:
    """Notes the layers that are made, and the operations of Keras that are called on symbolic inputs."""

    def note_made(make: Any, self: Any, /, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        _stages_of(self).made = stage

    def note_called(plain: Any, self: Any, /, *args: Any, **options: Any) -> Any:
        _stages_of(self).called.add(stage)
        return plain(self, *args, **options)

    with patched({LAYER_INIT: note_made, **dict.fromkeys(SYMBOLIC_CALLS, note_called)}):
        yield


def _stages_of(operation: Any) -> _LayerStages:
    """What is noted of a layer or another operation of Keras, which opens its stage from now on."""
    own = vars(operation)
    if _NOTED not in own:
        noted = own[_NOTED] = _LayerStages()
        own["call"] = _within(operation.call, lambda: noted.computing)
        if hasattr(operation, "build"):
            own["build"] = _within(operation.build, lambda: noted.made)
    stages: _LayerStages = own[_NOTED]
    return stages


def _within(method: Callable[..., Any], stage_of: Callable[[], int | None]) -> Callable[..., Any]:
    """A method of a layer that opens the layer's stage, where the script has opened none around its call."""

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        stage = stage_of()
        if stage is None or _open.by_script:
            return method(*args, **options)
        with _marking(stage):
            return method(*args, **options)

    return call
