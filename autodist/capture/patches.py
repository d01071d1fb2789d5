"""A table of patches: which method of which class is replaced, by what, and in which versions of its package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from autodist.versions import require_package


@dataclass(frozen=True)
class Patch:
    """A row of the table.

    Attributes:
        owner: the class or module that has the method; of a class that inherits it, the one that defines it is patched.
        method: its name.
        wrapper: returns what stands in the place of the method that it is given.
        versions: the package, and its lowest version in which the method means what the wrapper expects.
    """

    owner: Any
    method: str
    wrapper: Callable[[Any], Any]
    versions: tuple[str, str]

    def replacement(self) -> tuple[Any, str, Any]:
        """The owner, the name, and what stands there.

        Raises:
            UnsupportedVersionError: the package is older.
        """
        require_package(*self.versions)
        owner = definer_of(self.owner, self.method) if isinstance(self.owner, type) else self.owner
        return owner, self.method, self.wrapper(vars(owner)[self.method])


@contextmanager
def patched(table: Iterable[Patch]) -> Iterator[None]:
    """Replaces the methods of a table for as long as the context is open.

    Raises:
        UnsupportedVersionError: a package is older than a row asks for.
    """
    with all_replaced([row.replacement() for row in table]):
        yield


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
