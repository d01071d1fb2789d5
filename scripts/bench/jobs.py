"""Jobs: the processes of one way of training, started, run in turns, and ended by their ids."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from bench.frameworks import PACKAGES, python_of
from bench.relay import relayed_bytes

SCRIPTS = pathlib.Path(__file__).resolve().parent.parent
"""Working directory of the processes, so that they find this package."""
ANSWER = b"BENCH "
_OF_WORKERS = ("multi-worker", "dtensor", "transfer", "jax", "torch")
"""Ways whose processes are all workers."""
RECEIVER_QUEUE, INBOX_LOOP = TRANSPORTS = ("a queue of the receiver", "an inbox loop")
"""The transports of a transfer: the sender puts data into a queue of the receiver; or, as in AutoDist's steps, a loop
of the receiver moves it from a queue of the sender."""
_HIDDEN_GPUS = {"CUDA_VISIBLE_DEVICES": "-1"}
_SHARED_GPUS = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}  # or the first process would take all their memory
GRACE = 10.0
"""Seconds that a process has to end after the request."""


class JobError(Exception):
    """A timed training did not run; holds its last lines of output."""


@dataclass(frozen=True)
class Way:
    """One way of training a model.

    Attributes:
        name: alone, autodist, mesh (of AutoDist, with global batches), dtensor, mirrored, multi-worker,
            parameter-server, evaluation (of AutoDist), evaluation-alone, jax or torch (of other frameworks), or
            transfer: processes that only send.
        model: name of the model.
        workers: processes that compute.
        replicas: the number of replicas of each worker.
        builder: the builder of AutoDist's strategy, or the transport of a transfer.
        sent_bytes: bytes that the processes of a transfer send in a step.
        of_cores: the process uses one of this many parts of the cores; 1: all of them.
        delay: seconds that data takes between two workers, in each direction.
        rate: bytes per second between two workers, in each direction; 0: unlimited.
        cluster: path of a YAML file of AutoDist's machines; "": this machine.
        on_gpus: True if each replica is on a GPU of this machine; for alone, autodist and mirrored.
    """

    name: str
    model: str
    workers: int = 1
    replicas: int = 1
    builder: str = "AllReduce"
    sent_bytes: int = 0
    of_cores: int = 1
    delay: float = 0
    rate: float = 0
    cluster: str = ""
    on_gpus: bool = False

    @property
    def roles(self) -> list[tuple[str, int]]:
        """Returns the processes to start, the leading one last; AutoDist starts its own."""
        each = [("worker", k) for k in range(self.workers)]
        if self.name == "parameter-server":
            return [("ps", 0), *each, ("chief", 0)]
        return each[::-1] if self.name in _OF_WORKERS else [("main", 0)]

    @property
    def is_relayed(self) -> bool:
        """True if a relay connects the workers."""
        return bool(self.delay or self.rate)

    @property
    def inter_threads(self) -> int:
        """Number of inter-op threads; TensorFlow's guide recommends workers + 1 for parameter servers on small
        machines.
        """
        return self.workers + 1 if self.name == "parameter-server" else 2

    def __str__(self) -> str:
        builder = f" {self.builder}" if self.name in ("autodist", "mesh", "evaluation") else ""
        return f"{self.model}: {self.name}{builder}, {self.workers} × {self.replicas}"


@dataclass(frozen=True)
class Length:
    """Length of a training run.

    Attributes:
        warmup: steps before any is timed.
        turns: number of turns.
        steps: timed in each turn.
        settling: steps at the start of each turn that are not timed.
        limit: seconds that the whole job may take.
    """

    warmup: int
    turns: int
    steps: int
    settling: int
    limit: float

    @property
    def in_turns(self) -> int:
        return self.turns * (self.steps + self.settling)


class Job:
    """A running training; made by `running`.

    Attributes:
        way: the way of training.
        seconds: times of the steps so far, a list for each turn.
        sent_bytes: bytes per step over this machine's loopback device, for each turn: the traffic between the
            processes, if nothing else on the machine sends.
        relayed_bytes: bytes per step in the busier direction of a slow link between two workers, from the first turn to
            the last: after a turn, messages may still be on their way.
        reports: contents of the reports of the processes, once they have ended, the leading one first.
    """

    def __init__(self, way: Way, length: Length, folder: pathlib.Path) -> None:
        self.way, self._length, self._folder = way, length, folder
        self.seconds: list[list[float]] = []
        self.sent_bytes: list[float] = []
        self.relayed_bytes = 0.0
        self.reports: list[dict[str, Any]] = []
        self._relayed_before: list[int] = []
        self._end = time.monotonic() + length.limit
        self._processes: list[subprocess.Popen[bytes]] = []
        self._buffer = b""

    def start(self) -> None:
        """Starts the processes and waits until they are warm.

        Raises:
            JobError: one of them failed.
        """
        conf = _addresses(self.way)
        for role, index in self.way.roles:
            env = environment(self._intra, self.way.on_gpus)
            if self.way.name in PACKAGES:
                env["KERAS_BACKEND"], env["BENCH_ADDRESSES"] = self.way.name, json.dumps(conf.get("worker", []))
                env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={self.way.replicas}"
            elif conf:
                env["TF_CONFIG"] = json.dumps({"cluster": conf, "task": {"type": role, "index": index}})
            with (self._folder / f"{role}{index}.log").open("wb") as log:
                process = subprocess.Popen(
                    self._command(role, index), env=env, cwd=SCRIPTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=log, start_new_session=True,
                )  # fmt: skip
            self._processes.append(process)
        self._answer()

    @property
    def leader(self) -> int:
        """The id of the leading process."""
        return self._processes[-1].pid

    @property
    def steps_of_turn(self) -> int:
        return self._length.settling + self._length.steps

    def turn(self) -> None:
        """Runs the steps of one turn.

        Raises:
            JobError: it failed.
        """
        steps, before = self.steps_of_turn, loopback_bytes()
        self._relayed_before = self._relayed_before or self._count_relayed()
        self._say(f"{steps}\n")
        self.seconds.append(json.loads(self._answer())[self._length.settling :])
        self.sent_bytes.append((loopback_bytes() - before) / steps)
        pairs = zip(self._count_relayed(), self._relayed_before, strict=True)
        self.relayed_bytes = max(now - then for now, then in pairs) / (steps * len(self.seconds))

    def finish(self) -> list[int]:
        """Waits for the end; returns the peak memory in bytes of each process that trains, the leading one first.

        Raises:
            JobError: it failed.
        """
        leader = self._processes[-1]
        if leader.stdin:
            leader.stdin.close()
        try:
            code = leader.wait(max(1.0, self._end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise self._failure("it did not end") from None
        if code:
            raise self._failure(f"exit status {code}")
        self.reports = [json.loads(path.read_text()) for path in sorted(self._folder.glob("*.json"))]
        return [report["peak_bytes"] for report in self.reports]

    def stop(self) -> None:
        """Ends all processes that still run."""
        for process in self._processes:
            for stream in (process.stdin, process.stdout):
                if stream:
                    with contextlib.suppress(BrokenPipeError):  # it has ended, and has not read its last line
                        stream.close()
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _count_relayed(self) -> list[int]:
        return relayed_bytes(self._folder) if self.way.is_relayed else [0]

    @property
    def _intra(self) -> int:
        return max(1, len(os.sched_getaffinity(0)) // (self.way.workers * self.way.of_cores))

    def _command(self, role: str, index: int) -> list[str]:
        way, length = self.way, self._length
        options = {
            "workers": way.workers, "replicas": way.replicas, "builder": way.builder, "role": role, "index": index,
            "intra": self._intra, "inter": way.inter_threads, "warmup": length.warmup, "steps": length.in_turns,
            "limit": length.limit, "reports": self._folder, "bytes": way.sent_bytes,
            "of-cores": way.of_cores, "delay": way.delay, "rate": way.rate,
            "cluster": way.cluster, "on-gpus": int(way.on_gpus),
        }  # fmt: skip
        module = "bench.train_elsewhere" if way.name in PACKAGES else "bench.train"
        return [python_of(way.name), "-m", module, way.name, way.model, *(f"--{k}={v}" for k, v in options.items())]

    def _say(self, line: str) -> None:
        stream = self._processes[-1].stdin
        assert stream is not None, "the leading process was started with a pipe"
        try:
            stream.write(line.encode())
            stream.flush()
        except BrokenPipeError:
            raise self._failure("it ended early") from None

    def _answer(self) -> bytes:
        """Returns the next answer of the leading process, without the workers' output in between."""
        stream = self._processes[-1].stdout
        assert stream is not None, "the leading process was started with a pipe"
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                if line.startswith(ANSWER):
                    return line.removeprefix(ANSWER)
                continue
            if not select.select([stream], [], [], max(0.0, self._end - time.monotonic()))[0]:
                raise self._failure(f"no answer within {self._length.limit:.0f} s")
            more = os.read(stream.fileno(), 1 << 16)
            if not more:
                raise self._failure("it ended early")
            self._buffer += more

    def _failure(self, reason: str) -> JobError:
        logs = [f"{path.name}:\n{_tail(path)}" for path in sorted(self._folder.glob("*.log"))]
        return JobError(f"{self.way}: {reason}\n" + "\n".join(logs))


