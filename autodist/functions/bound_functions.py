"""Decorated methods: one function per instance, which lives as long as the instance."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class BoundFunction(Generic[F]):
    """The bound form of a decorated method. It keeps the instance alive, as a bound method does."""

    def __init__(self, function: F, instance: object) -> None:
        functools.update_wrapper(self, function, updated=())
        self.function, self.__self__ = function, instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class BoundFunctions(Generic[F]):
    """Creates one function per instance from a decorated method.

    Args:
        make: makes a function of the method bound to one instance.
    """

    def __init__(self, make: Callable[[Callable[..., Any]], F]) -> None:
        self._make = make
        self._by_id: dict[int, tuple[object, F]] = {}

    def of(self, method: Any, instance: object, owner: type | None) -> BoundFunction[F]:
        """Returns the function of an instance; equal instances have separate functions."""
        key = id(instance)
        if key not in self._by_id:
            bound = method.__get__(instance, owner)
            try:
                reference: object = weakref.ref(instance, lambda _: self._by_id.pop(key, None))
            except TypeError:  # for example a class with slots: kept alive, so that its id is not reused
                reference = instance
            self._by_id[key] = (reference, self._make(_weakly(bound, method)))
        return BoundFunction(self._by_id[key][1], instance)


def _weakly(bound: Any, method: Any) -> Callable[..., Any]:
    """Returns a bound method that does not keep its instance alive; returns other callables unchanged."""
    try:
        weak: Callable[[], Any] = weakref.WeakMethod(bound)
    except TypeError:
        return bound

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return weak()(*args, **kwargs)

    call.__signature__ = inspect.signature(bound)  # type: ignore[attr-defined]
    return call
