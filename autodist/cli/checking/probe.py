"""The probe: answers the requests of `autodist check` on each machine, and ends with its standard input.

`python -m autodist.cli.checking.probe SECONDS [--silence SECONDS]` ends after SECONDS in any case. Over SSH, it also
ends after so many seconds without a message. It writes nothing on the machine, and its process does not import
TensorFlow.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import BinaryIO

from autodist.cli.checking.messages import (
    GPU,
    ConnectAnswer,
    ConnectRequest,
    Hardware,
    Interface,
    MachineAnswer,
    MachineRequest,
    SeenGPUs,
    TimeAnswer,
    TimeRequest,
)
from autodist.cluster.addresses import split_host_and_port
from autodist.cluster.agent import Agent, find_facts, take_streams
from autodist.cluster.hardware import MachineMemory, available_cores, interface_addresses, query_gpus
from autodist.cluster.ports import ReservedPort
from autodist.cluster.protocol import Inspect, Message, ProtocolError, decode
from autodist.waits import start_thread

_MAX_AT_ONCE = 64
"""Number of connections tried at the same time."""


class Probe(Agent):
    """Answers requests about this machine, and reserves its workers' ports meanwhile. It starts no script."""

    def __init__(self, incoming: BinaryIO, outgoing: BinaryIO, silence_timeout: float | None = None) -> None:
        super().__init__(incoming, outgoing, 0.0, silence_timeout)
        self._reserved: list[ReservedPort] = []
        self._requests: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # In a thread, so that the process ends with its standard input while it answers.
        self._answering = start_thread("answers", self._answer_all)
        start_thread("error", self._end_after_error)

    def serve(self) -> None:
        super().serve()
        for reserved in self._reserved:
            reserved.release()

    def _handle(self, message: Message) -> bool:
        if isinstance(message, MachineRequest | TimeRequest | ConnectRequest):
            self._requests.put(message)
        return True

    def _answer_all(self) -> None:
        while True:
            self.send(self.answer(self._requests.get()))

    def _end_after_error(self) -> None:
        """Ends the process when an answer has failed and its error is printed, which the chief reports."""
        self._answering.join()
        self._ended.set()

    def answer(self, request: Message) -> Message:
        match request:
            case MachineRequest():
                return self._inspect(request)
            case ConnectRequest():
                return ConnectAnswer(_unreachable(request.addresses, request.limit))
        return TimeAnswer(time.time())

    def _inspect(self, request: MachineRequest) -> MachineAnswer:
        directory = request.directory or os.sep
        about = Inspect(request.script, directory, None, request.packages, (), request.sets_firewall)
        found = [find_facts(replace(about, port=port)) for port in request.ports]
        for _, reserved in found:
            if reserved is not None:
                reserved.listen()  # so that other machines can test the connection
                self._reserved.append(reserved)
        problems = dict.fromkeys(problem for facts, _ in found for problem in facts.problems)
        return MachineAnswer(
            facts=replace(found[0][0], problems=tuple(problems)),
            ports=tuple(facts.port for facts, _ in found),
            hardware=find_hardware(request.directory or os.path.expanduser("~")),
            seen_gpus=see_gpus() if request.counts_gpus else None,
        )


def _unreachable(addresses: Sequence[str], limit: float) -> dict[str, str]:
    """Returns the addresses that this machine cannot connect to, with the reasons."""
    with concurrent.futures.ThreadPoolExecutor(_MAX_AT_ONCE) as pool:
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
    options = argparse.ArgumentParser()
    options.add_argument("limit", type=int)
    options.add_argument("--silence", type=float)
    limits, _ = options.parse_known_args()  # a chief of another version, which is reported later, may pass more options
    signal.alarm(limits.limit)
    Probe(*take_streams(), limits.silence).serve()
    return 0


_DRIVER_LIMIT, _TENSORFLOW_LIMIT = 20.0, 60.0
"""Seconds; a driver that hangs must not hang the check."""


def find_hardware(directory: str) -> Hardware:
    """Returns the hardware of this machine.

    Args:
        directory: selects the file system to report; if it does not exist, that of the home directory.
    """
    memory = MachineMemory.now()
    disk, disk_free = _disk(directory)
    return Hardware(
        cores=available_cores(),
        memory=memory.total,
        memory_free=memory.free,
        disk=disk,
        disk_free=disk_free,
        gpus=tuple(_gpus()),
        interfaces=tuple(Interface(name=name, address=address) for name, address in interface_addresses()),
    )


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
        seen = decode(done.stdout.splitlines()[-1])
        assert isinstance(seen, SeenGPUs), "the only message of that process"
        return seen
    except (IndexError, ProtocolError):
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return SeenGPUs(count=0, reason=lines[-1] if lines else f"TensorFlow ended with status {done.returncode}")


def _disk(directory: str) -> tuple[int, int]:
    for place in (directory, os.path.expanduser("~")):
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(place)
            return usage.total, usage.free
    return 0, 0


def _gpus() -> Iterator[GPU]:
    # None without a working driver: for GPUs that the YAML names, the report shows TensorFlow's reason.
    for line in query_gpus("memory.total,name", _DRIVER_LIMIT):
        memory, _, name = line.partition(", ")
        yield GPU(name=name.strip(), memory=int(memory) * 1024**2 if memory.strip().isdecimal() else 0)


if __name__ == "__main__":
    sys.exit(main())
