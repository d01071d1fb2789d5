"""The YAML files beside the examples say what their comments promise."""

from __future__ import annotations

import pathlib

import pytest

from autodist.resources import ResourceSpec
from autodist.strategies.reader import builder_from_section

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"


def test_each_file_is_tested_here() -> None:
    files = {path.name for path in EXAMPLES.glob("*.yml")}
    assert files == {"cluster.yml", "cluster_ps.yml", "cluster_parallax.yml", "two_hosts.yml"}


@pytest.mark.parametrize(
    ("file", "builder"),
    [("cluster.yml", "AllReduce"), ("cluster_ps.yml", "PS"), ("cluster_parallax.yml", "Parallax")],
)
def test_a_local_cluster_has_two_workers_of_two_replicas(file: str, builder: str) -> None:
    spec = ResourceSpec.from_file(EXAMPLES / file)
    assert [worker.devices for worker in spec.workers] == [("cpu:0", "cpu:1")] * 2
    assert all(node.is_local for node in spec.nodes)
    assert type(builder_from_section(spec.strategy)).__name__ == builder


def test_two_hosts_are_two_workers_of_which_the_second_is_reached_over_ssh() -> None:
    spec = ResourceSpec.from_file(EXAMPLES / "two_hosts.yml")
    first, second = spec.nodes
    assert (first.is_local, second.is_local) == (True, False)
    assert [worker.node.address for worker in spec.workers] == [first.address, second.address]
    group = spec.ssh_group(second)
    assert group is not None and group.username == "ubuntu"
