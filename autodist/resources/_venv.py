"""`python_venv`: what is written there for a shell, as other programs want it, is told with what is wanted here."""

from __future__ import annotations

import re

from autodist.resources._source import as_yaml

VENV = "the path of a virtual environment on the node, absolute or with ~/ in front, without = and control characters"

_COMMAND = re.compile(r"\s*(source|\.|conda|mamba|micromamba|module|export|eval|workon|pyenv|bash|sh)\s")
_SIGN = re.compile(r"[;|`$]|&&")
_FILE = r"/bin/(activate|python)[\w.]*"
_FILE_ALONE = re.compile(rf"(?P<venv>~?/.*){_FILE}")
_FILE_IN_LINE = re.compile(rf"(?P<venv>~?/[^\s;&|]*){_FILE}(?=[\s;&|]|\Z)")


def venv_fault(path: str) -> str | None:
    """What is wrong with a shell line, or with a file in an environment; None of what may be an environment's path.

    >>> venv_fault("~/venv/bin/python3")
    '"~/venv/bin/python3" is a file in an environment; allowed: the environment itself, ~/venv'
    """
    is_line = _COMMAND.match(path) or _SIGN.search(path)
    file = (_FILE_IN_LINE.search if is_line else _FILE_ALONE.fullmatch)(path)
    if is_line:
        here = f": {file['venv']}" if file else ""
        return f"{as_yaml(path)} is for a shell, and none reads it; allowed: {VENV}{here}"
    if file:
        return f"{as_yaml(path)} is a file in an environment; allowed: the environment itself, {file['venv']}"
    return None
