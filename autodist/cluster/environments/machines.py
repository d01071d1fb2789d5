"""The machines of a given cluster, of what its processes have told. Pure functions."""

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
    """What a ResourceSpec is made of.

    Attributes:
        nodes: as the YAML would hold them, the chief's first.
        allotments: of their workers.
        processes: index of the process that is each worker. Workers are counted machine by machine, whatever order the
            scheduler dealt its processes out in.
    """

    nodes: tuple[dict[str, Any], ...]
    allotments: tuple[Allotment, ...]
    processes: tuple[int, ...]


def machines_of(
    own: Hello, arrivals: Sequence[Arrival], replicas: int | None = None, addresses: Sequence[str] = ()
) -> Machines:
    """Machines, and who is which worker.

    Args:
        own: what the chief would say of itself.
        arrivals: all others, in any order.
        replicas: of each worker; None: one for each of its GPUs, or one on its CPU.
        addresses: "host:port" of each process's server, where the environment names them.

    Raises:
        ClusterError: processes on one machine have different devices, or too few.
    """
    told = [own, *(arrival.hello for arrival in sorted(arrivals, key=lambda arrival: arrival.hello.index))]
    hosts = _hosts(own, arrivals) if not addresses else [split_host_and_port(address)[0] for address in addresses]
    ports = dict(enumerate(split_host_and_port(address)[1] for address in addresses))
    groups: dict[str, list[Hello]] = {}
    for hello, host in zip(told, hosts, strict=True):
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
    """An address without what the socket says beside it: "::ffff:10.0.0.1" is 10.0.0.1 over IPv6's socket."""
    try:
        parsed = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)


def _hosts(own: Hello, arrivals: Sequence[Arrival]) -> list[str]:
    """The address of each process by its index: as others reach it, one for each machine."""
    ordered = sorted(arrivals, key=lambda arrival: arrival.hello.index)
    far = [arrival for arrival in ordered if not _is_beside(arrival)]
    reached = [arrival.to_host for arrival in far or ordered]
    chief = own.address or next(iter(reached), "127.0.0.1")
    return [chief, *(a.hello.address or (chief if _is_beside(a) else a.from_host) for a in ordered)]


def _is_beside(arrival: Arrival) -> bool:
    """Whether a process runs on the chief's machine: who connects to an own address does so from it."""
    return arrival.from_host == arrival.to_host or is_loopback(arrival.from_host)


def _devices(host: str, group: Sequence[Hello], replicas: int | None) -> list[tuple[str, ...]]:
    """Names of the devices of each process on one machine, as its own TensorFlow calls them."""
    seen = [set(hello.gpus) for hello in group]
    if not any(seen):
        return [tuple(f"cpu:{number}" for number in range(replicas or 1))] * len(group)
    told = ", ".join(f"process {hello.index} sees {len(hello.gpus)}" for hello in group)
    if len(group) > 1 and all(one == seen[0] for one in seen):  # no scheduler has dealt them out
        each = replicas or len(seen[0]) // len(group)
        if not 0 < each * len(group) <= len(seen[0]):
            raise ClusterError(
                f"{host}: {len(group)} processes share {len(seen[0])} GPUs, too few for {each or 1} each; start fewer "
                "processes there, or set CUDA_VISIBLE_DEVICES to nothing for all, to train on CPUs."
            )
        return [tuple(f"gpu:{at * each + number}" for number in range(each)) for at in range(len(group))]
    if sum(map(len, seen)) > len(set().union(*seen)):
        raise ClusterError(
            f"{host}: some GPUs are visible to several processes and some are not ({told}); give each process its own, "
            "or all of them all."
        )
    counts = {replicas or len(one) for one in seen}
    if len(counts) > 1 or min(map(len, seen)) < min(counts):
        asked = f", and {replicas} replicas are asked of each" if replicas else ""
        raise ClusterError(f"{host}: of its GPUs {told}{asked}; give each process there as many.")
    return [tuple(f"gpu:{number}" for number in range(min(counts)))] * len(group)


def _cores(hello: Hello, group: Sequence[Hello]) -> int:
    """How many a process has: those that it may run on, shared out among the processes that may run on the same."""
    own = set(hello.cores)
    beside = sum(bool(own & set(other.cores)) for other in group)
    share = max(1, len(own) // max(1, beside))
    return share if hello.given_cores is None else max(1, min(share, hello.given_cores))
