"""Notes on the variables of Keras: their paths and layouts, and the distributions under which they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

# Not from `keras`, which is not complete yet when this module is imported.
from keras.src.distribution.distribution_lib import DataParallel, distribution

from autodist.errors import StrategyError
from autodist.tf_compat.keras_versions import layout_of

_NOTE = "_autodist_keras_variable"
"""Attribute of a `tf.Variable` of Keras: its path, its layout, and the distribution under which it was made."""


class KerasVariable(NamedTuple):
    """A variable of Keras, as keys and layouts of a script refer to it.

    Attributes:
        path: its path, which TensorFlow's name may differ from.
        shape: its shape.
        layout: its own `TensorLayout`; None: it has none.
    """

    path: str
    shape: tuple[int, ...]
    layout: Any = None

    @classmethod
    def of(cls, variable: Any) -> KerasVariable:
        """Returns the description of a `keras.Variable`."""
        return cls(variable.path, tuple(variable.shape.as_list()), layout_of(variable))


REMOVE = (
    "Remove it (keras.distribution.set_distribution(None), no `with distribution.scope():`, no `strategy=`), or use "
    "keras.distribution.DataParallel()"
)


def make_variable(plain: Callable[..., None], variable: Any, value: Any) -> None:
    """Wraps the method by which a Keras variable makes its `tf.Variable`."""
    plain(variable, value)
    current = distribution()
    shards = current is not None and type(current) is not DataParallel
    setattr(variable._value, _NOTE, (variable.path, layout_of(variable), current if shards else None))


def keras_variable(variable: Any) -> KerasVariable | None:
    """Returns the description of the Keras variable that a `tf.Variable` belongs to; None: it belongs to none."""
    path, layout, _ = getattr(variable, _NOTE, (None, None, None))
    return None if path is None else KerasVariable(path, tuple(variable.shape.as_list()), layout)


def made_under(variable: Any) -> Any:
    """Returns the distribution, other than `DataParallel`, under which a `tf.Variable` of Keras was made, if any."""
    return getattr(variable, _NOTE, (None, None, None))[2]


def require_no_layout(variables: Iterable[Any]) -> None:
    """Checks the variables of a step without a distribution.

    Args:
        variables: `tf.Variable`s.

    Raises:
        StrategyError: one is made with a layout of its own.
    """
    for path, layout, _ in (getattr(variable, _NOTE, (None, None, None)) for variable in variables):
        if _divides(layout):
            raise StrategyError(
                f"The variable {path} is made with a layout, keras.Variable(…, layout=…), without a distribution whose "
                "mesh it belongs to. Set a keras.distribution.ModelParallel before it is made, or remove the layout."
            )


def _divides(layout: Any) -> bool:
    return layout is not None and any(axis is not None for axis in getattr(layout, "axes", ["unknown"]))
