"""Callbacks for the import of a module that a script may or may not import later."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


@contextmanager
def when_imported(name: str, act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` at once if a module has been imported, or else when it is imported while the context is open."""
    cancel = once_imported(name, act)
    try:
        yield
    finally:
        cancel()


def once_imported(name: str, act: Callable[[], None]) -> Callable[[], None]:
    """Calls `act` at once if a module has been imported, or else when it is imported; returns a function that cancels.

    The callback runs at the end of the module's own code. Packages that import the module may not be complete then.
    """
    if name in sys.modules:
        act()
        return lambda: None
    finder = _Finder(name, act)
    sys.meta_path.insert(0, finder)
    return finder.leave


class _Finder(MetaPathFinder):
    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name, self._act = name, act

    def leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        self.leave()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._act)
        return spec


class _Loader(Loader):
    """Loads a module with its own loader, and then runs the callback."""

    def __init__(self, loader: Any, act: Callable[[], None]) -> None:
        self._loader, self._act = loader, act

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        module.__spec__.loader = module.__loader__ = self._loader
        self._act()