@contextmanager
def running(ways: Sequence[Way], length: Length) -> Iterator[list[Job]]:
    """Yields the jobs of several ways, all started and warm; ends those that still run afterwards."""
    with tempfile.TemporaryDirectory(prefix="bench_") as folder:
        jobs: list[Job] = []
        try:
            for k, way in enumerate(ways):
                own = pathlib.Path(folder) / str(k)
                own.mkdir()
                jobs.append(Job(way, length, own))
                jobs[-1].start()
            yield jobs
        finally:
            for job in jobs:
                job.stop()


def output_of(what: str, module: str, *arguments: str, limit: float, threads: int | None = 1) -> list[bytes]:
    """Runs a module of the bench in a separate process, and returns the lines that it prints.

    Args:
        what: description for the error.
        module: the module to run.
        arguments: the arguments of the module.
        limit: seconds for it.
        threads: within an operation; None: as many as a user's process has.

    Raises:
        JobError: it failed, or took longer; with its last output.
    """
    env = environment(threads or 1)
    if threads is None:
        del env["OMP_NUM_THREADS"]
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(
            command,
            env=env,
            cwd=SCRIPTS,
            capture_output=True,
            timeout=limit,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise JobError(f"{what} took more than {limit:.0f} s") from None
    except subprocess.CalledProcessError as error:
        raise JobError(f"{what} failed\n{error.stderr[-2000:].decode(errors='replace')}") from error
    return done.stdout.splitlines()


def environment(intra: int, on_gpus: bool = False) -> dict[str, str]:
    """Returns the environment of a process with `intra` threads; it sees the GPUs only if it trains on them."""
    kept = {k: v for k, v in os.environ.items() if k.lower() not in ("http_proxy", "https_proxy", "tf_config")}
    return {
        **kept, **(_SHARED_GPUS if on_gpus else _HIDDEN_GPUS),
        "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": str(intra),
        "GRPC_VERBOSITY": "ERROR", "KERAS_BACKEND": "tensorflow", "no_proxy": "127.0.0.1,localhost",
    }  # fmt: skip


def loopback_bytes() -> int:
    """Returns the bytes that this machine has sent over its loopback interface so far."""
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()
    fields = next(line.split() for line in lines if line.split()[0] == "lo:")
    return int(fields[9])


def _addresses(way: Way) -> dict[str, list[str]]:
    """Returns free ports for a cluster of `tf.distribute`."""
    if way.name not in (*_OF_WORKERS, "parameter-server") or (way.name in PACKAGES and way.workers == 1):
        return {}
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in way.roles]
    addresses: dict[str, list[str]] = {}
    for (role, _), listening in zip(sorted(way.roles), sockets, strict=True):
        addresses.setdefault(role, []).append(f"127.0.0.1:{listening.getsockname()[1]}")
        listening.close()
    return addresses


def _tail(path: pathlib.Path, lines: int = 15) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
