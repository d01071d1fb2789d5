"""The documentation's YAML gives the documented workers and replicas."""

from __future__ import annotations

import json
import os
import pathlib

import pytest

from autodist.errors import ResourceSpecError
from autodist.resources import DEFAULT_NETWORK_BANDWIDTH, Node, ResourceSpec, SSHGroup, Timeouts

TWO_MACHINES = """\
nodes:
  - {address: 10.0.0.1, gpus: [0, 1], chief: true, network_bandwidth: 25}     # Gbit/s
  - {address: 10.0.0.2, cpus: [0, 1, 2, 3], workers: 2, ssh_config: lab, port: 15000}
ssh:
  lab: {username: ubuntu, key_file: ~/.ssh/id_ed25519, port: 22, python_venv: ~/venv, shared_envs: {LANG: C}}
strategy:
  builder: Parallax
  chunk_size: 64
  variables:                                     # first match wins, then the builder's own choice
    "embedding/.*": {synchronizer: PS, partition: {axis: 0, shards: 4}, staleness: 2}
"""


@pytest.fixture
def two_machines(tmp_path: pathlib.Path) -> ResourceSpec:
    path = tmp_path / "cluster.yml"
    path.write_text(TWO_MACHINES)
    return ResourceSpec.from_file(path)


def nodes(*each: dict[str, object]) -> ResourceSpec:
    return ResourceSpec.from_dict({"nodes": list(each)})


def test_nodes_become_models(two_machines: ResourceSpec) -> None:
    first, second = two_machines.nodes
    assert first == Node(address="10.0.0.1", gpus=(0, 1), cpus=(), chief=True, network_bandwidth=25.0)
    assert (second.workers, second.ssh_config, second.port, second.chief) == (2, "lab", 15000, False)
    assert second.network_bandwidth == DEFAULT_NETWORK_BANDWIDTH
    assert two_machines.chief is first
    assert two_machines.batch is None


def test_ssh_group_becomes_a_model(two_machines: ResourceSpec) -> None:
    lab = two_machines.ssh["lab"]
    assert (lab.username, lab.port, lab.python_venv, lab.shared_envs) == ("ubuntu", 22, "~/venv", {"LANG": "C"})
    assert lab.host_key_checking is True
    assert lab.key_path == pathlib.Path.home() / ".ssh/id_ed25519"
    assert lab.known_hosts_path is None


def test_known_hosts_path_is_expanded() -> None:
    assert SSHGroup(known_hosts="~/hosts").known_hosts_path == pathlib.Path.home() / "hosts"
    assert SSHGroup().key_path is None


def test_workers_of_two_machines(two_machines: ResourceSpec) -> None:
    assert [(worker.index, worker.name, worker.port, worker.devices) for worker in two_machines.workers] == [
        (0, "10.0.0.1", None, ("gpu:0", "gpu:1")),
        (1, "10.0.0.2:0", 15000, ("cpu:0", "cpu:1")),
        (2, "10.0.0.2:1", 15001, ("cpu:0", "cpu:1")),
    ]
    assert [worker.is_chief for worker in two_machines.workers] == [True, False, False]


def test_replicas_of_two_machines(two_machines: ResourceSpec) -> None:
    assert [(replica.index, replica.worker.index, replica.device) for replica in two_machines.replicas] == [
        (0, 0, "gpu:0"),
        (1, 0, "gpu:1"),
        (2, 1, "cpu:0"),
        (3, 1, "cpu:1"),
        (4, 2, "cpu:0"),
        (5, 2, "cpu:1"),
    ]


def test_one_machine_is_a_whole_cluster() -> None:
    spec = nodes({"address": "localhost", "cpus": [0, 1, 2, 3], "workers": 2})
    assert spec.chief.is_local
    assert [(worker.name, worker.devices) for worker in spec.workers] == [
        ("localhost:0", ("cpu:0", "cpu:1")),
        ("localhost:1", ("cpu:0", "cpu:1")),
    ]


def test_gpus_keep_their_numbers() -> None:
    spec = nodes({"address": "localhost", "gpus": [4, 2, 7, 5], "workers": 2})
    assert [worker.devices for worker in spec.workers] == [("gpu:4", "gpu:2"), ("gpu:7", "gpu:5")]


