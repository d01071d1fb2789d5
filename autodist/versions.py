"""Which versions of Python, TensorFlow and protobuf AutoDist works with; asked once, when it is imported."""

from __future__ import annotations

import functools
import logging
import re
import sys
from importlib import metadata

from autodist.errors import UnsupportedVersionError

VERSION = "0.1.0"
"""Of AutoDist."""

LOWEST_PYTHON, HIGHEST_PYTHON = (3, 11), (3, 13)
LOWEST_TENSORFLOW = (2, 18)
SUPPORTED_TENSORFLOW = (2, 21)
# The generated code of autodist.proto is refused by any protobuf that is older than its compiler (pyproject.toml).
LOWEST_PROTOBUF = (6, 31, 1)

_INSTALL_TENSORFLOW = "pip install 'tensorflow==2.21.*'"
# TensorFlow under the names by which it is installed; they all bring the module `tensorflow`.
_TENSORFLOW_NAMES = ("tensorflow", "tensorflow-cpu", "tf-nightly")

_log = logging.getLogger("autodist")


def check_versions() -> None:
    """Checks what AutoDist stands on, from the packages' metadata: nothing is imported.

    TensorFlow 2.21 is supported: AutoDist is tested with it. Any other from 2.18 may work and is warned of in the log.

    Raises:
        UnsupportedVersionError: Python is not 3.11 to 3.13, TensorFlow is missing or below 2.18, or protobuf is below
            6.31.1.
    """
    python = (sys.version_info[0], sys.version_info[1])
    if not LOWEST_PYTHON <= python <= HIGHEST_PYTHON:
        needed = f"{_dotted(LOWEST_PYTHON)} to {_dotted(HIGHEST_PYTHON)}"
        mend = "make a virtual environment with one of these (python3.11 -m venv …) and install AutoDist there"
        raise UnsupportedVersionError("Python", _dotted(python), needed, mend)
    _check_tensorflow(next(filter(None, map(_installed, _TENSORFLOW_NAMES)), None))
    protobuf = _installed("protobuf")
    if protobuf is None or _numbers(protobuf) < LOWEST_PROTOBUF:
        needed = f"{_dotted(LOWEST_PROTOBUF)} or newer, below 8"
        raise UnsupportedVersionError("protobuf", protobuf, needed, "pip install 'protobuf>=6.31.1,<8'")


def _check_tensorflow(found: str | None) -> None:
    needed = f"{_dotted(LOWEST_TENSORFLOW)} or newer, and {_dotted(SUPPORTED_TENSORFLOW)} is what AutoDist supports"
    if found is None or _numbers(found) < LOWEST_TENSORFLOW:
        raise UnsupportedVersionError("TensorFlow", found, needed, _INSTALL_TENSORFLOW)
    if _numbers(found)[:2] != SUPPORTED_TENSORFLOW:
        _log.warning(
            "TensorFlow %s is installed; AutoDist supports and is tested with %s, and others may fail or train "
            "something else. To get it: %s",
            found,
            _dotted(SUPPORTED_TENSORFLOW),
            _INSTALL_TENSORFLOW,
        )


@functools.cache
def require_package(package: str, lowest: str) -> None:
    """Passes if a package is of some version at least, or is not installed by its name.

    Raises:
        UnsupportedVersionError: it is older.
    """
    found = _installed(package)
    if found is not None and _numbers(found) < _numbers(lowest):
        raise UnsupportedVersionError(package, found, f"{lowest} or newer", f"pip install '{package}>={lowest}'")


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers a version starts with; what follows them ("rc1", "+cpu", ".dev3") is left out.

    >>> _numbers("2.21.0rc1"), _numbers("2.22.0.dev20260101+cpu")
    ((2, 21, 0), (2, 22, 0))
    """
    start = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in start.group().split(".")) if start else ()


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
