"""Trains programs in separate processes, on one device and on many, and measures the difference of their results."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autodist.verify.records import relative_difference
from tests.cluster.runs import MARK, Chief, all_gone, survivors, within
from tests.forked_python.start import ON_CPU, forked_python

ROOT = Path(__file__).parents[2]

START_LIMIT, PROGRAM_LIMIT = 60.0, 5.0
"""Seconds for the start of a run's processes, and for each of its programs, on a busy machine."""

MOST_PROGRAMS = 16
"""Limit for one run: a test that needs two runs, one of them on one device, has to end within pytest's timeout."""

Values = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Machines:
    """Workers of this machine, started once for many programs.

    Attributes:
        workers: number of workers.
        replicas: of each worker.
        options: of `tests.equivalence.train`.
        run: distinguishes runs that are otherwise equal.
        batch: True if batches are global, as in the YAML; None: the front end's own rule.
    """

    workers: int
    replicas: int
    options: tuple[str, ...]
    run: int
    batch: str | None

    @property
    def shape(self) -> str:
        return f"{self.workers}x{self.replicas}"

    @property
    def spec(self) -> dict[str, Any]:
        """Returns the content of the YAML; each program has its own strategy."""
        cpus = list(range(self.workers * self.replicas))
        spec = {"nodes": [{"address": "localhost", "cpus": cpus, "workers": self.workers}]}
        return spec | ({"batch": self.batch} if self.batch else {})

    def __str__(self) -> str:
        """Returns the name of a folder."""
        options = "".join(option.replace("--", "-") for option in self.options)
        return "-".join([f"{self.shape}{options}", str(self.run), *([self.batch] if self.batch else [])])


@dataclass(frozen=True)
class Cluster:
    """Workers of this machine and how they train; those that differ in their strategy alone share their runs.

    Attributes:
        strategy: a key of STRATEGIES.
        workers, replicas, options, run, batch: as of `Machines`.
    """

    strategy: str = "shuffle"
    workers: int = 2
    replicas: int = 2
    options: tuple[str, ...] = ()
    run: int = 0
    batch: str | None = None

    @property
    def machines(self) -> Machines:
        return Machines(self.workers, self.replicas, self.options, self.run, self.batch)

    @property
    def shape(self) -> str:
        return self.machines.shape


def many_threads(strategy: str) -> tuple[Cluster, Cluster]:
    """Returns two equal runs, each with two workers of four threads."""
    first, second = (Cluster(strategy, options=("--cores", "8"), run=run) for run in (0, 1))
    return first, second


@dataclass(frozen=True)
class Task:
    """A program, trained somewhere.

    Attributes:
        cluster: None: one device without AutoDist.
        program: its name.
    """

    cluster: Cluster | None
    program: str

    @property
    def machines(self) -> Machines | None:
        return None if self.cluster is None else self.cluster.machines

    @property
    def word(self) -> str:
        """Its name on the command line of `tests.equivalence.train`, and in the names of its files."""
        return self.program if self.cluster is None else f"{self.cluster.strategy}:{self.program}"

    def __str__(self) -> str:
        return f"{self.program} on {self.cluster or 'one device'}"


@dataclass(frozen=True)
class Trained:
    """The results of a training program.

    Attributes:
        by_worker: the results of each worker.
    """

    by_worker: tuple[Values, ...]

    @property
    def shared(self) -> Values:
        """The values common to all workers, from the chief."""
        return {name: value for name, value in self.by_worker[0].items() if not name.startswith("worker:")}

    @property
    def joined(self) -> Values:
        """The values common to all workers, and the mean over workers of the losses of their own examples."""
        if "worker:examples" not in self.by_worker[0]:
            return self.shared
        losses, examples = self.own("loss"), self.own("examples")
        whole = np.sum([a * n for a, n in zip(losses, examples, strict=True)], 0) / np.sum(examples, 0)
        return self.shared | {"loss": whole}

    def own(self, name: str) -> list[NDArray[Any]]:
        """A result that each worker has of its own, by worker."""
        return [values[f"worker:{name}"] for values in self.by_worker]

    def assert_workers_agree(self) -> None:
        """Raises AssertionError if the common values differ between workers in any bit."""
        for index, values in enumerate(self.by_worker):
            theirs = {name for name in values if not name.startswith("worker:")}
            assert theirs == set(self.shared), f"worker {index} has other variables"
            assert not (wrong := [n for n, v in self.shared.items() if not same_bits(v, values[n])]), (index, wrong)


