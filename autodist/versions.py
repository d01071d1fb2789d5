"""The versions of Python, TensorFlow, Keras and protobuf that AutoDist supports; checked when AutoDist is imported."""

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
LOWEST_TENSORFLOW, HIGHEST_TENSORFLOW = (2, 18), (2, 21)
LOWEST_KERAS = (3, 8)
LOWEST_PROTOBUF = (4, 25)

# The package names of TensorFlow; all of them install the module `tensorflow`.
_TENSORFLOW_NAMES = ("tensorflow", "tensorflow-cpu", "tf-nightly")

_log = logging.getLogger("autodist")


def check_versions() -> None:
    """Checks the versions of required packages from their metadata, without importing them.

    A TensorFlow that is newer than the tested ones may work and causes a warning in the log.

    Raises:
        UnsupportedVersionError: Python is not 3.11 to 3.13, TensorFlow is missing or below 2.18, Keras is below 3.8, or
            protobuf is below 4.25.
    """
    python = (sys.version_info[0], sys.version_info[1])
    if not LOWEST_PYTHON <= python <= HIGHEST_PYTHON:
        needed = _range(LOWEST_PYTHON, HIGHEST_PYTHON)
        mend = "create a virtual environment with one of these (python3.11 -m venv …) and install AutoDist there"
        raise UnsupportedVersionError("Python", _dotted(python), needed, mend)
    _check_tensorflow(next(filter(None, map(_installed, _TENSORFLOW_NAMES)), None))
    require_package("keras", _dotted(LOWEST_KERAS))
    require_package("protobuf", _dotted(LOWEST_PROTOBUF))


def _check_tensorflow(found: str | None) -> None:
    needed, last = _range(LOWEST_TENSORFLOW, HIGHEST_TENSORFLOW), _dotted(HIGHEST_TENSORFLOW)
    mend = f"pip install 'tensorflow=={last}.*'"
    if found is None or _numbers(found) < LOWEST_TENSORFLOW:
        raise UnsupportedVersionError("TensorFlow", found, needed, mend)
    if _numbers(found)[:2] > HIGHEST_TENSORFLOW:
        _log.warning(
            "TensorFlow %s is installed; AutoDist is tested with %s. Newer versions may fail or train something else. "
            "To install the last tested one: %s",
            found,
            needed,
            mend,
        )


@functools.cache
def has_package(package: str, lowest: str) -> bool:
    """Returns True if an installed package has at least a given version, or no package is installed by this name."""
    found = _installed(package)
    return found is None or _numbers(found) >= _numbers(lowest)


def require_package(package: str, lowest: str) -> None:
    """Checks that an installed package has at least a given version; passes if the package is not installed.

    Raises:
        UnsupportedVersionError: the package is older.
    """
    if not has_package(package, lowest):
        found = _installed(package)
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


def _range(lowest: tuple[int, ...], highest: tuple[int, ...]) -> str:
    return f"{_dotted(lowest)} to {_dotted(highest)}"


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
