"""Machines, and the assignment of worker indices, from the facts that processes report."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autodist.cluster.environments.handshake import Hello
from autodist.cluster.environments.machines import Machines, machines_of, plain_host
from autodist.cluster.environments.roster import Arrival
from autodist.errors import ClusterError
from autodist.resources import Allotment, ResourceSpec


def hello(index: int, cores: Sequence[int] = (0, 1, 2, 3), gpus: Sequence[str] = (), given: int | None = None) -> Hello:
    return Hello(index, None, f"node{index}", None, tuple(cores), given, tuple(gpus))


def came(index: int, from_host: str, to_host: str = "10.0.0.1", **said: object) -> Arrival:
    return Arrival(hello(index, **said), from_host, to_host)  # type: ignore[arg-type]


def spec_of(machines: Machines) -> ResourceSpec:
    return ResourceSpec.from_dict({"nodes": "given"}).with_nodes(machines.nodes, machines.allotments)


def test_each_process_on_a_machine_of_its_own() -> None:
    machines = machines_of(hello(0), [came(2, "10.0.0.3"), came(1, "10.0.0.2")])
    assert machines.processes == (0, 1, 2)
    spec = spec_of(machines)
    assert [worker.name for worker in spec.workers] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert [(worker.devices, worker.cores) for worker in spec.workers] == [(("cpu:0",), 4)] * 3


def test_processes_dealt_out_in_turns_are_counted_machine_by_machine() -> None:
    arrivals = [came(1, "10.0.0.2"), came(2, "10.0.0.1"), came(3, "10.0.0.2")]
    machines = machines_of(hello(0), arrivals)
    assert machines.processes == (0, 2, 1, 3)
    spec = spec_of(machines)
    assert [worker.name for worker in spec.workers] == ["10.0.0.1:0", "10.0.0.1:1", "10.0.0.2:0", "10.0.0.2:1"]
    assert [worker.cores for worker in spec.workers] == [2, 2, 2, 2], "they may run on the same cores"


def test_cores_that_a_process_has_for_itself_are_its_own() -> None:
    arrivals = [came(1, "127.0.0.1", "127.0.0.1", cores=(2, 3)), came(2, "127.0.0.1", "127.0.0.1", cores=(4,))]
    machines = machines_of(hello(0, cores=(0, 1)), arrivals)
    assert [allotment.cores for allotment in machines.allotments] == [2, 2, 1]
    assert [allotment.cores for allotment in machines_of(hello(0, given=3), []).allotments] == [3], (
        "SLURM_CPUS_PER_TASK"
    )


def test_own_gpus_are_counted_from_0_and_shared_ones_dealt_out() -> None:
    own = machines_of(hello(0, gpus=["a"]), [came(1, "10.0.0.1", gpus=["b"])])
    assert [allotment.devices for allotment in own.allotments] == [("gpu:0",), ("gpu:0",)]
    shared = machines_of(hello(0, gpus="abcd"), [came(1, "10.0.0.1", gpus="abcd")])
    assert [allotment.devices for allotment in shared.allotments] == [("gpu:0", "gpu:1"), ("gpu:2", "gpu:3")]
    assert len(spec_of(shared).replicas) == 4


def test_as_many_replicas_as_are_asked_for() -> None:
    assert [allotment.devices for allotment in machines_of(hello(0), [came(1, "10.0.0.2")], replicas=2).allotments] == [
        ("cpu:0", "cpu:1")
    ] * 2


@pytest.mark.parametrize(
    "own, other, replicas, problem",
    [
        (
            ["a"],
            ["b", "c"],
            None,
            "of its GPUs process 0 sees 1, process 1 sees 2; give each process there the same number",
        ),
        (["a"], ["a"], None, "2 processes share 1 GPUs, too few for 1 each"),
        (["a", "b"], ["b", "c"], None, "some GPUs are visible to several processes and some are not"),
        (["a"], ["b"], 2, "and each needs 2 replicas"),
    ],
)
def test_gpus_that_cannot_be_dealt_out_are_refused(
    own: list[str], other: list[str], replicas: int | None, problem: str
) -> None:
    with pytest.raises(ClusterError, match=problem):
        machines_of(hello(0, gpus=own), [came(1, "10.0.0.1", gpus=other)], replicas)


def test_addresses_that_the_environment_names_are_kept_with_their_ports() -> None:
    machines = machines_of(hello(0), [came(1, "10.0.0.9"), came(2, "10.0.0.8")], None, ["a:1234", "b:4000", "a:77"])
    assert machines.processes == (0, 2, 1)
    workers = spec_of(machines).workers
    assert [(worker.node.address, worker.port) for worker in workers] == [("a", 1234), ("a", 77), ("b", 4000)]


def test_the_spec_of_a_given_cluster_reaches_the_workers_whole() -> None:
    reported = ResourceSpec.from_dict({"nodes": "given", "strategy": "PS", "join_timeout": 7})
    machines = machines_of(hello(0, gpus=["a"]), [came(1, "10.0.0.1", gpus=["b"])])
    spec = reported.with_nodes(machines.nodes, machines.allotments)
    assert ResourceSpec.from_payload(spec.for_workers().to_payload()) == spec
    assert spec.allotments == (Allotment(("gpu:0",), 2), Allotment(("gpu:0",), 2))
    assert (spec.join_timeout, spec.strategy and spec.strategy.builder) == (7, "PS")
    assert all(spec.ssh_group(node) is None for node in spec.nodes)


def test_an_address_is_written_as_people_do() -> None:
    assert plain_host("::ffff:10.0.0.1") == "10.0.0.1"
    assert plain_host("fe80::1%eth0") == "fe80::1"


def test_a_given_cluster_is_this_machine_until_its_processes_have_met() -> None:
    spec = ResourceSpec.from_dict({"nodes": "given", "batch": "global"})
    assert spec.is_given
    assert (len(spec.workers), spec.to_dict()["nodes"]) == (1, "given")
    named = ResourceSpec.from_dict({"nodes": [{"address": "a", "chief": True}, {"address": "b"}], "strategy": "PS"})
    assert (len(named.as_given().workers), named.as_given().is_given) == (1, True)
    assert ResourceSpec.from_dict(named.as_given().to_dict()).is_given
