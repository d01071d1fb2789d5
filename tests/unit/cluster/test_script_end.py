"""A Ctrl-C whose exception TensorFlow or Keras drops comes again; one that the script catches does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, signal, time
from autodist.cluster.script_end import watch_script_end

watch_script_end()

class Interrupted:
    def __getattr__(self, name):
        signal.raise_signal(signal.SIGINT)

scope = dict(globals(), __name__={module!r})
exec('''
def drop():
    {drop}
    time.sleep(1)
''', scope)
try:
    scope["drop"]()
    print("went on")
except KeyboardInterrupt:
    print("interrupted")
"""
CLEARS = 'ctypes.pythonapi.PyObject_HasAttrString(ctypes.py_object(Interrupted()), b"shape")'
CATCHES = """
    try:
        Interrupted().shape
    except BaseException:
        pass
"""


@pytest.mark.parametrize("drop", [CLEARS, CATCHES], ids=["in C", "in Python"])
@pytest.mark.parametrize(
    ("module", "printed"), [("tensorflow.python.framework.ops", "interrupted"), ("__main__", "went on")]
)
def test_an_interrupt_that_a_library_drops_comes_again(drop: str, module: str, printed: str) -> None:
    script = SCRIPT.format(module=module, drop=drop)
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (found.stdout.strip(), found.stderr) == (printed, "")
