from __future__ import annotations

import platform
from dataclasses import replace

import pytest

from autodist.cluster.agent import tensorflow_version
from autodist.cluster.preflight import check_all, faults
from autodist.cluster.protocol import Facts, Lost
from autodist.errors import ClusterError
from autodist.versions import VERSION

FIT = Facts(platform.python_version(), tensorflow_version(), 20000, (), VERSION)


def test_equal_machines_have_no_faults() -> None:
    check_all({"a": FIT, "b": FIT})


def test_other_micro_version_of_python_is_no_fault() -> None:
    major, minor, _ = platform.python_version_tuple()
    assert faults(replace(FIT, python=f"{major}.{minor}.99")) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (replace(FIT, python="3.9.1"), ["Python is 3.9.1, on the chief", "`python_venv`"]),
        (replace(FIT, tensorflow="2.1.0"), ["TensorFlow is 2.1.0, on the chief", "pip install tensorflow=="]),
        (replace(FIT, tensorflow=None), ["TensorFlow is not installed", "pip install tensorflow=="]),
        (replace(FIT, port=None, problems=("port 5 is taken",)), ["port 5 is taken"]),
        (
            replace(FIT, autodist="0.0.9"),
            [f"AutoDist is 0.0.9, on the chief {VERSION}; install", "`python_venv`"],
        ),
        (replace(FIT, autodist=None), ["AutoDist is of another version, on the chief"]),
        (Lost("connection refused"), ["connection refused"]),
    ],
)
def test_each_fault_has_words(facts: Facts | Lost, words: list[str]) -> None:
    (fault,) = faults(facts)
    assert all(word in fault for word in words)


def test_all_faults_of_all_machines_stand_in_one_table() -> None:
    answers: dict[str, Facts | Lost] = {
        "fine": FIT,
        "old": Facts("3.9.1", "2.1.0", None, ("no script",), VERSION),
        "10.0.0.3": Lost("refused\nagain"),
    }
    with pytest.raises(ClusterError) as caught:
        check_all(answers)
    lines = str(caught.value).splitlines()
    assert [line[:10].strip() for line in lines[1:]] == ["old", "", "", "10.0.0.3", ""]
    words = ["Python is 3.9.1", "TensorFlow is 2.1.0", "  no script", "  refused", "  again"]
    assert [word for word, line in zip(words, lines[1:], strict=True) if word not in line] == []
    assert "fine" not in str(caught.value)
