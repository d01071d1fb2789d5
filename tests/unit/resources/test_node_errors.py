"""Every error in a node is reported with file, line, key and allowed values."""

from __future__ import annotations

import pathlib

import pytest

from tests.unit.resources.faults import HEAD, NODE, Fault, assert_is_told

NODE_KEYS = "address, chief, cpus, gpus, network_bandwidth, port, ssh_config, workers"
INDICES = "a list of different whole numbers from 0, such as [0, 1]"

NODES = {
    "unknown key": (NODE + "prot: 1\n", 3, "nodes[0].prot", f"unknown key; did you mean port? allowed: {NODE_KEYS}"),
    "far key": (NODE + "zzz: 1\n", 3, "nodes[0].zzz", f"unknown key; allowed: {NODE_KEYS}"),
    "no address": (
        "nodes:\n  - {chief: true}\n",
        2,
        "nodes[0].address",
        "missing; allowed: a host name or an IP address",
    ),
    "address number": (
        "nodes:\n  - address: 10.1\n",
        2,
        "nodes[0].address",
        "10.1 is not allowed; allowed: a host name",
    ),
    "address empty": ("nodes:\n  - address: ''\n", 2, "nodes[0].address", '"" is not allowed; allowed: a host name'),
    "address port": (
        "nodes:\n  - address: 10.0.0.1:22\n",
        2,
        "nodes[0].address",
        "'10.0.0.1:22' is not an address; allowed: a host name or an IP address; a port belongs under `port`",
    ),
    "address option": (
        "nodes:\n  - address: -oX\n",
        2,
        "nodes[0].address",
        "'-oX' is not an address; allowed: a host name",
    ),
    "address range": ("nodes:\n  - address: 10.0.0.300\n", 2, "nodes[0].address", "'10.0.0.300' is not an address"),
    "address any": (
        "nodes:\n  - address: 0.0.0.0\n",
        2,
        "nodes[0].address",
        "0.0.0.0 is not the address of one machine",
    ),
    "address twice": (
        HEAD + "  - {address: b}\n  - address: 10.0.0.1\n",
        4,
        "nodes[2].address",
        "10.0.0.1 is also the address of nodes[0]; allowed: one node for each machine",
    ),
    "address spelled twice": (
        "nodes:\n  - {address: LocalHost, chief: true}\n  - address: 127.0.0.1\n",
        3,
        "nodes[1].address",
        "127.0.0.1 is also the address of nodes[0]",
    ),
    "no chief": (
        "nodes:\n  - address: a\n  - address: b\n",
        1,
        "nodes",
        "none of the 2 nodes is the chief; allowed: `chief: true` in exactly one",
    ),
    "two chiefs": (
        HEAD + "  - {address: b}\n  - address: c\n    chief: true\n",
        5,
        "nodes[2].chief",
        "true is not allowed, since nodes[0] (10.0.0.1) is the chief; allowed: `chief: true` in exactly one node",
    ),
    "chief text": (NODE + "chief: 'yes'\n", 3, "nodes[0].chief", '"yes" is not allowed; allowed: true or false'),
    "port low": (
        NODE + "port: 80\n",
        3,
        "nodes[0].port",
        "80 is not allowed; allowed: a whole number from 1024 to 65535",
    ),
    "port high": (
        NODE + "port: 65536\n",
        3,
        "nodes[0].port",
        "65536 is not allowed; allowed: a whole number from 1024",
    ),
    "port bool": (NODE + "port: yes\n", 3, "nodes[0].port", "true is not allowed; allowed: a whole number from 1024"),
    "last port high": (
        NODE + "cpus: [0, 1]\n    workers: 2\n    port: 65535\n",
        5,
        "nodes[0].port",
        "2 workers need the ports 65535 to 65536; allowed: 1024 to 65534",
    ),
    "index negative": (
        NODE + "gpus:\n      - 0\n      - -1\n",
        5,
        "nodes[0].gpus[1]",
        f"-1 is not allowed; allowed: {INDICES}",
    ),
    "index twice": (
        NODE + "gpus:\n      - 2\n      - 2\n",
        5,
        "nodes[0].gpus[1]",
        "2 is listed twice; allowed: each device once",
    ),
    "index text": (NODE + "cpus: [a]\n", 3, "nodes[0].cpus[0]", f'"a" is not allowed; allowed: {INDICES}'),
    "gpus number": (NODE + "gpus: 2\n", 3, "nodes[0].gpus", f"2 is not allowed; allowed: {INDICES}"),
    "both kinds": (
        NODE + "gpus: [0]\n    cpus: [0]\n",
        4,
        "nodes[0].cpus",
        "the node also has gpus; allowed: only one of the two",
    ),
    "chief without device": (
        NODE + "cpus: []\n",
        3,
        "nodes[0].cpus",
        "the chief's node has no device, and the script needs one to compute the outputs of its steps; "
        "allowed: one device or more; `cpus: []` is for other nodes, which then only own variables",
    ),
    "chief among others without device": (
        "nodes:\n  - address: a\n  - address: b\n    chief: true\n    gpus: []\n    cpus: []\n",
        6,
        "nodes[1].cpus",
        "the chief's node has no device",
    ),
    "workers without device": (
        HEAD + "  - address: b\n    cpus: []\n    workers: 2\n",
        5,
        "nodes[1].workers",
        "2 workers are too many for a node without replicas; allowed: 1",
    ),
    "workers zero": (NODE + "workers: 0\n", 3, "nodes[0].workers", "0 is not allowed; allowed: a whole number from 1"),
    "workers many": (
        NODE + "cpus: [0, 1]\n    workers: 3\n",
        4,
        "nodes[0].workers",
        "3 workers cannot share 2 devices evenly; allowed: 1, 2, or name more devices",
    ),
    "workers uneven": (
        NODE + "cpus: [0, 1, 2, 3]\n    workers: 3\n",
        4,
        "nodes[0].workers",
        "3 workers cannot share 4 devices evenly; allowed: 1, 2, 4, or name more devices",
    ),
    "bandwidth zero": (
        NODE + "network_bandwidth: 0\n",
        3,
        "nodes[0].network_bandwidth",
        "0 is not allowed; allowed: a number above 0, in Gbit/s",
    ),
    "bandwidth endless": (
        NODE + "network_bandwidth: .inf\n",
        3,
        "nodes[0].network_bandwidth",
        "Infinity is not allowed",
    ),
}


@pytest.mark.parametrize("fault", NODES.values(), ids=NODES.keys())
def test_error_names_file_line_key_and_what_is_allowed(tmp_path: pathlib.Path, fault: Fault) -> None:
    assert_is_told(tmp_path, fault)