@pytest.mark.parametrize("devices", [{}, {"gpus": []}])
def test_a_node_without_devices_has_one_replica_on_its_cpu(devices: dict[str, object]) -> None:
    (worker,) = nodes({"address": "localhost", **devices}).workers
    assert worker.devices == ("cpu:0",)


@pytest.mark.parametrize("devices", [{"cpus": []}, {"cpus": [], "gpus": []}])
def test_a_node_whose_devices_are_none_on_purpose_only_owns_variables(devices: dict[str, object]) -> None:
    spec = nodes({"address": "a", "chief": True}, {"address": "b", "port": 15000, **devices}, {"address": "c"})
    assert [(worker.name, worker.devices, worker.has_replicas) for worker in spec.workers] == [
        ("a", ("cpu:0",), True),
        ("b", (), False),
        ("c", ("cpu:0",), True),
    ]
    assert [(replica.index, replica.worker.index) for replica in spec.replicas] == [(0, 0), (1, 2)]
    assert ResourceSpec.from_dict(spec.to_dict()).workers == spec.workers
    assert ResourceSpec.from_payload(spec.to_payload()) == spec


def test_gpus_beside_no_cpus_are_the_devices() -> None:
    assert nodes({"address": "a", "gpus": [0], "cpus": []}).workers[0].devices == ("gpu:0",)


def test_workers_of_the_chiefs_node_come_first() -> None:
    spec = nodes({"address": "a"}, {"address": "b", "chief": True, "cpus": [0, 1], "workers": 2}, {"address": "c"})
    assert [worker.name for worker in spec.workers] == ["b:0", "b:1", "a", "c"]
    assert [worker.index for worker in spec.workers] == [0, 1, 2, 3]


def test_names_of_workers_on_an_ipv6_address_can_be_read() -> None:
    spec = nodes({"address": "::1", "cpus": [0, 1], "workers": 2})
    assert [worker.name for worker in spec.workers] == ["[::1]:0", "[::1]:1"]


@pytest.mark.parametrize("gpus, devices", [(0, ("cpu:0",)), (2, ("gpu:0", "gpu:1"))])
def test_local_is_this_machine_with_one_worker(gpus: int, devices: tuple[str, ...]) -> None:
    spec = ResourceSpec.local(gpus)
    (worker,) = spec.workers
    assert (worker.name, worker.devices, worker.node.is_local, spec.file) == ("localhost", devices, True, None)


def test_batch_and_empty_sections_are_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "cluster.yml"
    path.write_text("nodes: [{address: localhost, ssh_config: lab}]\nssh:\n  lab:\nstrategy:\nbatch: per_worker\n")
    spec = ResourceSpec.from_file(path)
    assert (spec.batch, spec.strategy, spec.ssh) == ("per_worker", None, {"lab": SSHGroup()})


