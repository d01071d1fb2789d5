"""The functions that a model or its class makes (`make_train_function` and its like), as functions of one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from autodist.capture.keras_libraries import is_legacy
from autodist.capture.patches import definer_of
from autodist.errors import CaptureError
from autodist.tf_compat.do_not_convert import converting, ours

_IS_MADE = "_autodist_makes_a_function"
"""A model has it while its class makes a function of one batch for us."""


_SCRIPTS_OWN = "_autodist_scripts_own"
"""Of a maker of ours: the one that the script had set on the model, in whose place it is; None: it had set none."""


def is_making(model: Any) -> bool:
    """Returns True while a model or its class makes a function for us."""
    return _IS_MADE in vars(model)


def set_maker(model: Any, name: str, make: Callable[..., Any]) -> None:
    """Sets a `make_train_function` of ours, or the like of another name, on a model; keeps the script's own."""
    vars(make)[_SCRIPTS_OWN] = own_maker(model, name)
    vars(model)[f"make_{name}_function"] = make


def own_maker(model: Any, name: str) -> Callable[..., Any] | None:
    """The `make_train_function`, or the like, that the script has set on a model itself; None: it has set none."""
    found = vars(model).get(f"make_{name}_function")
    own: Callable[..., Any] | None = getattr(found, _SCRIPTS_OWN, found)
    return own


def makes_its_own(model: Any, name: str) -> bool:
    """Returns True if the script overrides `make_train_function`, or the like, on a model or in its class."""
    if own_maker(model, name) is not None:
        return True
    definer = definer_of(type(model), f"make_{name}_function")
    return not definer.__module__.startswith(("keras.", "tf_keras."))


def one_batch_step(model: Any, name: str) -> Callable[[Any], Any]:
    """Returns a step of one batch: what a model or its class makes by `make_train_function`, or the like.

    Args:
        model: of Keras 3 or of tf_keras.
        name: "train", "test" or "predict".
    """
    of_iterator = plain_function(model, name)
    maker = f"{type(model).__name__}.make_{name}_function"

    @ours
    def step(data: Any) -> Any:
        with _for_one_batch(model):  # Keras 3 looks up the number of steps when the function is called
            return converting(of_iterator)(_OneBatch(data, maker))

    step.__name__ = f"{name}_step"
    return step


def plain_function(model: Any, name: str) -> Callable[[Any], Any]:
    """Returns a function that takes one batch of an iterator: what `make_train_function`, or the like, makes."""
    attribute = f"{name}_function"
    with _for_one_batch(model):
        setattr(model, attribute, None)
        try:
            own = own_maker(model, name)
            made = getattr(type(model), f"make_{attribute}")(model) if own is None else own()
            return getattr(model, attribute) if made is None else made
        finally:
            setattr(model, attribute, None)
            if is_legacy(model):
                model.train_tf_function = None  # TensorBoard would look for its graph, which is traced here alone


@contextmanager
def _for_one_batch(model: Any) -> Iterator[None]:
    """While it is open, what is made for a model makes one step in a call."""
    steps, one = ("_steps_per_execution", None) if is_legacy(model) else ("steps_per_execution", 1)
    several, vars(model)[steps] = vars(model)[steps], one
    vars(model)[_IS_MADE] = True
    try:
        yield
    finally:
        del vars(model)[_IS_MADE]
        vars(model)[steps] = several


class _OneBatch:
    """The iterator with which a function of an iterator is traced.

    Args:
        data: the batch.
        maker: what has made the function.
    """

    def __init__(self, data: Any, maker: str) -> None:
        self._data, self._maker, self._has_given = data, maker, False

    def __iter__(self) -> _OneBatch:
        return self

    def __next__(self) -> Any:
        if self._has_given:
            raise CaptureError(
                f"the function that {self._maker} makes takes more than one batch in a call, and a step that is "
                "distributed is of one. Let it take one, and say compile(steps_per_execution=...) for several steps in "
                "a call; gradients of several batches are added up in variables of the model."
            )
        self._has_given = True
        return self._data

    get_next = __next__

    def get_next_as_optional(self) -> Any:
        raise CaptureError(
            f"the function that {self._maker} makes takes its batch by get_next_as_optional(), and a step that is "
            "distributed is traced with a batch that is there. Take it by next(iterator)."
        )
