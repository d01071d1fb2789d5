"""Trains programs in processes of their own, on one device and on many, and tells how far their results lie apart."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autodist.cluster.patience import LOOK_INTERVAL, Stopwatch
from autodist.differences import relative_difference
from tests.cluster.runs import MARK, survivors, within

ROOT = Path(__file__).parents[2]

START_LIMIT, PROGRAM_LIMIT = 60.0, 5.0
"""Seconds for the start of a run's processes, and for each of its programs, on a machine that does much besides."""

MOST_PROGRAMS = 16
"""In one run: a test that needs two runs, one of them on one device, ends before pytest takes it for hanging."""

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "shuffle": {"builder": "AllReduce", "all_reduce_spec": "SHUFFLE"},
    "float16": {"builder": "AllReduce", "compressor": {"kind": "FLOAT16", "error_feedback": True}},
    "power_sgd": {"builder": "AllReduce", "compressor": {"kind": "POWER_SGD", "rank": 1}},
    "top_k": {"builder": "AllReduce", "compressor": {"kind": "TOP_K", "fraction": 0.2}},
    "ring": {"builder": "AllReduce", "all_reduce_spec": "RING"},
    "ps": {"builder": "PS"},
    "ps_load_balancing": {"builder": "PSLoadBalancing"},
    "parallax": {"builder": "Parallax"},
    "partitioned_ps": {"builder": "PartitionedPS", "max_shards": 3, "min_partition_bytes": 1},
    "random_axis_ar": {"builder": "RandomAxisPartitionAR", "max_shards": 3, "min_partition_bytes": 1, "seed": 1},
    "sharded": {"builder": "ShardedAllReduce", "min_partition_bytes": 1},
}

Values = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Cluster:
    """Workers of this machine and how they train.

    Attributes:
        strategy: a key of STRATEGIES.
        workers: how many.
        replicas: of each worker.
        options: of `tests.equivalence.train`.
        run: tells apart runs that are otherwise alike.
        batch: whether batches are global, as in the YAML; None: the front end's own rule.
    """

    strategy: str = "shuffle"
    workers: int = 2
    replicas: int = 2
    options: tuple[str, ...] = ()
    run: int = 0
    batch: str | None = None

    @property
    def shape(self) -> str:
        return f"{self.workers}x{self.replicas}"

    @property
    def spec(self) -> dict[str, Any]:
        """What stands in the YAML."""
        cpus = list(range(self.workers * self.replicas))
        node = {"address": "localhost", "cpus": cpus, "workers": self.workers}
        spec = {"nodes": [node], "strategy": dict(STRATEGIES[self.strategy])}
        return spec | ({"batch": self.batch} if self.batch else {})


@dataclass(frozen=True)
class Trained:
    """What a program has trained.

    Attributes:
        by_worker: the results of each worker.
    """

    by_worker: tuple[Values, ...]

    @property
    def shared(self) -> Values:
        """What all workers have, as the chief has it."""
        return {name: value for name, value in self.by_worker[0].items() if not name.startswith("worker:")}

    @property
    def joined(self) -> Values:
        """What all workers have, and the mean of the losses that each had of its own examples."""
        if "worker:examples" not in self.by_worker[0]:
            return self.shared
        losses, examples = self.own("loss"), self.own("examples")
        whole = np.sum([a * n for a, n in zip(losses, examples, strict=True)], 0) / np.sum(examples, 0)
        return self.shared | {"loss": whole}

    def own(self, name: str) -> list[NDArray[Any]]:
        """A result that each worker has of its own, by worker."""
        return [values[f"worker:{name}"] for values in self.by_worker]

    def assert_workers_agree(self) -> None:
        """What all workers have is the same on each, bit for bit."""
        for index, values in enumerate(self.by_worker):
            theirs = {name for name in values if not name.startswith("worker:")}
            assert theirs == set(self.shared), f"worker {index} has other variables"
            assert not (wrong := [n for n, v in self.shared.items() if not same_bits(v, values[n])]), (index, wrong)


