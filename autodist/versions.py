"""The versions of Python, TensorFlow and protobuf that AutoDist supports; checked when AutoDist is imported."""

from __future__ import annotations

import functools
import logging
import re
import sys
from importlib import metadata

from autodist.errors import UnsupportedVersionError

VERSION = "0.1.0"
"""The version of AutoDist."""

LOWEST_PYTHON, HIGHEST_PYTHON = (3, 11), (3, 13)
LOWEST_TENSORFLOW = (2, 18)
SUPPORTED_TENSORFLOW = (2, 21)
# protobuf refuses the generated code of autodist.proto if it is older than the compiler (pyproject.toml).
LOWEST_PROTOBUF = (6, 31, 1)

_INSTALL_TENSORFLOW = "pip install 'tensorflow==2.21.*'"
# The package names of TensorFlow; all of them install the module `tensorflow`.
_TENSORFLOW_NAMES = ("tensorflow", "tensorflow-cpu", "tf-nightly")

_log = logging.getLogger("autodist")


def check_versions() -> None:
    """Checks the versions of required packages from their metadata, without importing them.

    TensorFlow 2.21 is supported and tested. Any other version from 2.18 may work and causes a warning in the log.

    Raises:
        UnsupportedVersionError: Python is not 3.11 to 3.13, TensorFlow is missing or below 2.18, or protobuf is below
            6.31.1.
    """
    python = (sys.version_info[0], sys.version_info[1])
    if not LOWEST_PYTHON <= python <= HIGHEST_PYTHON:
        needed = f"{_dotted(LOWEST_PYTHON)} to {_dotted(HIGHEST_PYTHON)}"
        mend = "create a virtual environment with one of these (python3.11 -m venv …) and install AutoDist there"
        raise UnsupportedVersionError("Python", _dotted(python), needed, mend)
    _check_tensorflow(next(filter(None, map(_installed, _TENSORFLOW_NAMES)), None))
    protobuf = _installed("protobuf")
    if protobuf is None or _numbers(protobuf) < LOWEST_PROTOBUF:
        needed = f"{_dotted(LOWEST_PROTOBUF)} or newer, below 8"
        raise UnsupportedVersionError("protobuf", protobuf, needed, "pip install 'protobuf>=6.31.1,<8'")


def _check_tensorflow(found: str | None) -> None:
    needed = f"{_dotted(LOWEST_TENSORFLOW)} or newer; {_dotted(SUPPORTED_TENSORFLOW)} is the supported version"
    if found is None or _numbers(found) < LOWEST_TENSORFLOW:
        raise UnsupportedVersionError("TensorFlow", found, needed, _INSTALL_TENSORFLOW)
    if _numbers(found)[:2] != SUPPORTED_TENSORFLOW:
        _log.warning(
            "TensorFlow %s is installed; AutoDist supports and is tested with %s. Other versions may fail or train "
            "something else. To install it: %s",
            found,
            _dotted(SUPPORTED_TENSORFLOW),
            _INSTALL_TENSORFLOW,
        )


@functools.cache
def require_package(package: str, lowest: str) -> None:
    """Checks that an installed package has at least a given version; passes if the package is not installed.

    Raises:
        UnsupportedVersionError: the package is older.
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
    """Returns the leading numbers of a version, without a suffix such as "rc1", "+cpu" or ".dev3".

    >>> _numbers("2.21.0rc1"), _numbers("2.22.0.dev20260101+cpu")
    ((2, 21, 0), (2, 22, 0))
    """
    start = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in start.group().split(".")) if start else ()


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
