"""Hides AutoDist modules that a process has imported from the processes forked from it.

When a forked process imports one, the module is put in place, with all others that its import would have brought.
Registrations and setup for the importing process are neither kept nor run again.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import functools
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "autodist"
_ANEW = "autodist.api"
"""Reads the environment and watches the end of the script, so it is not kept. It imports all modules that a script
needs.
"""


class Kept:
    """Holds the package's modules, which `forget` removes from `sys.modules`, and finds them at their next import."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}
        self._imports: dict[str, list[str]] = {}

    def take(self) -> None:
        """Imports all modules of a script's `from autodist import AutoDist`, except that module itself."""
        with self._noting_imports():
            for module in _imports_of(_ANEW):
                importlib.import_module(module)
        self._modules = {name: module for name, module in sys.modules.items() if _is_ours(name)}
        for module in self._modules.values():
            for value in vars(module).values():
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
        sys.meta_path.insert(0, self)
        self.forget()

    def forget(self) -> None:
        """Resets this process as if it had imported none of them."""
        for name in [name for name in sys.modules if _is_ours(name)]:
            del sys.modules[name]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Called by `import`, before other finders."""
        module = self._modules.get(name)
        if module is None:
            return None
        assert module.__spec__ is not None
        if name == PACKAGE and (other := self._found_elsewhere(module.__spec__)) is not None:
            return other
        spec = copy.copy(module.__spec__)
        loader: Any = copy.copy(spec.loader)
        spec.loader = loader
        loader.create_module = lambda spec: module
        if name != PACKAGE:
            loader.exec_module = self._import_again
        return spec

    def _found_elsewhere(self, before: ModuleSpec) -> ModuleSpec | None:
        """Returns the package if the script finds another one, whose modules are not imported here."""
        sys.meta_path.remove(self)
        now = importlib.util.find_spec(PACKAGE)
        if now is not None and now.origin != before.origin:
            self._modules.clear()
            return now
        sys.meta_path.insert(0, self)
        return None

    def _import_again(self, module: ModuleType) -> None:
        for name in self._imports.get(module.__name__, ()):
            importlib.import_module(name)
        for alias, other in self._modules.items():  # former paths that a package sets itself
            if alias.rpartition(".")[0] == module.__name__ and other.__name__ != alias:
                sys.modules[alias] = other

    @contextlib.contextmanager
    def _noting_imports(self) -> Iterator[None]:
        plain = builtins.__import__

        def noted(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
            found = plain(name, globals, locals, fromlist, level)
            if globals is not None and _is_ours(importer := globals.get("__name__", "")) and _is_ours(name):
                assert level == 0, f"{importer} imports {name} from where it stands"
                parts = [f"{name}.{part}" for part in fromlist or () if f"{name}.{part}" in sys.modules]
                self._imports.setdefault(importer, []).extend([name, *parts])
            return found

        builtins.__import__ = noted
        try:
            yield
        finally:
            builtins.__import__ = plain


def _is_ours(name: str) -> bool:
    return name == PACKAGE or name.startswith(f"{PACKAGE}.")


def _imports_of(name: str) -> list[str]:
    """Returns the package's modules that a module imports at its top, without running it."""
    import ast

    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    with open(spec.origin, "rb") as file:
        found = [node.module for node in ast.parse(file.read()).body if isinstance(node, ast.ImportFrom)]
    return [module for module in found if module is not None and _is_ours(module)]
