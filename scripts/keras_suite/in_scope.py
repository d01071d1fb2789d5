"""A pytest plugin that runs each test within `ad.scope()` of an AutoDist of its own, of one worker and some replicas.

    --replicas N       number of replicas; 0: without AutoDist, as Keras itself runs the test
    --outcomes FILE    receives a line of JSON for each test, for `verdicts.read_outcomes`
    --values DIR       receives the results of training in each test, from `values.recording`
"""  # fmt: skip

from __future__ import annotations

import atexit
import inspect
import pathlib
import sys
import types
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest

from autodist import AutoDist, ResourceSpec  # before Keras, which imports TensorFlow
from autodist.functions.running_step import RunningStep
from autodist.runs.end_with_script import end_at_exit

import keras  # isort: skip
from keras_suite.values import METHODS, recording, values_file  # isort: skip
from keras_suite.verdicts import record_outcome  # isort: skip

SEED = 1
"""Seed of Python, NumPy and TensorFlow before each test: Keras's tests draw without one."""

TRAINING = {*METHODS, "run_layer_test"}
"""Names that identify a test that trains; `run_layer_test` is a method of Keras's own `TestCase`."""

_STEPS = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--replicas", type=int, default=2)
    parser.addoption("--outcomes", type=pathlib.Path, required=True)
    parser.addoption("--values", type=pathlib.Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "requires_trainable_backend: of Keras, whose other backends only infer")
    sys.modules["conftest"] = _conftest_of_keras()
    config.pluginmanager.register(_InScope(*map(config.getoption, ("--replicas", "--outcomes", "--values"))))


def _conftest_of_keras() -> types.ModuleType:
    """Returns a module with the names that tests import from Keras's conftest.py, which is not installed with them."""
    module = types.ModuleType("conftest")

    def skip_if_backend(given: str, reason: str) -> pytest.MarkDecorator:
        return pytest.mark.skipif(keras.backend.backend() == given, reason=reason)

    vars(module)["skip_if_backend"] = skip_if_backend
    return module


@dataclass(frozen=True)
class _InScope:
    replicas: int
    outcomes: pathlib.Path
    values: pathlib.Path

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Runs the call in the scope, with Keras's `setUp` and `tearDown`, which are part of it."""
        keras.utils.set_random_seed(SEED)
        scope = _scope(self.replicas) if self.replicas else nullcontext()
        steps: list[RunningStep] = []  # steps that train or evaluate
        try:
            with recording(self.values / values_file(item.nodeid)), _counting(steps), _seeding_alike(), scope:
                return (yield)
        finally:
            item.stash[_STEPS] = len(steps)

    @pytest.hookimpl(trylast=True)  # after -k
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselects the tests of layers that do not train: the scope does not affect them."""
        chosen = [item for item in items if not item.nodeid.startswith("layers/") or trains(item)]
        left_out = [item for item in items if item not in set(chosen)]
        for item in left_out:
            self._record(item.nodeid, "left out")
        for item in chosen:
            self._record(item.nodeid, "collected")
        config.hook.pytest_deselected(items=left_out)
        items[:] = chosen

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._record(report.nodeid, "failed", str(report.longrepr).strip().splitlines()[-1])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._record(nodeid, "started")  # remains the last record of a test that ends the process

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if report.when == "call" or not report.passed:
            why = call.excinfo.exconly() if call.excinfo is not None and not report.passed else ""
            self._record(item.nodeid, report.outcome, why, item.stash.get(_STEPS, 0))
        return report

    def _record(self, test: str, outcome: str, why: str = "", steps: int = 0) -> None:
        record_outcome(self.outcomes, test, outcome, why, steps)


def trains(item: pytest.Item) -> bool:
    """Returns True if a test, or a function of its file that it calls, mentions training, evaluation or prediction."""
    test = inspect.unwrap(item.function) if isinstance(item, pytest.Function) else None
    return test is None or not _names(test.__code__, test, getattr(item, "cls", None), set()).isdisjoint(TRAINING)


def _names(code: types.CodeType, test: types.FunctionType, cls: type | None, seen: set[types.CodeType]) -> set[str]:
    """Yields the names used by code, and by the functions of its file that it calls."""
    seen.add(code)
    found = set(code.co_names)
    named = [getattr(cls, name, None) or test.__globals__.get(name) for name in code.co_names]
    helpers = [inspect.unwrap(one) for one in named if inspect.isfunction(one)]
    inner = [helper.__code__ for helper in helpers if helper.__module__ == test.__module__]
    inner += [constant for constant in code.co_consts if inspect.iscode(constant)]
    for one in inner:
        if one not in seen:
            found |= _names(one, test, cls, seen)
    return found


@contextmanager
def _scope(replicas: int) -> Iterator[None]:
    node = {"address": "localhost", "cpus": list(range(replicas))}
    ad = AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [node]}))
    try:
        with ad.scope():
            yield
    finally:  # AutoDist's shutdown at a script's end, without the warning that nothing was distributed
        atexit.unregister(end_at_exit)
        ad._alone.stop()
        ad._run.end.finish()


@contextmanager
def _seeding_alike() -> Iterator[None]:
    """Seeds Keras's helpers, which make data with `np.random.seed(None)`, different in every run."""
    seed = np.random.seed
    with mock.patch.object(np.random, "seed", lambda given=None: seed(SEED if given is None else given)):
        yield


@contextmanager
def _counting(steps: list[RunningStep]) -> Iterator[None]:
    """Appends the steps that run on the replicas, each as often as it runs."""
    run = RunningStep.__call__

    def call(step: RunningStep, *args: Any, **kwargs: Any) -> Any:
        outputs = run(step, *args, **kwargs)
        steps.append(step)
        return outputs

    with mock.patch.object(RunningStep, "__call__", call):
        yield