class Trainings:
    """Runs what a session's tests need, the programs of one cluster in as few runs as can be.

    Args:
        directory: what is trained is left there, for other processes that run tests of the same session too.
        wanted: every program that is going to be asked for, with its cluster; None: one device without AutoDist.
    """

    def __init__(self, directory: Path, wanted: Iterable[tuple[Cluster | None, str]]) -> None:
        self._directory = directory
        self._wanted: dict[Cluster | None, dict[str, None]] = {}
        self._made: dict[tuple[Cluster | None, str], Trained | str] = {}
        for cluster, name in wanted:
            self._wanted.setdefault(cluster, {})[name] = None

    def alone(self, name: str) -> Trained:
        """What a program trains on one device.

        Raises:
            AssertionError: it failed; with all its output.
        """
        return self._of(None, name)

    def on(self, cluster: Cluster, name: str) -> Trained:
        """What a program trains on many devices; the workers agree in every bit.

        Raises:
            AssertionError: it failed; with all its output.
        """
        trained = self._of(cluster, name)
        trained.assert_workers_agree()
        return trained

    def _of(self, cluster: Cluster | None, name: str) -> Trained:
        if (cluster, name) not in self._made:
            with self._alone_on(cluster):
                self._find_or_train(cluster, name)
        made = self._made[cluster, name]
        assert isinstance(made, Trained), made
        return made

    @contextlib.contextmanager
    def _alone_on(self, cluster: Cluster | None) -> Iterator[None]:
        """Waits until no other process trains on that cluster."""
        self._place(cluster).mkdir(exist_ok=True)
        with open(self._place(cluster) / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _find_or_train(self, cluster: Cluster | None, name: str) -> None:
        for wanted in {name: None, **self._wanted.get(cluster, {})}:
            if (cluster, wanted) not in self._made and (found := self._load(cluster, wanted)) is not None:
                self._made[cluster, wanted] = found
        if (cluster, name) not in self._made:
            others = [n for n in self._wanted.get(cluster, {}) if n != name and (cluster, n) not in self._made]
            self._train(cluster, [name, *others][:MOST_PROGRAMS])

    def _train(self, cluster: Cluster | None, names: Sequence[str]) -> None:
        """One run; where a program fails, those after it are left for another."""
        failure = self._run(cluster, names)
        for name in names:
            trained = self._load(cluster, name)
            if trained is None or (failure is not None and name == names[-1]):
                self._made[cluster, name] = f"{name} on {cluster or 'one device'} failed: {failure}"
                return
            self._made[cluster, name] = trained

    def _run(self, cluster: Cluster | None, names: Sequence[str]) -> str | None:
        """One run; returns what went wrong."""
        where = ["--alone"]
        if cluster is not None:
            file = self._place(cluster) / "cluster.yml"
            file.write_text(json.dumps(cluster.spec))  # YAML holds all of JSON
            where = ["--cluster", str(file), *cluster.options]
        command = [sys.executable, "-m", "tests.equivalence.train", "--out", str(self._place(cluster)), *where, *names]
        ended = run_to_its_end(command, ROOT, START_LIMIT + PROGRAM_LIMIT * len(names))
        missing = [n for n in names if self._load(cluster, n) is None]
        if ended.problem is None and missing:
            return f"it ended well and did not train {', '.join(missing)}\n{ended.output}"
        return f"{ended.problem}\n{ended.output}" if ended.problem is not None else None

    def _load(self, cluster: Cluster | None, name: str) -> Trained | None:
        files = [self._place(cluster) / f"{name}.{i}.npz" for i in range(cluster.workers if cluster else 1)]
        if not all(file.exists() for file in files):
            return None
        loaded = []
        for file in files:
            with np.load(file) as arrays:
                loaded.append(dict(arrays))
        return Trained(tuple(loaded))

    def _place(self, cluster: Cluster | None) -> Path:
        if cluster is None:
            return self._directory / "alone"
        options = "".join(option.replace("--", "-") for option in cluster.options)
        return self._directory / f"{cluster.strategy}-{cluster.shape}{options}-{cluster.run}"


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        output: of stdout and stderr together.
        problem: what went wrong; None: nothing.
    """

    output: str
    problem: str | None


def run_to_its_end(
    command: Sequence[str],
    directory: Path,
    limit: float,
    via: Callable[[list[str]], list[str]] = list,
    mark: str | None = None,
) -> Ended:
    """Runs a command in a session of its own; nothing of it is left afterwards.

    Args:
        command: what to run.
        directory: where.
        limit: seconds of a `Stopwatch` after which it is ended.
        via: makes the command that starts it elsewhere.
        mark: value of `MARK`, if its processes on other hosts already have one.
    """
    mark = mark or secrets.token_hex(8)
    environment = os.environ | {MARK: mark, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    process = subprocess.Popen(
        via(list(command)),
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    problem = None
    try:
        output = _all_output(process, limit)
        if process.returncode:
            problem = f"exit status {process.returncode}"
        if not within(10, lambda: not survivors(mark)):
            problem = f"{problem or 'it ended'}; processes are left: {survivors(mark)}"
    except subprocess.TimeoutExpired:
        problem = f"it still runs after {limit:.0f} s"
        _end(mark)
        output, _ = process.communicate()
    finally:
        _end(mark)
    return Ended(output, problem)


def _all_output(process: subprocess.Popen[str], limit: float) -> str:
    stopwatch = Stopwatch()
    while True:
        try:
            return process.communicate(timeout=LOOK_INTERVAL)[0]
        except subprocess.TimeoutExpired:
            if stopwatch.read() >= limit:
                raise


def _end(mark: str) -> None:
    for pid in survivors(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def largest_difference(expected: Values, found: Values) -> tuple[float, str]:
    """The largest relative difference of any variable, and which one has it."""
    assert set(expected) == set(found), set(expected) ^ set(found)
    for name, value in expected.items():
        assert value.shape == found[name].shape and value.dtype == found[name].dtype, name
    return max((relative_difference(value, found[name]), name) for name, value in expected.items())