class Trainings:
    """Runs the trainings of a session's tests, with as few runs as possible for each set of machines.

    Args:
        directory: folder of the results, also for other processes that run tests of the same session.
        wanted: every program that the tests need, with its cluster; None: one device without AutoDist.
    """

    def __init__(self, directory: Path, wanted: Iterable[tuple[Cluster | None, str]]) -> None:
        self._directory = directory
        self._wanted: dict[Machines | None, dict[Task, None]] = {}
        self._made: dict[Task, Trained | str] = {}
        for task in itertools.starmap(Task, wanted):
            self._wanted.setdefault(task.machines, {})[task] = None

    def alone(self, name: str) -> Trained:
        """Returns the results of a program on one device.

        Raises:
            AssertionError: it failed; with all its output.
        """
        return self._of(Task(None, name))

    def on(self, cluster: Cluster, name: str) -> Trained:
        """Returns the results of a program on many devices; the workers agree in every bit.

        Raises:
            AssertionError: it failed; with all its output.
        """
        trained = self._of(Task(cluster, name))
        trained.assert_workers_agree()
        return trained

    def _of(self, task: Task) -> Trained:
        if task not in self._made:
            with self._alone_on(task.machines):
                self._find_or_train(task)
        made = self._made[task]
        assert isinstance(made, Trained), made
        return made

    @contextlib.contextmanager
    def _alone_on(self, machines: Machines | None) -> Iterator[None]:
        """Waits until no other process trains on those machines."""
        self._place(machines).mkdir(exist_ok=True)
        with open(self._place(machines) / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _find_or_train(self, task: Task) -> None:
        others = self._wanted.get(task.machines, {})
        for wanted in {task: None, **others}:
            if wanted not in self._made and (found := self._load(wanted)) is not None:
                self._made[wanted] = found
        if task not in self._made:
            missing = [other for other in others if other != task and other not in self._made]
            self._train(task.machines, [task, *missing][:MOST_PROGRAMS])

    def _train(self, machines: Machines | None, tasks: Sequence[Task]) -> None:
        """Runs the programs; if one fails, those after it remain for another run."""
        failure = self._run(machines, tasks)
        for task in tasks:
            trained = self._load(task)
            if trained is None or (failure is not None and task == tasks[-1]):
                self._made[task] = f"{task} failed: {failure}"
                return
            self._made[task] = trained

    def _run(self, machines: Machines | None, tasks: Sequence[Task]) -> str | None:
        """Runs the programs once; returns the failure, or None."""
        where = ["--alone"]
        if machines is not None:
            file = self._place(machines) / "cluster.yml"
            file.write_text(json.dumps(machines.spec))  # YAML holds all of JSON
            where = ["--cluster", str(file), *machines.options]
        words = [task.word for task in tasks]
        command = [sys.executable, "-m", "tests.equivalence.train", "--out", str(self._place(machines)), *where, *words]
        ended = run_to_its_end(command, ROOT, START_LIMIT + PROGRAM_LIMIT * len(tasks), is_forked=True)
        missing = [str(task) for task in tasks if self._load(task) is None]
        if ended.problem is None and missing:
            return f"it ended well and did not train {', '.join(missing)}\n{ended.output}"
        return f"{ended.problem}\n{ended.output}" if ended.problem is not None else None

    def _load(self, task: Task) -> Trained | None:
        workers = task.machines.workers if task.machines else 1
        files = [self._place(task.machines) / f"{task.word}.{index}.npz" for index in range(workers)]
        if not all(file.exists() for file in files):
            return None
        loaded = []
        for file in files:
            with np.load(file) as arrays:
                loaded.append(dict(arrays))
        return Trained(tuple(loaded))

    def _place(self, machines: Machines | None) -> Path:
        return self._directory / ("alone" if machines is None else str(machines))


@dataclass(frozen=True)
class Ended:
    """The end of a process.

    Attributes:
        output: of stdout and stderr together.
        problem: the failure; None if there is none.
    """

    output: str
    problem: str | None


def run_to_its_end(
    command: Sequence[str],
    directory: Path,
    limit: float,
    via: Callable[[list[str]], list[str]] = list,
    mark: str | None = None,
    is_forked: bool = False,
    forked_workers: int = 0,
) -> Ended:
    """Runs a command in a session of its own, and ends all of its processes afterwards.

    Args:
        command: to run.
        directory: its working directory.
        limit: seconds of a `Stopwatch` after which it is ended.
        via: converts it to a command that starts it elsewhere.
        mark: value of `MARK`, if its processes on other hosts already have one.
        is_forked: True if the process is forked from one that has imported TensorFlow.
        forked_workers: number of its workers on this machine that are, too.
    """
    mark = mark or secrets.token_hex(8)
    environment = os.environ | ON_CPU | {MARK: mark}
    with tempfile.TemporaryFile() as told, open(os.devnull, "rb") as nothing:
        process: Chief | None = None
        if is_forked:
            process = forked_python.start(command[1:], (nothing, told, told), environment, directory, forked_workers)
        if process is None:
            words = via(list(command))
            streams: dict[str, Any] = {"stdin": nothing, "stdout": told, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(words, cwd=directory, env=environment, start_new_session=True, **streams)
        try:
            problem = _problem_of(process, limit, mark)
        finally:
            _end(mark)
            process.kill()
            process.wait()
        told.seek(0)
        return Ended(told.read().decode(errors="replace"), problem)


def _problem_of(process: Chief, limit: float, mark: str) -> str | None:
    if not within(limit, lambda: process.poll() is not None):
        return f"it still runs after {limit:.0f} s"
    status = process.wait()
    problem = f"exit status {status}" if status else None
    if not all_gone(mark):
        return f"{problem or 'it ended'}; processes are left: {survivors(mark)}"
    return problem


def _end(mark: str) -> None:
    for pid in survivors(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def largest_difference(expected: Values, found: Values) -> tuple[float, str]:
    """Returns the largest relative difference of any variable, and the variable's name."""
    assert set(expected) == set(found), set(expected) ^ set(found)
    for name, value in expected.items():
        assert value.shape == found[name].shape and value.dtype == found[name].dtype, name
    return max((relative_difference(value, found[name]), name) for name, value in expected.items())
