"""Runs files of Keras's tests in the scope, repeats tests without AutoDist where that adds information, and judges
them.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from keras_suite.values import Difference, difference, read_values, values_file
from keras_suite.verdicts import Outcome, Promises, Verdict, judge, read_outcomes, record_outcome

SCRIPTS = pathlib.Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Options:
    """Options of a run of test files.

    Attributes:
        replicas: the number of replicas of the only worker.
        names: selection of tests, as for pytest's `-k`; "": all.
        limit: seconds that a test may take.
        logs: folder for pytest's output; None: it is dropped.
    """

    replicas: int = 2
    names: str = ""
    limit: float = 1800.0
    logs: pathlib.Path | None = None


@dataclass(frozen=True)
class Judged:
    """The verdict on a test, the number of its steps on the replicas, and the difference of its values if they were
    compared.
    """

    verdict: Verdict
    text: str
    steps: int = 0
    difference: Difference | None = None


def run_and_judge(root: pathlib.Path, files: Sequence[str], options: Options, promises: Promises) -> dict[str, Judged]:
    """Runs the tests of some files, in one process in the scope and one without, and returns a verdict for each.

    Args:
        root: the folder keras/src.
        files: paths in it.
        options: the options of the run.
        promises: tests that are known to be refused, or to differ from one device.
    """
    with tempfile.TemporaryDirectory(prefix="keras-tests-") as made:
        in_scope, alone = (Run(root, pathlib.Path(made) / name, options) for name in ("scope", "alone"))
        in_scope.run_all(files, options.replicas)
        scoped = in_scope.outcomes()
        alone.run_all([t for t, one in scoped.items() if one.asks_for_comparison and t not in promises.refused], 0)
        plain = alone.outcomes()
        tested = dict(_judged(scoped, plain, in_scope.made, alone.made, promises))
    for file in files:
        tested.update(_of_the_file(file, scoped, options, promises))
    return tested


def _judged(
    scoped: Mapping[str, Outcome],
    plain: Mapping[str, Outcome],
    in_scope: pathlib.Path,
    alone: pathlib.Path,
    promises: Promises,
) -> Iterator[tuple[str, Judged]]:
    for test, one in scoped.items():
        if one.outcome == "left out":
            continue
        found = None
        if one.steps and one.has_passed and test in plain and plain[test].has_passed:
            found = difference(*(read_values(folder / values_file(test)) for folder in (in_scope, alone)))
        judgement = judge(one, plain.get(test), found, promises)
        yield test, Judged(judgement.verdict, judgement.text, one.steps, found)


def _of_the_file(
    file: str, scoped: Mapping[str, Outcome], options: Options, promises: Promises
) -> Iterator[tuple[str, Judged]]:
    """Yields the faults of a file as a whole."""
    if options.names:
        return
    if not any(test == file or test.startswith(f"{file}::") for test in scoped):
        yield (
            file,
            Judged(Verdict.FAILED, f"no test is found in it in {options.limit:g} s (--limit); --logs tells more"),
        )
        return
    for test in promises.tests:
        if test.startswith(f"{file}::") and test not in scoped:
            yield test, Judged(Verdict.WRONGLY_LISTED, "there is no such test")


@dataclass(frozen=True)
class Run:
    """Runs tests in processes of their own; `made` is a folder that takes their outcomes and values."""

    root: pathlib.Path
    made: pathlib.Path
    options: Options

    def outcomes(self) -> dict[str, Outcome]:
        """Returns the outcomes of the tests so far."""
        return read_outcomes(self.made / "outcomes")

    def run_all(self, tests: Sequence[str], replicas: int) -> None:
        """Runs files, or tests by their ids: in one process, and in another those that a test has kept from their turn.

        Args:
            tests: the files or ids.
            replicas: 0: without AutoDist.
        """
        (self.made / "here").mkdir(parents=True)
        left = list(tests)
        while left:
            self._run(left, replicas)
            waiting = [test for test, one in self.outcomes().items() if one.outcome == "collected"]
            left = waiting if waiting != left else []

    def _run(self, tests: Sequence[str], replicas: int) -> None:
        # Not in keras/src, whose modules would shadow the standard library's.
        here = self.made / "here"
        environment = self._environment()
        with self._log(tests[0], replicas).open("a") as log:
            process = subprocess.Popen(
                self._command(tests, replicas),
                cwd=here,
                env=environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                self.wait(process)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # it, and its remaining children
                process.wait()

    def wait(self, process: subprocess.Popen[bytes]) -> None:
        """Waits until the process ends, or reports nothing for the time limit of a test: then that test has failed."""
        last_change = time.time()
        while True:
            try:
                process.wait(max(0.0, last_change + self.options.limit - time.time()))
                return
            except subprocess.TimeoutExpired:
                path = self.made / "outcomes"
                latest = path.stat().st_mtime if path.exists() else last_change
                if latest <= last_change:
                    break
                last_change = latest
        why = f"it took more than {self.options.limit:g} s (--limit) and was ended"
        started = [test for test, one in self.outcomes().items() if one.outcome == "started"]
        if started:
            record_outcome(self.made / "outcomes", started[-1], "failed", why)

    def _command(self, tests: Sequence[str], replicas: int) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(self.root)]
        command += ["-p", "keras_suite.in_scope", "-p", "no:cacheprovider", "-W", "ignore", "--tb=short", "-q"]
        command += ["-k", self.options.names, "--durations=20", "--replicas", str(replicas)]
        command += ["--outcomes", str(self.made / "outcomes"), "--values", str(self.made)]
        return [*command, *(str(self.root / test) for test in tests)]

    def _environment(self) -> dict[str, str]:
        paths = os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))
        always = {"PYTHONPATH": paths, "KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": ""}
        return {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONDONTWRITEBYTECODE": "1", **os.environ, **always}

    def _log(self, test: str, replicas: int) -> pathlib.Path:
        if self.options.logs is None:
            return self.made / "log"
        self.options.logs.mkdir(parents=True, exist_ok=True)
        name = str(pathlib.PurePath(test.partition("::")[0]).parent).replace("/", "_")
        return self.options.logs.resolve() / f"{name}.{'scope' if replicas else 'alone'}.log"
