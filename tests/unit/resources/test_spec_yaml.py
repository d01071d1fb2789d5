"""YAML's own features are read as its users expect."""

from __future__ import annotations

import pathlib

from autodist.resources import ResourceSpec
from tests.unit.resources.faults import HEAD


def test_a_byte_order_mark_is_no_error(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "cluster.yml"
    path.write_bytes(b"\xef\xbb\xbf" + HEAD.encode())
    assert ResourceSpec.from_file(path).chief.address == "10.0.0.1"


def test_merged_mappings_are_read_and_own_keys_win(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "cluster.yml"
    base = "nodes:\n  - &base\n    address: a\n    cpus: [0, 1]\n    workers: 2\n    chief: true\n"
    path.write_text(base + "  - <<: *base\n    chief: false\n    address: b\n")
    first, second = ResourceSpec.from_file(path).nodes
    assert (second.address, second.chief, second.cpus, second.workers) == ("b", False, first.cpus, 2)


def test_dates_stay_text(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "cluster.yml"
    path.write_text(HEAD + "ssh: {lab: {shared_envs: {DAY: 2024-01-31}}}\n")
    assert ResourceSpec.from_file(path).ssh["lab"].shared_envs == {"DAY": "2024-01-31"}


def test_numbers_that_everybody_reads_alike_are_taken(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "cluster.yml"
    for written, port in (("2_000", 2000), ("0x1F00", 7936), ("+2000", 2000)):
        path.write_text(f"nodes: [{{address: a, port: {written}, cpus: [00, 01]}}]\n")
        (node,) = ResourceSpec.from_file(path).nodes
        assert (node.port, node.cpus) == (port, (0, 1))


def test_thousands_of_nodes_and_devices_are_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "cluster.yml"
    base = "nodes:\n  - &base {address: a, chief: true, cpus: [0, 1]}\n"
    path.write_text(base + "".join(f"  - {{<<: *base, chief: false, address: b{i}}}\n" for i in range(1000)))
    spec = ResourceSpec.from_file(path)
    assert len(spec.replicas) == 2002
    assert spec.source.line(("nodes", 1000, "address")) == 1002
    path.write_text(f"nodes:\n  - {{address: a, workers: 5000, cpus: [{', '.join(map(str, range(10_000)))}]}}\n")
    assert len(ResourceSpec.from_file(path).replicas) == 10_000


def test_another_users_home_directory_is_left_as_it_is() -> None:
    spec = ResourceSpec.from_dict({"nodes": [{"address": "a"}], "ssh": {"lab": {"key_file": "~nobody-here/key"}}})
    assert str(spec.ssh["lab"].key_path) == "~nobody-here/key"