def test_limits_of_time_have_defaults_and_travel_with_the_payload(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "cluster.yml"
    path.write_text("nodes: [{address: localhost}]\nend_timeout: 60\nsilence_timeout: 2.5\n")
    spec = ResourceSpec.from_payload(ResourceSpec.from_file(path).to_payload())
    assert (spec.end_timeout, spec.silence_timeout) == (60.0, 2.5)
    assert spec.start_timeout == Timeouts().start_timeout
    assert ResourceSpec.from_dict(spec.to_dict()).end_timeout == 60.0


def test_specs_are_frozen(two_machines: ResourceSpec) -> None:
    with pytest.raises(ValueError, match="frozen"):
        two_machines.nodes[0].port = 1


def test_workers_are_told_nothing_of_how_machines_are_reached() -> None:
    group = {"username": "ann", "key_file": "/keys/ann", "shared_envs": {"TOKEN": "s3cret"}, "host_key_checking": False}
    nodes = [{"address": "localhost", "chief": True}, {"address": "10.0.0.2", "ssh_config": "lab", "cpus": [0, 1]}]
    spec = ResourceSpec.from_dict({"nodes": nodes, "ssh": {"lab": group}, "strategy": {"builder": "PS"}})
    payload = spec.for_workers().to_payload()
    assert not any(word in payload for word in ("ann", "s3cret"))
    told = ResourceSpec.from_payload(payload)
    assert (told.workers, told.replicas, told.strategy) == (spec.workers, spec.replicas, spec.strategy)
    assert spec.ssh["lab"].shared_envs == {"TOKEN": "s3cret"}


def test_payload_carries_everything_without_the_file(two_machines: ResourceSpec) -> None:
    assert two_machines.file is not None
    os.remove(two_machines.file)
    received = ResourceSpec.from_payload(two_machines.to_payload())
    assert received == two_machines
    assert received.workers == two_machines.workers
    assert received.strategy is not None and two_machines.strategy is not None
    assert received.strategy.place("chunk_size") == two_machines.strategy.place("chunk_size")


def test_nodes_that_are_left_out_are_known_and_stay_on_the_chief() -> None:
    nodes = [{"address": f"10.0.0.{number}", "chief": number == 1} for number in (1, 2, 3)]
    checkpoint = {"folder": "saved", "every_steps": 9}
    spec = ResourceSpec.from_dict({"nodes": nodes, "min_nodes": 2, "rejoin_interval": 5, "checkpoint": checkpoint})
    left = spec.without(["10.0.0.2"])
    assert ([node.address for node in left.missing], left.complete(), spec.complete()) == (["10.0.0.2"], spec, spec)
    received = ResourceSpec.from_payload(left.to_payload())
    assert (received.nodes, received.rejoin_interval, received.missing) == (left.nodes, 5, ())
    assert left.takes_machines_in and not spec.without_outputs().takes_machines_in
    ResourceSpec.from_payload(spec.without_outputs().to_payload())


def test_dict_round_trip_is_the_identity(two_machines: ResourceSpec) -> None:
    content = two_machines.to_dict()
    again = ResourceSpec.from_dict(content)
    assert again.to_dict() == content == json.loads(json.dumps(content))
    assert (again.nodes, again.ssh, again.workers) == (two_machines.nodes, two_machines.ssh, two_machines.workers)
    assert ResourceSpec.from_dict(again.to_dict()) == again


def test_from_dict_leaves_its_argument_alone() -> None:
    settings = {"synchronizer": "PS"}
    given = {"nodes": [{"address": "a"}], "strategy": {"builder": "PS", "variables": {"x": settings}}}
    spec = ResourceSpec.from_dict(given)
    settings["synchronizer"] = "AllReduce"
    assert spec.strategy is not None
    assert spec.strategy.variables[0].settings == {"synchronizer": "PS"}
    assert given["nodes"] == [{"address": "a"}]


def test_check_gpus_names_the_first_that_is_not_there(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "cluster.yml"
    path.write_text("nodes:\n  - address: localhost\n    gpus:\n      - 0\n      - 3\n")
    spec = ResourceSpec.from_file(path)
    spec.check_gpus(4)
    with pytest.raises(ResourceSpecError) as caught:
        spec.check_gpus(2)
    assert caught.value.place is not None
    assert (caught.value.place.line, caught.value.place.key) == (5, "nodes[0].gpus[1]")
    assert caught.value.problem == "localhost has no GPU 3, TensorFlow sees 2 there; allowed: 0 to 1"
    with pytest.raises(
        ResourceSpecError, match="has no GPU 0, TensorFlow sees none there: no driver; allowed: none, na"
    ):
        spec.check_gpus(0, why=lambda: "no driver")


def test_check_gpus_asks_only_for_the_node_that_is_meant(two_machines: ResourceSpec) -> None:
    chief, other = two_machines.nodes
    two_machines.check_gpus(0, other)
    for node in (chief, None):
        with pytest.raises(ResourceSpecError, match="10.0.0.1 has no GPU 0, .*; allowed: none, name cpus instead"):
            two_machines.check_gpus(0, node)


def test_relative_paths_of_an_ssh_group_are_those_of_the_moment_at_which_it_is_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    group = {"key_file": "keys/lab", "known_hosts": "~/known"}
    spec = ResourceSpec.from_dict({"nodes": [{"address": "a", "ssh_config": "lab"}], "ssh": {"lab": group}})
    monkeypatch.chdir("/")
    assert spec.ssh["lab"].key_path == tmp_path / "keys" / "lab"
    assert spec.ssh["lab"].known_hosts_path == tmp_path / "home" / "known"
