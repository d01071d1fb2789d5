"""The two versions of Keras that a script may use, Keras 3 and Keras 2 (tf_keras), and the import of a module."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

import keras


def legacy_keras() -> Any | None:
    """Returns the module tf_keras if the script has imported it, else None."""
    module = sys.modules.get("tf_keras")
    return module if hasattr(module, "Model") else None


def uses_legacy_keras() -> bool:
    """Returns True if `tf.keras` is tf_keras and is not imported yet; its first use imports it."""
    return os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true") and legacy_keras() is None


def is_legacy(model: Any) -> bool:
    """Returns True for a model of tf_keras."""
    legacy = legacy_keras()
    return legacy is not None and isinstance(model, legacy.Model)


def callbacks_of(model: Any) -> Any:
    """Returns the callbacks module of a model's Keras."""
    legacy = legacy_keras()
    return legacy.callbacks if legacy is not None and is_legacy(model) else keras.callbacks


def steps_per_execution(model: Any) -> int:
    """Returns the number of steps in one call of a model's train function."""
    steps = model.steps_per_execution
    return steps if isinstance(steps, int) else 1 if steps is None else int(steps.numpy())


@contextmanager
def when_imported(name: str, act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` at once if a module has been imported, or else when it is imported while the context is open."""
    if name in sys.modules:
        act()
        yield
        return
    finder = _Finder(name, act)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.leave()


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
