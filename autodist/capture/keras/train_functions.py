"""Converts the functions of `make_train_function` and the like, of a model or its class, to functions of one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from autodist.capture.keras.libraries import is_legacy
from autodist.errors import CaptureError
from autodist.tf_compat.do_not_convert import converting, ours
from autodist.tf_compat.patches import definer_of

_IS_MADE = "_autodist_makes_a_function"
"""Attribute of a model while its class makes a function of one batch for AutoDist."""


_SCRIPTS_OWN = "_autodist_scripts_own"
"""Attribute of AutoDist's maker on a model: the script's maker that it replaces, or None."""


def is_making(model: Any) -> bool:
    """Returns True while a model or its class makes a function for AutoDist."""
    return _IS_MADE in vars(model)


def set_maker(model: Any, name: str, make: Callable[..., Any]) -> None:
    """Sets AutoDist's `make_train_function`, or the like, on a model; keeps the script's own."""
    vars(make)[_SCRIPTS_OWN] = own_maker(model, name)
    vars(model)[f"make_{name}_function"] = make


def own_maker(model: Any, name: str) -> Callable[..., Any] | None:
    """Returns the `make_train_function`, or the like, that the script has set on the model; None if it has set none."""
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
    """Returns a step of one batch from the function of `make_train_function`, or the like.

    Args:
        model: a model of Keras 3 or of tf_keras.
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
    """Returns the function of `make_train_function`, or the like, with one step in a call."""
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
                model.train_tf_function = None  # TensorBoard would read its graph, which is traced only here


@contextmanager
def _for_one_batch(model: Any) -> Iterator[None]:
    """Makes the functions of a model run one step in a call while the context is open."""
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
        maker: name of the method that made the function.
    """

    def __init__(self, data: Any, maker: str) -> None:
        self._data, self._maker, self._is_taken = data, maker, False

    def __iter__(self) -> _OneBatch:
        return self

    def __next__(self) -> Any:
        if self._is_taken:
            raise CaptureError(
                f"the function that {self._maker} makes takes more than one batch in a call, and a distributed step "
                "takes one. Let it take one, and use compile(steps_per_execution=...) for several steps in "
                "a call; sum gradients of several batches in variables of the model."
            )
        self._is_taken = True
        return self._data

    get_next = __next__

    def get_next_as_optional(self) -> Any:
        raise CaptureError(
            f"the function that {self._maker} makes takes its batch by get_next_as_optional(), and a distributed step "
            "is traced with an existing batch. Take it by next(iterator)."
        )
