"""How a forked process ends: what was imported before it was forked is left as it lies.

At its end Python takes apart all modules, one object after the other. In a process that shares its memory with others
each writes to a page, of which the system then makes a copy: a third of what a small run takes of a core. What the
process itself has imported and made goes as ever, and so does what acts when it goes; but it finds the modules that it
calls then whole.
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
    """Notes what has been imported by now: a process forked from this one leaves it there."""
    _left.update({name: sys.modules[name] for name in sys.modules.keys() - _PYTHONS_OWN - _ACTS_WHEN_IT_GOES})


def _leave() -> None:
    """Takes modules from where Python looks for what it takes apart, and has them stay for ever."""
    for name, module in _left.items():
        if sys.modules.get(name) is module:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
            del sys.modules[name]


atexit.register(_leave)  # before all others, which Python calls first
