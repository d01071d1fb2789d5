"""What YAML itself offers is read as its writers expect."""

from __future__ import annotations

import pathlib

from autodist.resources import ResourceSpec

HEAD = "nodes:\n  - {address: 10.0.0.1, chief: true}\n"


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
