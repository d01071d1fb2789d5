"""Input of `autodist.join` that cannot be used; tests/cluster/test_hosted_functions.py joins processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import autodist
from autodist import AutoDist
from autodist.cluster import hosted_function
from autodist.cluster.environments.launcher_env import OF_ONE_PROCESS
from autodist.cluster.hosted_function import HostedFunction
from autodist.cluster.script import Script
from autodist.engines import join as joining
from autodist.errors import AutoDistError, ClusterError, ResourceSpecError

ALONE = {"chief": "127.0.0.1:15000", "index": 0, "workers": 1}


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has taken part in no run."""
    monkeypatch.setattr(joining, "_runs", [])
    for name in (*OF_ONE_PROCESS, "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    yield
    hosted_function.leave()


MACHINES = {"nodes": [{"address": "localhost", "cpus": [0]}]}
PREEMPT = {"checkpoint": {"folder": "saved", "on_preempt": True}}


@pytest.mark.parametrize(
    "arguments, problem",
    [
        ({"cluster": MACHINES}, "takes no machines, since its processes run already"),
        ({"cluster": 3}, "cluster is a int; pass the path of a YAML file, a mapping or a ResourceSpec"),
        ({"cluster": {"min_nodes": 2}}, "min_nodes is 2, but the process of a function takes part in one start only"),
        ({"cluster": PREEMPT}, "on_preempt needs SIGTERM, which belongs to the program that runs the function"),
        ({"chief": "a:1"}, "chief and index belong together"),
        ({"index": 1}, "chief and index belong together"),
        ({"workers": 2}, "chief and index belong together"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ResourceSpecError, match=problem):
        autodist.join(**arguments)


def test_an_environment_without_a_cluster_is_named() -> None:
    with pytest.raises(ResourceSpecError, match="this process's environment is none of TF_CONFIG"), autodist.join():
        pytest.fail("there is no cluster")


def test_restarts_are_left_to_the_engine() -> None:
    with pytest.raises(ResourceSpecError, match="max_restarts is 2, which is not possible here: a scheduler has"):
        autodist.join({"max_restarts": 2}, **ALONE).__enter__()


def test_the_block_is_needed_for_the_end_of_the_worker() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'scope': write `with autodist.join\(…\) as ad:`"):
        autodist.join(**ALONE).scope()


def test_a_function_alone_is_a_worker_without_others_and_makes_no_second_autodist() -> None:
    with autodist.join({"strategy": "PS"}, replicas=2, **ALONE) as ad:
        assert (ad.num_workers, ad.num_replicas, ad.is_chief) == (1, 2, True)
        with pytest.raises(ClusterError, match=r"The function test_a_function_alone.* makes a second AutoDist"):
            AutoDist()
    assert AutoDist().num_workers == 1, "the process is one without a run again"


def test_a_second_run_in_the_process_is_refused_with_the_first() -> None:
    is_one = pytest.raises(ClusterError, match="in a process that is a worker already, by test_a_second_run")
    with autodist.join(**ALONE), is_one:
        autodist.join(**ALONE).__enter__()
    with pytest.raises(
        ClusterError, match=r"has been a worker before, by the function test_a_second_run.*maxtasksperchi"
    ):
        autodist.join(**ALONE).__enter__()


def test_a_run_that_does_not_start_leaves_the_process_as_it_was() -> None:
    with pytest.raises(AutoDistError, match="AUTODIST_SECRET"), autodist.join(chief="10.0.0.1:1", index=0, workers=2):
        pytest.fail("there is no secret")
    assert hosted_function.hosted_function() is None
    with autodist.join(**ALONE) as ad:
        assert ad.num_workers == 1


def test_the_first_cause_is_raised_where_the_function_has_not_noticed_it() -> None:
    function = HostedFunction(Script((), "/", None))
    block = joining.Joining(function, joining._read_cluster(None), None, {}, None)
    first = ClusterError("the chief was lost")
    function.end.note(first)
    with pytest.raises(ClusterError) as caught:
        block.__exit__(None, None, None)
    assert caught.value is first
    with pytest.raises(ClusterError) as caught:
        block.__exit__(ValueError, ValueError("a consequence"), None)
    assert caught.value is first
