"""Environments of other frameworks, made with the first measurement that needs them."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import venv
from importlib.metadata import version

PACKAGES = {"jax": ("jax",), "torch": ("torch", "--index-url", "https://download.pytorch.org/whl/cpu")}
"""The arguments of pip for each framework; this environment's version of Keras is installed afterwards."""

_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "build" / "frameworks"


def python_of(way: str) -> str:
    """Returns the interpreter for a way of training: this one, or that of the environment of another framework.

    Raises:
        CalledProcessError: pip could not make the environment.
    """
    if way not in PACKAGES:
        return sys.executable
    folder = _FOLDER / way
    python, made = folder / "bin" / "python", folder / "made"
    keras = f"keras=={version('keras')}"
    if not made.is_file() or made.read_text() != keras:
        venv.create(folder, clear=True, with_pip=True)
        for wanted in (PACKAGES[way], (keras,)):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
        made.write_text(keras)
    return str(python)
