"""Import of TensorFlow by this package, if the script has not imported it yet."""

from __future__ import annotations

import gc
import importlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from autodist.logs.quiet import quiet_tensorflow


@contextmanager
def importing_tensorflow() -> Iterator[None]:
    """Hides TensorFlow's usual messages and disables garbage collection during an import.

    The collector would repeatedly scan all objects of the import and find almost nothing: a sixth of the import's
    processor time. Has no effect if TensorFlow is already imported.
    """
    if "tensorflow" in sys.modules:
        yield
        return
    collects = gc.isenabled()
    gc.disable()
    try:
        with quiet_tensorflow():
            yield
    finally:
        if collects:
            gc.enable()


def import_lazily(name: str) -> ModuleType:
    """Imports a module of this package from within the `__getattr__` of another module.

    Raises:
        ImportError: the module raised an AttributeError, which Python would treat as a missing name: `from autodist
            import AutoDist` would fail without the cause.
    """
    try:
        return importlib.import_module(name)
    except AttributeError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ImportError(
            f"{name} cannot be imported: AttributeError: {error} ({frame.filename}:{frame.lineno}). If TensorFlow or "
            "Keras lacks it, install a version that AutoDist supports (docs/versions.md).",
            name=name,
        ) from error
