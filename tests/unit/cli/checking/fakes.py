"""Machines simulated by threads, for the probes of `autodist check`."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import IO

from autodist.cli.checking.check_machines import CheckedMachine
from autodist.cli.checking.messages import Hardware, Interface, MachineAnswer, SeenGPUs
from autodist.cli.checking.probe import Probe
from autodist.cluster.protocol import Facts, decode, encode
from autodist.resources import ResourceSpec
from autodist.runtime.clocks import ClockOffset

FACTS = Facts("3.11.7", "2.21.0", 15000, (), "0.1.0", {"keras": "3.15.1"}, "0a1b")
HARDWARE = Hardware(
    cores=8, memory=16 << 30, memory_free=8 << 30, disk=100 << 30, disk_free=50 << 30,
    interfaces=(Interface(name="eth0", address="10.0.0.1/24"),),
)  # fmt: skip
CLOCK = ClockOffset(0.0, 0.001)
THREE = ResourceSpec.from_dict(
    {"nodes": [{"address": f"10.0.0.{k}", "chief": k == 1, "port": 15000} for k in (1, 2, 3)]}
)


def found(
    index: int = 0,
    spec: ResourceSpec = THREE,
    seen_gpus: SeenGPUs | None = None,
    hardware: Hardware = HARDWARE,
    clock: ClockOffset = CLOCK,
    unreachable: Mapping[str, str] | None = None,
    **facts: object,
) -> CheckedMachine:
    """Returns a machine without faults, except for the arguments."""
    node = spec.nodes[index]
    workers = tuple(worker for worker in spec.workers if worker.node == node)
    ports = tuple(15000 + position for position, _ in enumerate(workers))
    machine = MachineAnswer(facts=replace(FACTS, **facts), ports=ports, hardware=hardware, seen_gpus=seen_gpus)  # type: ignore[arg-type]
    return CheckedMachine(node, workers, machine, None, clock, unreachable or {})


def lost(index: int, problem: str) -> CheckedMachine:
    """A machine that was not reached."""
    node = THREE.nodes[index]
    return CheckedMachine(node, tuple(worker for worker in THREE.workers if worker.node == node), problem=problem)


Answering = Callable[[Probe, bytes], bytes | None]
"""Returns the answer to a line; None: the connection ends."""


def probing(probe: Probe, line: bytes) -> bytes:
    """Returns the answer of a probe on this machine."""
    return encode(probe.answer(decode(line)))


@dataclass
class FakeChannel:
    """To a machine that is a thread."""

    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]
    is_closed: bool = False

    def wait(self, timeout: float | None = None) -> int | None:
        return 0

    def close(self) -> None:
        self.is_closed = True


@dataclass
class FakeTransport:
    """Starts a thread in place of a probe.

    Attributes:
        answering: its answers.
        greeting: its first output.
        complaint: its output on standard error.
    """

    answering: Answering = probing
    greeting: bytes = b""
    complaint: bytes = b""

    def open(self, count: int, module: str, *arguments: str) -> tuple[FakeChannel, ...]:
        asking, asked = os.pipe()
        answered, answers = os.pipe()
        complaining, complaints = os.pipe()
        os.write(complaints, self.complaint)
        os.close(complaints)
        threading.Thread(target=self._serve, args=(asking, answers), daemon=True).start()
        self.channel = FakeChannel(os.fdopen(asked, "wb"), os.fdopen(answered, "rb"), os.fdopen(complaining, "rb"))
        return (self.channel,)

    def _serve(self, asking: int, answers: int) -> None:
        with os.fdopen(asking, "rb") as questions, os.fdopen(answers, "wb", buffering=0) as answering:
            answering.write(self.greeting)
            probe = Probe(io.BytesIO(), io.BytesIO())
            for line in questions:
                answer = self.answering(probe, line)
                if answer is None:
                    break
                answering.write(answer)
            probe.serve()  # without input, it ends and releases the ports
