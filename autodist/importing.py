"""How this package imports TensorFlow, where the script has not done so yet."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from autodist.quiet import quiet_tensorflow


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
