"""Methods under a decorator: for each instance a function of its own, as long as the instance lives."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class BoundFunction(Generic[F]):
    """What an instance has in place of the decorated method. It keeps the instance alive, as a bound method does.

    Args:
        function: the one that was made for this instance.
        instance: whose it is.
    """

    def __init__(self, function: F, instance: object) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function, self.__self__ = function, instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class BoundFunctions(Generic[F]):
    """For each instance a function of its own, made of the decorated method.

    Args:
        make: makes a function of the method as bound to one instance.
    """

    def __init__(self, make: Callable[[Callable[..., Any]], F]) -> None:
        self._make = make
        self._by_id: dict[int, tuple[object, F]] = {}

    def of(self, method: Any, instance: object, owner: type | None) -> BoundFunction[F]:
        """The function of an instance, told apart by identity: an equal instance has one of its own."""
        key = id(instance)
        if key not in self._by_id:
            bound = method.__get__(instance, owner)
            try:
                kept: object = weakref.ref(instance, lambda _: self._by_id.pop(key, None))
            except TypeError:  # of a class with slots, say: it is kept, so that no other gets its id
                kept = instance
            self._by_id[key] = (kept, self._make(_weakly(bound, method)))
        return BoundFunction(self._by_id[key][1], instance)


def _weakly(bound: Any, method: Any) -> Callable[..., Any]:
    """A bound method that does not keep its instance alive; another callable as it is."""
    try:
        weak: Callable[[], Any] = weakref.WeakMethod(bound)
    except TypeError:
        return bound

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return weak()(*args, **kwargs)

    call.__signature__ = inspect.signature(bound)  # type: ignore[attr-defined]
    return call
