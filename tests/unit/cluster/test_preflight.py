from __future__ import annotations

import platform

import pytest

from autodist.cluster.agent import tensorflow_version
from autodist.cluster.preflight import check_all, faults
from autodist.cluster.protocol import Facts, Lost
from autodist.errors import ClusterError

FIT = Facts(platform.python_version(), tensorflow_version(), 20000)


def test_equal_machines_have_no_faults() -> None:
    check_all({"a": FIT, "b": FIT})


def test_other_micro_version_of_python_is_no_fault() -> None:
    major, minor, _ = platform.python_version_tuple()
    assert faults(Facts(f"{major}.{minor}.99", FIT.tensorflow, 20000)) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (Facts("3.9.1", FIT.tensorflow, 1), ["Python is 3.9.1, on the chief", "`python_venv`"]),
        (Facts(FIT.python, "2.1.0", 1), ["TensorFlow is 2.1.0, on the chief", "pip install tensorflow=="]),
        (Facts(FIT.python, None, 1), ["TensorFlow is not installed", "pip install tensorflow=="]),
        (Facts(FIT.python, FIT.tensorflow, None, ("port 5 is taken",)), ["port 5 is taken"]),
        (Lost("connection refused"), ["connection refused"]),
    ],
)
def test_each_fault_has_words(facts: Facts | Lost, words: list[str]) -> None:
    (fault,) = faults(facts)
    assert all(word in fault for word in words)


def test_all_faults_of_all_machines_stand_in_one_table() -> None:
    answers: dict[str, Facts | Lost] = {
        "fine": FIT,
        "old": Facts("3.9.1", "2.1.0", None, ("no script",)),
        "10.0.0.3": Lost("refused\nagain"),
    }
    with pytest.raises(ClusterError) as caught:
        check_all(answers)
    lines = str(caught.value).splitlines()
    assert [line[:10].strip() for line in lines[1:]] == ["old", "", "", "10.0.0.3", ""]
    words = ["Python is 3.9.1", "TensorFlow is 2.1.0", "  no script", "  refused", "  again"]
    assert [word for word, line in zip(words, lines[1:], strict=True) if word not in line] == []
    assert "fine" not in str(caught.value)
