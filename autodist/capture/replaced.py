"""What of TensorFlow and Keras is replaced by something of ours, for as long as that is open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While it is open, an attribute of a class or module has another value."""
    plain = vars(owner).get(name, getattr(owner, name))  # a method of a class as it stands there, unbound
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, plain)


@contextmanager
def all_replaced(replacements: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """The same for several attributes, each given by its owner, its name and the other value."""
    with ExitStack() as opened:
        for owner, name, value in replacements:
            opened.enter_context(replaced(owner, name, value))
        yield


def definer_of(kind: type[Any], name: str) -> Any:
    """The class from which `kind` has an attribute; replaced there, it is another one for all that inherit it."""
    return next(base for base in kind.__mro__ if name in vars(base))
