"""Training that a process does by itself: gradients of variables, applied, outside of all that is distributed."""

from __future__ import annotations

import contextlib
import functools
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.client.session import BaseSession  # of which every session of the script is one
from tensorflow.python.ops import gradients_util  # the one function that all graph-mode entry points call

from autodist.capture.replaced import definer_of
from autodist.capture.session_training import trains

_SUSPECTS = 4
"""Variables, the smallest of each, by whose values it is known whether gradients were applied."""

_LOOKS = 50
"""Times that the suspects' values are compared while the script runs; they are once more at its end."""

_is_distributing: ContextVar[bool] = ContextVar("is_distributing", default=False)

_NOT_THE_SCRIPT = (
    *(str(Path(module.__file__).parent) for module in (tf, keras, sys.modules["autodist"]) if module.__file__),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    "<",
)
"""How the names of files begin that hold no line of the script."""


class Way(Enum):
    """By what a script trains by itself."""

    FIT = "fit"
    FUNCTION = "function"
    EAGER = "eager"
    SESSION = "session"


@dataclass(frozen=True)
class LocalStep:
    """A training step that is not distributed.

    Attributes:
        way: in what it is run.
        line: of the script, where it was made or run; empty where that is not known.
        graph: of a session's step.
    """

    way: Way
    line: str
    graph: tf.Graph | None = None


@dataclass(frozen=True)
class _Suspect:
    """A variable of which a gradient was made, and its value by then; None: it had none yet.

    Small ones are kept alive: what trains a model in a function leaves no other trace of it.
    """

    variable: Callable[[], Any]
    value: np.ndarray | None

    @property
    def has_changed(self) -> bool:
        variable = self.variable()
        now = None if variable is None else _value_of(variable)
        return self.value is None or now is None or not np.array_equal(self.value, now)


