"""The probe: answers the requests of `autodist check` on each machine, and ends with its standard input.

`python -m autodist.cli.checking.probe SECONDS` ends after SECONDS in any case, since a cut link does not end it. It
writes nothing on the machine, and its process does not import TensorFlow.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import ipaddress
import math
import os
import queue
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pydantic

from autodist.cli.checking.protocol import (
    GPU,
    Answer,
    Hardware,
    Interface,
    MachineAnswer,
    MachineQuestion,
    Question,
    Reach,
    Reached,
    SeenGPUs,
    Tick,
    Tock,
    line_of,
    question_in,
)
from autodist.cluster.addresses import split_host_and_port
from autodist.cluster.agent import find_facts
from autodist.cluster.ports import ReservedPort
from autodist.cluster.protocol import Inspect

_HEARTBEAT_INTERVAL = 1.0
"""Seconds between two empty lines, the heartbeat of the machine."""

_MOST_AT_ONCE = 64
"""Number of connections tried at the same time."""


class Probe:
    """Answers requests about this machine, and reserves its workers' ports meanwhile."""

    def __init__(self) -> None:
        self._reserved: list[ReservedPort] = []

    def close(self) -> None:
        """Releases the ports."""
        for reserved in self._reserved:
            reserved.release()

    def answer(self, question: Question) -> Answer:
        match question:
            case MachineQuestion():
                return self._look(question)
            case Tick():
                return Tock(at=time.time())
            case Reach():
                return Reached(problems=_unreachable(question.addresses, question.limit))

    def _look(self, look: MachineQuestion) -> MachineAnswer:
        inspections = [Inspect(look.script, look.directory or os.sep, port, look.packages) for port in look.ports]
        found = [find_facts(inspect) for inspect in inspections]
        for _, reserved in found:
            if reserved is not None:
                reserved.listen()  # so that other machines can test the connection
                self._reserved.append(reserved)
        problems = dict.fromkeys(problem for facts, _ in found for problem in facts.problems)
        return MachineAnswer(
            facts=replace(found[0][0], problems=tuple(problems)),
            ports=tuple(facts.port for facts, _ in found),
            hardware=find_hardware(look.directory or os.path.expanduser("~")),
            seen_gpus=see_gpus() if look.counts_gpus else None,
        )


def _unreachable(addresses: Sequence[str], limit: float) -> dict[str, str]:
    """Returns the addresses that this machine cannot connect to, with the reasons."""
    with concurrent.futures.ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        reasons = pool.map(lambda address: _why_not(address, limit), addresses)
        return {address: problem for address, problem in zip(addresses, reasons, strict=True) if problem is not None}


def _why_not(address: str, limit: float) -> str | None:
    """Returns the reason why a connection to an address fails; None if it succeeds."""
    host, _ = split_host_and_port(address)
    try:
        with socket.create_connection(split_host_and_port(address), timeout=limit):
            return None
    except socket.gaierror as error:
        return f"the name {host} cannot be resolved there ({error.strerror})"
    except TimeoutError:
        return f"no answer within {limit:g} s"
    except OSError as error:
        return error.strerror or str(error)


def main() -> int:
    signal.alarm(int(sys.argv[1]))
    # Separate descriptors: other output must not look like an answer, and Python must not wait for the threads below
    # when it exits.
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    writing = threading.Lock()

    def write(line: bytes) -> None:
        with writing:
            outgoing.write(line)
            outgoing.flush()

    def answer_all() -> None:
        probe = Probe()
        with outgoing:  # closed after an error, so that the chief does not wait for an answer
            while True:
                write(line_of(probe.answer(questions.get())))

    def beat() -> None:
        while True:
            time.sleep(_HEARTBEAT_INTERVAL)
            write(b"\n")

    # In threads, so that the process ends with its standard input, whatever the threads do.
    questions: queue.SimpleQueue[Question] = queue.SimpleQueue()
    for name, work in {"answers": answer_all, "beat": beat}.items():
        threading.Thread(target=work, name=f"autodist-{name}", daemon=True).start()
    for line in incoming:
        question = question_in(line)
        if question is not None:
            questions.put(question)
    return 0


_DRIVER_LIMIT, _TENSORFLOW_LIMIT = 20.0, 60.0
"""Seconds; a driver that hangs must not hang the check."""

_CGROUP = Path("/sys/fs/cgroup")
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B


def find_hardware(directory: str) -> Hardware:
    """Returns the hardware of this machine.

    Args:
        directory: selects the file system to report; if it does not exist, that of the home directory.
    """
    memory, memory_free = _memory()
    disk, disk_free = _disk(directory)
    return Hardware(
        cores=_cores(), memory=memory, memory_free=memory_free, disk=disk, disk_free=disk_free, gpus=tuple(_gpus()),
        interfaces=tuple(_interfaces()),
    )  # fmt: skip


def see_gpus() -> SeenGPUs:
    """Returns the GPUs that TensorFlow sees, from a separate process, since TensorFlow takes the memory of the GPUs."""
    command = [sys.executable, "-P", "-m", "autodist.cli.checking.seen_gpus"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TENSORFLOW_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return SeenGPUs(count=0, reason=f"TensorFlow did not answer within {_TENSORFLOW_LIMIT:g} s")
    try:
        return SeenGPUs.model_validate_json(done.stdout.splitlines()[-1])
    except (IndexError, pydantic.ValidationError):
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return SeenGPUs(count=0, reason=lines[-1] if lines else f"TensorFlow ended with status {done.returncode}")


def _cores() -> int:
    """Returns the number of cores that this process may use, within the limits of its container."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def _memory() -> tuple[int, int]:
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            found[name] = int(value.split()[0]) * 1024
    total, free = found.get("MemTotal", 0), found.get("MemAvailable", 0)
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        if limit < total:
            total, free = limit, min(free, limit - int((_CGROUP / "memory.current").read_text()))
    return total, free


def _disk(directory: str) -> tuple[int, int]:
    for place in (directory, os.path.expanduser("~")):
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(place)
            return usage.total, usage.free
    return 0, 0


def _gpus() -> Iterator[GPU]:
    command = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_DRIVER_LIMIT, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return  # no working driver: for GPUs that the YAML names, the report shows TensorFlow's reason
    for line in listing.decode(errors="replace").splitlines():
        memory, _, name = line.partition(", ")
        yield GPU(name=name.strip(), memory=int(memory) * 1024**2 if memory.strip().isdecimal() else 0)


def _interfaces() -> Iterator[Interface]:
    for _, name in socket.if_nameindex():
        if name == "lo":
            continue
        address = _address_of(name)
        if address is not None:
            yield Interface(name=name, address=address)
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, length, _, _, name = line.split()
            found = ipaddress.ip_interface((int(digits, 16).to_bytes(16, "big"), int(length, 16)))
            if name != "lo" and not found.ip.is_link_local:
                yield Interface(name=name, address=str(found))


def _address_of(interface: str) -> str | None:
    """Returns the first IPv4 address of an interface; None if it has none."""
    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, contextlib.suppress(OSError):
        address, mask = (
            socket.inet_ntoa(fcntl.ioctl(any_socket, what, request)[20:24]) for what in (_SIOCGIFADDR, _SIOCGIFNETMASK)
        )
        return str(ipaddress.ip_interface(f"{address}/{mask}"))
    return None


if __name__ == "__main__":
    sys.exit(main())
