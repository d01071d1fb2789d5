"""A function as a worker: its end, and the digest by which the workers compare their code."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from autodist.cluster.hosted_function import FunctionEnd, HostedFunction, describe
from autodist.cluster.script import Script
from autodist.cluster.start import content_digest
from autodist.errors import ClusterError

TRAIN = """
def train():
    rate = {rate}
    inner = lambda name: name in {{"a", "b", "c"}}
    return frame()
"""


def described(text: str) -> Script:
    """The description of a function that is in no file, as one that was pickled."""
    content: dict[str, Any] = {"frame": lambda: sys._getframe(1), "__name__": "__main__"}
    exec(compile(text, "/home/ann/train.py", "exec"), content)  # noqa: S102 - the text above
    frame = content["train"]()
    assert isinstance(frame, FrameType)
    return describe(frame)


def test_pickled_functions_are_compared_by_their_code() -> None:
    own = described(TRAIN.format(rate=1))
    assert own.digest == described("\n\n" + TRAIN.format(rate=1)).digest
    assert own.digest != described(TRAIN.format(rate=2)).digest
    assert own.digest != described(TRAIN.format(rate=1).replace('"c"', '"d"')).digest
    assert own.name == "the function train (/home/ann/train.py)"


def test_imported_functions_are_compared_by_their_file() -> None:
    assert describe(sys._getframe()).digest == content_digest(__file__)


def test_a_function_has_one_autodist() -> None:
    function = HostedFunction(Script((), "/", None, function="train (train.py)"))
    function.take()
    with pytest.raises(ClusterError, match=r"The function train \(train.py\) makes a second AutoDist.*Use the one of"):
        function.take()


def test_the_first_error_is_the_one_that_counts() -> None:
    end, first = FunctionEnd(), ValueError("first")
    assert not end.is_bad
    end.note(first)
    end.note(ValueError("second"))
    assert end.is_bad
    assert end.raised is first