class LocalTraining:
    """Looks for training that is not distributed, until `stop` is called.

    It is seen where an optimizer of Keras applies gradients, where a session runs what applies them, and where
    variables of which `tf.GradientTape` or `tf.gradients` made gradients have other values later. Gradients by inputs,
    and gradients that are looked at alone, are none.

    Args:
        on_step: called with what is seen, once for all; what it raises is raised in the script.
    """

    def __init__(self, on_step: Callable[[LocalStep], None]) -> None:
        self._on_step = on_step
        self._graphs: weakref.WeakKeyDictionary[tf.Graph, list[str]] = weakref.WeakKeyDictionary()
        self._suspects: list[_Suspect] = []
        self._suspected: LocalStep | None = None
        self._looks = 0
        self.found: LocalStep | None = None
        _watching.append(self)
        _hook_in()

    def stop(self) -> None:
        """Ends the search. May be called twice."""
        if self in _watching:
            _watching.remove(self)
        self._suspects.clear()
        put_back()

    def look_again(self) -> LocalStep | None:
        """What was found, looked for once more."""
        if self.found is None and self._suspected and any(s.has_changed for s in self._suspects):
            self._find(self._suspected)
        return self.found

    # -- what is seen ----------------------------------------------------------------------------------------------

    def on_applied(self) -> None:
        """An optimizer applies gradients."""
        graph = tf.compat.v1.get_default_graph()
        if tf.executing_eagerly() or isinstance(graph, tf.__internal__.FuncGraph):  # else a session is to run them
            self._find(_step_here())

    def on_gradients(self, sources: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Gradients of variables were made."""
        graph = tf.compat.v1.get_default_graph()
        if not tf.executing_eagerly() and not isinstance(graph, tf.__internal__.FuncGraph):
            made = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
            self._graphs.setdefault(graph, []).extend(g.op.name for g in made if isinstance(g, tf.Tensor))
        elif self._looks < _LOOKS:
            self._looks += 1
            if self.look_again() is None and len(self._suspects) < 4 * _SUSPECTS:
                self._suspected = self._suspected or _step_here()
                self._suspects += _suspects_of(sources)

    def on_run(self, session: BaseSession, fetches: Any) -> None:
        """A session runs something."""
        made = self._graphs.get(session.graph)
        if made and trains(session.graph, fetches, made):
            self._find(LocalStep(Way.SESSION, _line_of_script(), session.graph))

    def _find(self, step: LocalStep) -> None:
        self._on_step(step)  # first: what it raises is raised again where the script tries again
        self.found = step
        self.stop()


@contextlib.contextmanager
def distributing() -> Iterator[None]:
    """Around the capture of a step that is distributed: what is differentiated and applied in it is not local."""
    token = _is_distributing.set(True)
    try:
        yield
    finally:
        _is_distributing.reset(token)


def is_distributing() -> bool:
    """Whether a step that is distributed is being captured."""
    return _is_distributing.get()


# -- the step and its line -------------------------------------------------------------------------------------------


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _line_of_script() -> str:
    """The innermost line that is the script's own, as `train.py:12`."""
    for frame in _frames():
        file = frame.f_code.co_filename
        name = file.rpartition("/")[2]
        if not file.startswith(_NOT_THE_SCRIPT) and not name.startswith("__autograph_generated_file"):
            return f"{name}:{frame.f_lineno}"
    return ""


def _step_here() -> LocalStep:
    trainer = sys.modules[_trainer().__module__].__file__
    if any(f.f_code.co_filename == trainer and f.f_code.co_name in ("fit", "train_on_batch") for f in _frames()):
        return LocalStep(Way.FIT, _line_of_script())
    return LocalStep(Way.EAGER if tf.executing_eagerly() else Way.FUNCTION, _line_of_script())


def _trainer() -> Any:
    return next(base for base in keras.Model.__mro__ if "train_on_batch" in vars(base))


# -- suspects --------------------------------------------------------------------------------------------------------


def _suspects_of(sources: Sequence[Any]) -> list[_Suspect]:
    variables = sorted({id(s): s for s in sources if _size(s) is not None}.values(), key=lambda v: _size(v) or 0)
    return [_Suspect(_kept(v), _value_of(v)) for v in variables[:_SUSPECTS]]


def _size(source: Any) -> int | None:
    """Elements of a variable whose shape is known; None of all else."""
    if not isinstance(source, tf.Variable | keras.Variable) or source.shape is None:
        return None
    return int(np.prod([n or 0 for n in tf.TensorShape(source.shape).as_list()], dtype=np.int64))


def _kept(variable: Any) -> Callable[[], Any]:
    return (lambda: variable) if (_size(variable) or 0) < 1 << 14 else weakref.ref(variable)


def _value_of(variable: Any) -> np.ndarray | None:
    """A variable's value, or two sums of a large one's; None if it has none yet."""
    plain = variable.value if isinstance(variable, keras.Variable) else variable
    with tf.init_scope():
        handle = getattr(plain, "handle", None)
        if not isinstance(handle, tf.Tensor) or not tf.executing_eagerly() or not hasattr(handle, "numpy"):
            return None
        if not tf.raw_ops.VarIsInitializedOp(resource=handle):
            return None
        value = tf.raw_ops.ReadVariableOp(resource=handle, dtype=plain.dtype.base_dtype)
        if (_size(variable) or 0) >= 1 << 14:
            value = tf.cast(value, tf.float64)
            value = tf.stack([tf.reduce_sum(value), tf.reduce_sum(value * value)])
        return np.asarray(value)


# -- hooks -----------------------------------------------------------------------------------------------------------

_watching: list[LocalTraining] = []
_hooks: list[tuple[Any, str, Any, Any]] = []
"""What was put in place of what, while somebody watches: owner, name, the plain function, ours."""


def _tell(tell: Callable[[LocalTraining], None]) -> None:
    if not _is_distributing.get():
        for one in list(_watching):
            tell(one)


def _hook_in() -> None:
    if _hooks:
        return
    optimizer = definer_of(keras.optimizers.Optimizer, "apply")
    _hook(optimizer, "apply", _with_application)
    _hook(tf.GradientTape, "gradient", _with_tape)
    _hook(gradients_util, "_GradientsHelper", _with_graph_gradients)
    _hook(BaseSession, "run", _with_run)
    _hook(BaseSession, "make_callable", _with_run)


def _hook(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    plain = vars(owner)[name]
    ours = make(plain)
    setattr(owner, name, ours)
    _hooks.append((owner, name, plain, ours))


def put_back() -> None:
    """Leaves TensorFlow as it was where nobody looks any more.

    Within a scope, which has put something in place of ours, ours rests; the scope's end calls this again.
    """
    if not _watching and all(vars(owner)[name] is ours for owner, name, _, ours in _hooks):
        for owner, name, plain, _ in _hooks:
            setattr(owner, name, plain)
        _hooks.clear()


def _with_application(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def apply(*args: Any, **kwargs: Any) -> Any:
        if _watching:
            _tell(LocalTraining.on_applied)
        return plain(*args, **kwargs)

    return apply


def _with_tape(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def gradient(self: tf.GradientTape, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, target, sources, *args, **kwargs)
        _note(sources, found)
        return found

    return gradient


def _with_graph_gradients(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def helper(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        found = plain(ys, xs, *args, **kwargs)
        _note(xs, found)
        return found

    return helper


def _note(sources: Any, gradients: Any) -> None:
    if _watching:
        flat = tf.nest.flatten(sources)
        if any(_is_variable(source) for source in flat):
            made = tf.nest.flatten(gradients)
            _tell(lambda one: one.on_gradients(flat, made))


def _is_variable(source: Any) -> bool:
    return isinstance(source, tf.Variable | keras.Variable) or getattr(source, "dtype", None) == tf.resource


def _with_run(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def run(self: BaseSession, fetches: Any, *args: Any, **kwargs: Any) -> Any:
        if _watching:
            _tell(lambda one: one.on_run(self, fetches))
        return plain(self, fetches, *args, **kwargs)

    return run
