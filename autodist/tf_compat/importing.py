"""How this package imports TensorFlow, where the script has not done so yet."""

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
    """What is imported within says nothing of what TensorFlow says in every run, and is not searched for garbage.

    The collector would go through all that the import has made by then, again and again, and find next to nothing: a
    sixth of the import's processor time. Where TensorFlow has been imported before, all is as it was.
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
        ImportError: the module raised an AttributeError, which Python takes there for a name that does not exist:
            `from autodist import AutoDist` would fail without the cause.
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
