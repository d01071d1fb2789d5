"""Derives the machines of a given cluster from the `Hello` messages of its processes. Pure functions."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autodist.cluster.addresses import is_loopback, split_host_and_port
from autodist.cluster.environments.handshake import Hello
from autodist.cluster.environments.roster import Arrival
from autodist.errors import ClusterError
from autodist.resources import Allotment


@dataclass(frozen=True)
class Machines:
    """The machines, as input of a ResourceSpec.

    Attributes:
        nodes: nodes as in the YAML, the chief's first.
        allotments: devices and cores of each worker.
        processes: process index of each worker. Workers are numbered machine by machine, and the scheduler's processes
            may have another order.
    """

    nodes: tuple[dict[str, Any], ...]
    allotments: tuple[Allotment, ...]
    processes: tuple[int, ...]


def machines_of(
    own: Hello, arrivals: Sequence[Arrival], replicas: int | None = None, addresses: Sequence[str] = ()
) -> Machines:
    """Returns the machines, and assigns the processes to workers.

    Args:
        own: the `Hello` of the chief.
        arrivals: all other processes, in any order.
        replicas: replicas of each worker; None for one per GPU, or one on its CPU.
        addresses: "host:port" of each process's server, if the environment has them.

    Raises:
        ClusterError: processes on one machine have different devices, or too few.
    """
    hellos = [own, *(arrival.hello for arrival in sorted(arrivals, key=lambda arrival: arrival.hello.index))]
    hosts = _hosts(own, arrivals) if not addresses else [split_host_and_port(address)[0] for address in addresses]
    ports = dict(enumerate(split_host_and_port(address)[1] for address in addresses))
    groups: dict[str, list[Hello]] = {}
    for hello, host in zip(hellos, hosts, strict=True):
        groups.setdefault(host, []).append(hello)
    nodes: list[dict[str, Any]] = []
    allotments: list[Allotment] = []
    for host, group in groups.items():
        devices = _devices(host, group, replicas)
        kind = devices[0][0].partition(":")[0]
        numbers = list(range(len(devices[0]) * len(group)))
        nodes.append({"address": host, f"{kind}s": numbers, "workers": len(group), "chief": not nodes})
        allotments += [
            Allotment(names, _cores(hello, group), ports.get(hello.index))
            for hello, names in zip(group, devices, strict=True)
        ]
    return Machines(
        tuple(nodes),
        tuple(allotments),
        tuple(hello.index for group in groups.values() for hello in group),
    )


def plain_host(host: str) -> str:
    """Returns an address without its IPv6 scope or mapping: "::ffff:10.0.0.1" → "10.0.0.1"."""
    try:
        parsed = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)


def _hosts(own: Hello, arrivals: Sequence[Arrival]) -> list[str]:
    """Returns the address of each process by its index: the address that others reach, the same for a whole machine."""
    ordered = sorted(arrivals, key=lambda arrival: arrival.hello.index)
    remote = [arrival for arrival in ordered if not _is_on_chief_machine(arrival)]
    reached = [arrival.to_host for arrival in remote or ordered]
    chief = own.address or next(iter(reached), "127.0.0.1")
    return [chief, *(a.hello.address or (chief if _is_on_chief_machine(a) else a.from_host) for a in ordered)]


def _is_on_chief_machine(arrival: Arrival) -> bool:
    """Returns True if a process runs on the chief's machine: its connection then has equal addresses at both ends."""
    return arrival.from_host == arrival.to_host or is_loopback(arrival.from_host)


def _devices(host: str, group: Sequence[Hello], replicas: int | None) -> list[tuple[str, ...]]:
    """Returns the names of the devices of each process on one machine, as in the process's TensorFlow."""
    seen = [set(hello.gpus) for hello in group]
    if not any(seen):
        return [tuple(f"cpu:{number}" for number in range(replicas or 1))] * len(group)
    counts_text = ", ".join(f"process {hello.index} sees {len(hello.gpus)}" for hello in group)
    if len(group) > 1 and all(one == seen[0] for one in seen):  # the scheduler has not assigned them
        each = replicas or len(seen[0]) // len(group)
        if not 0 < each * len(group) <= len(seen[0]):
            raise ClusterError(
                f"{host}: {len(group)} processes share {len(seen[0])} GPUs, too few for {each or 1} each; start fewer "
                "processes there, or set CUDA_VISIBLE_DEVICES to nothing for all, to train on CPUs."
            )
        return [tuple(f"gpu:{at * each + number}" for number in range(each)) for at in range(len(group))]
    if sum(map(len, seen)) > len(set().union(*seen)):
        raise ClusterError(
            f"{host}: some GPUs are visible to several processes and some are not ({counts_text}); give each process "
            "its own GPUs, or every process all of them."
        )
    counts = {replicas or len(one) for one in seen}
    if len(counts) > 1 or min(map(len, seen)) < min(counts):
        required = f", and each needs {replicas} replicas" if replicas else ""
        raise ClusterError(f"{host}: of its GPUs {counts_text}{required}; give each process there the same number.")
    return [tuple(f"gpu:{number}" for number in range(min(counts)))] * len(group)


def _cores(hello: Hello, group: Sequence[Hello]) -> int:
    """Returns the number of cores of a process: those that it may run on, divided by the processes that share them."""
    cores = set(hello.cores)
    sharing = sum(bool(cores & set(other.cores)) for other in group)
    share = max(1, len(cores) // max(1, sharing))
    return share if hello.given_cores is None else max(1, min(share, hello.given_cores))
