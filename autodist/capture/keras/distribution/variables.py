"""Notes on Keras variables that are made under a distribution that shards them, or with a layout of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

# Not from `keras`, which is not complete yet when this module is imported.
from keras.src.distribution.distribution_lib import DataParallel, distribution

from autodist.errors import StrategyError

_NOTE = "_autodist_made_under"
"""Attribute of a `tf.Variable`: the path of the Keras variable, and the distribution that shards it, if any."""

REMOVE = (
    "Remove it (keras.distribution.set_distribution(None), no `with distribution.scope():`, no `strategy=`), or use "
    "keras.distribution.DataParallel()"
)


def make_variable(plain: Callable[..., None], variable: Any, value: Any) -> None:
    """Wraps the method by which a Keras variable makes its `tf.Variable`."""
    plain(variable, value)
    current = distribution()
    shards = current is not None and type(current) is not DataParallel
    if shards or _divides(variable._layout):
        setattr(variable._value, _NOTE, (variable.path, current if shards else None))


def made_under(variable: Any) -> Any:
    """Returns the distribution, other than `DataParallel`, under which a Keras variable was made; None: none."""
    _, distribution = getattr(variable._value, _NOTE, (None, None))
    return distribution


def require_unsharded(variables: Iterable[Any]) -> None:
    """Checks the variables of a captured step.

    Args:
        variables: `tf.Variable`s.

    Raises:
        StrategyError: one was made under a distribution that shards it, or with a layout of its own.
    """
    for path, sharded_by in filter(None, (getattr(variable, _NOTE, None) for variable in variables)):
        if sharded_by is None:
            raise StrategyError(
                f"The variable {path} is made with a layout, keras.Variable(…, layout=…), and AutoDist does not "
                "support layouts yet: every replica would hold all of it. Remove the layout."
            )
        raise StrategyError(
            f"The variable {path} was made while keras.distribution's {type(sharded_by).__name__} was set, and "
            f"AutoDist does not support it yet: every replica would hold and compute the whole model. {REMOVE}, "
            "before the model is built."
        )


def _divides(layout: Any) -> bool:
    return layout is not None and any(axis is not None for axis in getattr(layout, "axes", ["unknown"]))
