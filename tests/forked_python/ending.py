"""The end of a forked process: objects imported before the fork are not destroyed.

At its end Python destroys all modules, one object after the other. In a process that shares its memory with others each
destruction writes to a page, and the system copies that page: a third of a small run's processor time. Objects that the
process itself has imported or created are destroyed as usual. So are objects with finalizers, which find the modules
that they call complete.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
from types import ModuleType

_PYTHONS_OWN = {"sys", "builtins", "__main__"}
_ACTS_WHEN_IT_GOES = {"tensorflow.python.eager.context"}
"""Ends TensorFlow's runtime."""

_left: dict[str, ModuleType] = {}


def leave_what_is_imported() -> None:
    """Records the modules imported so far: a process forked from this one does not destroy them."""
    _left.update({name: sys.modules[name] for name in sys.modules.keys() - _PYTHONS_OWN - _ACTS_WHEN_IT_GOES})


def _leave() -> None:
    """Removes modules from Python's list for destruction, and keeps them alive forever."""
    for name, module in _left.items():
        if sys.modules.get(name) is module:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
            del sys.modules[name]


atexit.register(_leave)  # before all other handlers, which Python calls earlier
