from __future__ import annotations

import platform
import sys
from dataclasses import replace
from types import ModuleType

import pytest

from autodist.cluster.agent import tensorflow_version
from autodist.cluster.preflight import check_all, compared_packages, faults
from autodist.cluster.protocol import Facts, Lost
from autodist.errors import ClusterError, MachinesAwayError
from autodist.versions import VERSION

FIT = Facts(platform.python_version(), tensorflow_version(), 20000, (), VERSION, {"keras": "3.15.1"}, "0a1b")


def test_equal_machines_have_no_faults() -> None:
    check_all({"a": FIT, "b": FIT, "later": replace(FIT, packages={"keras": "3.15.1", "more": "1"})}, FIT)


def test_other_micro_version_of_python_is_no_fault() -> None:
    major, minor, _ = platform.python_version_tuple()
    assert faults(replace(FIT, python=f"{major}.{minor}.99"), FIT) == []


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
        (replace(FIT, packages={"keras": "3.14.0"}), ["Keras is 3.14.0, on the chief 3.15.1", "install keras==3.15.1"]),
        (replace(FIT, packages={}), ["Keras is not installed; run `pip install keras==3.15.1` there"]),
        (replace(FIT, digest="ffff"), ["the script /train.py differs from the one that the chief runs; copy that"]),
        (
            replace(FIT, unresolved={"gpu-7": "Name or service not known"}),
            [
                "the name gpu-7 cannot be resolved there: Name or service not known; add it to its DNS or /etc/hosts",
                "an IP address",
            ],
        ),
        (Lost("connection refused"), ["connection refused"]),
    ],
)
def test_each_fault_has_words(facts: Facts | Lost, words: list[str]) -> None:
    (fault,) = faults(facts, FIT, "the script /train.py")
    assert all(word in fault for word in words)


def test_all_faults_of_all_machines_stand_in_one_table() -> None:
    answers: dict[str, Facts | Lost] = {
        "fine": FIT,
        "old": replace(FIT, python="3.9.1", tensorflow="2.1.0", port=None, problems=("no script",), digest=None),
        "10.0.0.3": Lost("refused\nagain"),
    }
    with pytest.raises(ClusterError) as caught:
        check_all(answers, FIT)
    lines = str(caught.value).splitlines()
    assert [line[:10].strip() for line in lines[1:]] == ["old", "", "", "10.0.0.3", ""]
    words = ["Python is 3.9.1", "TensorFlow is 2.1.0", "  no script", "  refused", "  again"]
    assert [word for word, line in zip(words, lines[1:], strict=True) if word not in line] == []
    assert "fine" not in str(caught.value)


def test_the_older_keras_is_compared_where_the_script_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tf_keras", raising=False)
    assert compared_packages() == ("keras",)
    monkeypatch.setitem(sys.modules, "tf_keras", ModuleType("tf_keras"))
    assert compared_packages() == ("keras", "tf_keras")


def test_machines_that_are_away_are_named_where_nothing_else_is_wrong() -> None:
    away = {"a": FIT, "b": Lost("no route", is_away=True), "c": Lost("no route", is_away=True)}
    with pytest.raises(MachinesAwayError, match="no route") as raised:
        check_all(away, FIT)
    assert raised.value.workers == ("b", "c")
    for more in ({"a": replace(FIT, tensorflow=None)}, {"c": Lost("its host key has changed")}):
        with pytest.raises(ClusterError) as other:
            check_all(away | more, FIT)
        assert type(other.value) is ClusterError


def test_the_name_of_a_machine_that_is_gone_is_no_other_ones_fault() -> None:
    """With `min_nodes` the run goes on without it."""
    seen = replace(FIT, unresolved={"gpu-7": "Name or service not known"})
    with pytest.raises(MachinesAwayError) as caught:
        check_all({"gpu-1:0": seen, "gpu-7:0": Lost("no answer", is_away=True)}, FIT)
    assert caught.value.workers == ("gpu-7:0",)
    assert "resolved" not in str(caught.value)
