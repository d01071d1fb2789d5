"""AutoGraph's generated code, loaded from memory.

TensorFlow writes the code of each converted function to a temporary file and removes that when Python ends; the
bytecode that Python puts beside it stays. A process that is ended by a signal leaves them all, so none are made here.
"""

from __future__ import annotations

import linecache
import os
import secrets
import sys
import tempfile
from types import ModuleType

from tensorflow.python.autograph.pyct import loader  # where AutoGraph loads what it has generated


def load_generated_code_from_memory() -> None:
    """From now on converted functions leave no file; tracebacks, `inspect` and debuggers still show their code."""
    loader.load_source = _load_source


def _load_source(source: str, delete_on_exit: bool) -> tuple[ModuleType, str]:
    """Stands in place of TensorFlow's `load_source`; there is no file that `delete_on_exit` could be about."""
    name = f"__autograph_generated_file{secrets.token_hex(6)}"
    file = os.path.join(tempfile.gettempdir(), f"{name}.py")  # only a name, by which lines are mapped to the user's
    module = ModuleType(name)
    module.__file__ = file
    # Without a time, so that the lines are not looked for on the disk. (Python's own way for code that has no file.)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)  # noqa: S102  (as importing a file would)
    sys.modules[name] = module
    return module, file
