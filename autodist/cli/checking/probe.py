"""The probe: on each machine, it answers what `autodist check` asks, and ends with its standard input.

`python -m autodist.cli.checking.probe SECONDS` ends after so many seconds in any case: a link that is cut ends nothing
by itself. It writes nothing on the machine, and TensorFlow is not imported in its process.
"""

from __future__ import annotations

import concurrent.futures
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from autodist.cli.checking.hardware import find_hardware, see_gpus
from autodist.cli.checking.protocol import (
    Answer,
    MachineAnswer,
    MachineQuestion,
    Question,
    Reach,
    Reached,
    Tick,
    Tock,
    line_of,
    question_in,
)
from autodist.cluster.addresses import split_host_and_port
from autodist.cluster.agent import find_facts
from autodist.cluster.ports import PortHeld
from autodist.cluster.protocol import Inspect

_BEAT_INTERVAL = 1.0
"""Seconds between two empty lines, by which the other end knows that the machine is still there."""

_MOST_AT_ONCE = 64
"""Connections that are tried at one time."""


class Probe:
    """Answers questions about this machine, and keeps its workers' ports meanwhile."""

    def __init__(self) -> None:
        self._held: list[PortHeld] = []

    def close(self) -> None:
        """Lets the ports go."""
        for held in self._held:
            held.release()

    def answer(self, question: Question) -> Answer:
        match question:
            case MachineQuestion():
                return self._look(question)
            case Tick():
                return Tock(at=time.time())
            case Reach():
                return Reached(problems=_unreachable(question.addresses, question.limit))

    def _look(self, look: MachineQuestion) -> MachineAnswer:
        asked = [Inspect(look.script, look.directory or os.sep, port, look.packages) for port in look.ports]
        found = [find_facts(inspect) for inspect in asked]
        for _, held in found:
            if held is not None:
                held.listen()  # so that other machines can see whether they reach it
                self._held.append(held)
        problems = dict.fromkeys(problem for facts, _ in found for problem in facts.problems)
        return MachineAnswer(
            facts=replace(found[0][0], problems=tuple(problems)),
            ports=tuple(facts.port for facts, _ in found),
            hardware=find_hardware(look.directory or os.path.expanduser("~")),
            seen_gpus=see_gpus() if look.counts_gpus else None,
        )


def _unreachable(addresses: Sequence[str], limit: float) -> dict[str, str]:
    """Why this machine cannot connect to some of the addresses."""
    with concurrent.futures.ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
        told = pool.map(lambda address: _why_not(address, limit), addresses)
        return {address: problem for address, problem in zip(addresses, told, strict=True) if problem is not None}


def _why_not(address: str, limit: float) -> str | None:
    """Why an address cannot be connected to; None if it can."""
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
    # Descriptors of its own: what anything else prints must not look like an answer, and Python must not wait at its
    # end for the threads below.
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    writing = threading.Lock()

    def write(line: bytes) -> None:
        with writing:
            outgoing.write(line)
            outgoing.flush()

    def answer_all() -> None:
        probe = Probe()
        while True:
            write(line_of(probe.answer(questions.get())))

    def beat() -> None:
        while True:
            time.sleep(_BEAT_INTERVAL)
            write(b"\n")

    # Beside this thread, so that the process ends with its standard input whatever it does.
    questions: queue.SimpleQueue[Question] = queue.SimpleQueue()
    for name, work in {"answers": answer_all, "beat": beat}.items():
        threading.Thread(target=work, name=f"autodist-{name}", daemon=True).start()
    for line in incoming:
        question = question_in(line)
        if question is not None:
            questions.put(question)
    return 0


if __name__ == "__main__":
    sys.exit(main())
