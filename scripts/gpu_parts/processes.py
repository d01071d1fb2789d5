"""The processes of a check: `gpu_parts.training` on one device, on the GPUs of this process, or on two workers."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent.parent
LOGGED = re.compile(r"[IWE]\d{4} \d|\d{4}-\d\d-\d\d \S+: [IWE] |WARNING: All log messages before absl")
"""Start of a line of TensorFlow's log."""
LAST = 2000
"""Number of last characters that are kept of a process's errors."""


class CheckError(Exception):
    """A check has failed; the last line of its text is the reason."""


@dataclass(frozen=True)
class Run:
    """One process of a training.

    Attributes:
        options: the arguments of `gpu_parts.training`.
        environment: environment variables that it has in addition.
    """

    options: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Ended:
    """A process that has ended.

    Attributes:
        status: its exit status; None: it was killed at the time limit.
        output: its output.
        errors: the end of its standard error.
    """

    status: int | None
    output: str
    errors: str

    def report(self) -> dict[str, Any]:
        """Returns the report of a training, its last line.

        Raises:
            CheckError: the process has failed.
        """
        if self.status == 0:
            return dict(json.loads(self.output.splitlines()[-1]))
        end = "was killed at the time limit" if self.status is None else f"ended with status {self.status}"
        raise CheckError(f"{self.errors}\na training process {end}; its last line: {last_line(self.errors)}")


def last_line(text: str) -> str:
    """Returns the last line, if possible none of TensorFlow's log: it may log more after an error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if not LOGGED.match(line)), lines[-1] if lines else "none")


def one(machines: str, *options: str, **environment: str) -> Run:
    """Returns a training in one process: `alone` on one device without AutoDist, or `local` on all GPUs."""
    visible = {"CUDA_VISIBLE_DEVICES": _visible(1)[0]} if machines == "alone" else {}
    return Run((machines, *options), visible | environment)


def two_workers(gpus: int, *options: str, **environment: str) -> list[Run]:
    """Returns a training on two workers, the chief first, each on a GPU; both on the same one if there is only one.

    AutoDist refuses two workers of one machine on the same GPU. They therefore join like workers of two machines, whose
    addresses are those of the loopback device.
    """
    with ExitStack() as stack:
        hosts = ("127.0.0.1", "127.0.0.2")
        sockets = [stack.enter_context(socket.create_server((host, 0))) for host in hosts]
        addresses = [f"{host}:{listening.getsockname()[1]}" for host, listening in zip(hosts, sockets, strict=True)]
    secret, visible = secrets.token_hex(16), _visible(gpus)
    runs = []
    for index in range(2):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        own = {"TF_CONFIG": json.dumps(config), "AUTODIST_SECRET": secret}
        own["CUDA_VISIBLE_DEVICES"] = visible[index % len(visible)]
        runs.append(Run(("given", *options), own | environment))
    return runs


def run(runs: Sequence[Run], limit: float) -> list[Ended]:
    """Runs processes at the same time, and kills those that have not ended within `limit` seconds."""
    end = time.monotonic() + limit
    with ExitStack() as stack:
        files = [[stack.enter_context(tempfile.TemporaryFile("w+b")) for _ in range(2)] for _ in runs]
        processes = []
        statuses: list[int | None] = []
        try:
            for each, (output, errors) in zip(runs, files, strict=True):
                command = [sys.executable, "-m", "gpu_parts.training", *each.options]
                environment = os.environ | each.environment
                processes.append(
                    subprocess.Popen(
                        command, cwd=SCRIPTS, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors
                    )
                )
            for process in processes:
                try:
                    statuses.append(process.wait(max(0.0, end - time.monotonic())))
                except subprocess.TimeoutExpired:
                    statuses.append(None)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [[_text(file) for file in pair] for pair in files]
    return [Ended(status, output, errors[-LAST:]) for status, (output, errors) in zip(statuses, texts, strict=True)]


def _visible(gpus: int) -> list[str]:
    """Returns the first visible GPUs, under the names that CUDA_VISIBLE_DEVICES takes."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (given.split(",") if given else [str(number) for number in range(gpus)])[:gpus]


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace"))
