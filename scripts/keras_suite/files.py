"""One file of Keras's tests: run in the scope, run again without AutoDist where that tells more, and judged."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from keras_suite.values import difference, read_values, values_file
from keras_suite.verdicts import Outcome, Promises, Verdict, judge, read_outcomes

SCRIPTS = pathlib.Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Options:
    """How files are run.

    Attributes:
        replicas: of the one worker.
        names: which tests, as pytest's `-k` takes it; "": all.
        limit: seconds that a run has.
        logs: folder that takes what pytest says; None: nobody wants it.
    """

    replicas: int = 2
    names: str = ""
    limit: float = 1800.0
    logs: pathlib.Path | None = None


@dataclass(frozen=True)
class Judged:
    """What is to be said of a test, and how many steps it made on the replicas."""

    verdict: Verdict
    text: str
    steps: int = 0


def run_and_judge(root: pathlib.Path, file: str, options: Options, promises: Promises) -> dict[str, Judged]:
    """What is to be said of each test of a file.

    Args:
        root: the folder keras/src.
        file: a path in it.
        options: how it is run.
        promises: what is known to be refused, or other than on one device.
    """
    with tempfile.TemporaryDirectory(prefix="keras-tests-") as made:
        in_scope, alone = pathlib.Path(made) / "scope", pathlib.Path(made) / "alone"
        ended = _run(root, [file], options.replicas, in_scope, options)
        scoped = read_outcomes(in_scope / "outcomes")
        again = [test for test, one in scoped.items() if one.asks_for_comparison and test not in promises.refused]
        if again:
            ended &= _run(root, again, 0, alone, options)
        plain = read_outcomes(alone / "outcomes")
        said = {
            test: (judge(one, plain.get(test), _difference(test, in_scope, alone, one, plain), promises), one.steps)
            for test, one in scoped.items()
        }
    tested = {test: Judged(one.verdict, one.text, steps) for test, (one, steps) in said.items()}
    tested.update(_of_the_file(file, bool(scoped), ended, options))
    if not options.names and ended:
        missing = [test for test in promises.tests if test.startswith(f"{file}::") and test not in scoped]
        tested.update((test, Judged(Verdict.WRONGLY_LISTED, "there is no such test")) for test in missing)
    return tested


def _difference(
    test: str, in_scope: pathlib.Path, alone: pathlib.Path, scoped: Outcome, plain: dict[str, Outcome]
) -> str | None:
    """Where the numbers of a test that passes in both differ; None where there are none of replicas."""
    if not scoped.steps or not scoped.has_passed or test not in plain or not plain[test].has_passed:
        return None
    return difference(*(read_values(folder / values_file(test)) for folder in (in_scope, alone)))


def _of_the_file(file: str, has_tests: bool, ended: bool, options: Options) -> dict[str, Judged]:
    """What is wrong with the whole file."""
    if not ended:
        return {file: Judged(Verdict.FAILED, f"it took more than {options.limit:g} s (--limit) and was ended")}
    if not has_tests and not options.names:
        return {file: Judged(Verdict.FAILED, "pytest found no test in it; --logs DIR keeps its words")}
    return {}


def _run(root: pathlib.Path, tests: Sequence[str], replicas: int, made: pathlib.Path, options: Options) -> bool:
    """Runs tests of one file; `made` takes their outcomes and values. Returns whether they came to an end in time.

    Args:
        root: the folder keras/src.
        tests: a file in it, or ids of tests of one.
        replicas: 0: without AutoDist.
        made: a folder that is made.
        options: how they are run.
    """
    here = made / "here"  # not in keras/src, whose modules would be taken for those of the standard library
    here.mkdir(parents=True)
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(root), "-p", "keras_suite.in_scope"]
    command += ["-p", "no:cacheprovider", "-W", "ignore", "--tb=short", "-q", "-k", options.names]
    command += ["--replicas", str(replicas), "--outcomes", str(made / "outcomes"), "--values", str(made)]
    command += [str(root / test) for test in tests]
    paths = os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))
    always = {"PYTHONPATH": paths, "KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": ""}
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONDONTWRITEBYTECODE": "1", **os.environ, **always}
    with _log(tests[0], replicas, made, options.logs).open("w") as log:
        process = subprocess.Popen(
            command, cwd=here, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            process.wait(options.limit)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it, and what it has left behind
            process.wait()
    return True


def _log(test: str, replicas: int, made: pathlib.Path, logs: pathlib.Path | None) -> pathlib.Path:
    if logs is None:
        return made / "log"
    logs.mkdir(parents=True, exist_ok=True)
    name = test.partition("::")[0].replace("/", "_")
    return logs.resolve() / f"{name}.{'scope' if replicas else 'alone'}.log"
