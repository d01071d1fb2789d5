"""Common fixtures of the unit tests."""

from __future__ import annotations

import functools
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras.src.backend.common import global_state  # holds the policy, if there is one

from autodist.capture import training_hooks
from autodist.capture.keras.distribution import run_settings
from autodist.capture.keras.distribution.run_settings import current_run
from autodist.cluster.script_end import watch_script_end
from autodist.errors import RewriteError
from autodist.graph.step import Step
from autodist.graph.verify import verify
from autodist.kernels import KERNELS, Kernel
from autodist.kernels.base import AnyKernel, Context
from autodist.runs.peers import Peers
from autodist.runtime import program

Apply = Callable[[AnyKernel, Step, Context], Step]


def _restoring_keras() -> Iterator[None]:
    before, policy = keras.config.floatx(), global_state.get_global_attribute("dtype_policy")
    if policy is not None and policy.name == before:  # unchanged: Keras caches objects of the other
        policy = None
        global_state.set_global_attribute("dtype_policy", policy)
    run = current_run()
    yield
    run_settings._current[:] = [] if run is None else [run]
    keras.config.set_floatx(before)
    global_state.set_global_attribute("dtype_policy", policy)
    keras.distribution.set_distribution(None)


@pytest.fixture(scope="module", autouse=True)
def what_a_file_leaves_is_not_collected() -> Iterator[None]:
    """Hides what a file leaves, above all traced functions that TensorFlow keeps, from later garbage collections.

    With that of a hundred files, one collection takes half a minute; it made some tests seven times slower.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def keras_as_before_the_file() -> Iterator[None]:
    """Restores Keras's global state after a file, whose fixtures for all its tests may have changed it."""
    yield from _restoring_keras()


@pytest.fixture(autouse=True)
def keras_as_it_was() -> Iterator[None]:
    """Restores Keras's global state after a test, for the next one in the process."""
    yield from _restoring_keras()


@pytest.fixture(scope="session", autouse=True)
def unused_tensors_are_not_reported() -> Iterator[None]:
    """Drops TensorFlow's reports of unused tensors.

    They are logged when a tensor is collected as garbage, mostly during some later test, which may read the log.
    """

    def is_kept(record: logging.LogRecord) -> bool:
        return "Object was never used" not in record.getMessage()

    log = logging.getLogger("tensorflow")
    log.addFilter(is_kept)
    yield
    log.removeFilter(is_kept)


@pytest.fixture
def first_control_flow() -> Iterator[None]:
    """Loops and conditions as graphs had them before they were functions; scripts for TensorFlow 1 still do."""
    tf.compat.v1.disable_control_flow_v2()
    yield
    tf.compat.v1.enable_control_flow_v2()


@pytest.fixture(autouse=True)
def nobody_looks_for_training() -> Iterator[None]:
    """Silences an AutoDist of another test that has trained nothing: it must not report this test's training."""
    before = list(training_hooks.listeners)
    yield
    for one in [one for one in training_hooks.listeners if one not in before]:
        one.stop()


@pytest.fixture(scope="session", autouse=True)
def nothing_is_given_back() -> Iterator[None]:
    """Turns off the release of memory before a program's first run; here it is reused.

    The release would visit everything that earlier tests have left, a tenth of the time of those that train.
    `test_heaps.py` calls the same functions, and `test_program.py` checks the release.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "collect_and_trim", lambda: None)
        patch.setattr(program, "trim_heaps", lambda: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def every_kernel_keeps_a_step_consistent() -> Iterator[None]:
    """Verifies the step after every kernel of the package, and after every rule for rows.

    For workers other than the first, whose kernels do the same for other shards, only after the last kernel: checks of
    all were a fifth of the time of the kernels' tests. Those of a pipeline have nodes of their own.
    """
    verified: list[Step | None] = [None]  # the last one: a kernel that runs others returns it a second time
    with pytest.MonkeyPatch.context() as patch:
        for kernel in _kernels(Kernel):
            if "apply" in vars(kernel) and kernel.__module__.startswith("autodist."):
                patch.setattr(kernel, "apply", _verifying(kernel.apply, verified))
        yield


def _kernels(base: Any) -> Iterator[type[AnyKernel]]:
    for kernel in base.__subclasses__():
        yield kernel
        yield from _kernels(kernel)


def _verifying(apply: Apply, verified: list[Step | None]) -> Apply:
    @functools.wraps(apply)
    def apply_and_verify(kernel: AnyKernel, step: Step, context: Context) -> Step:
        made = apply(kernel, step, context)
        is_unlike_others = context.worker == 0 or bool(context.strategy.pipeline.stages)
        if (is_unlike_others or kernel.name == KERNELS[-1].name) and made is not verified[0]:
            try:
                verify(made, before=step)
            except RewriteError as error:  # of another class, since tests may expect that the step is refused
                raise AssertionError(f"{kernel.name} has made an inconsistent step: {error}") from error
            verified[0] = made
        return made

    return apply_and_verify


@pytest.fixture(autouse=True)
def nobody_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """An AutoDist of several workers starts none: they would run these tests."""
    monkeypatch.setattr(Peers, "begin", lambda self: None)


@pytest.fixture(autouse=True)
def no_script_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the `sys.exit`, Ctrl-C and failures of other tests from this test's view of the script's end."""
    end = watch_script_end()
    for name, value in (("_exit_argument", None), ("interrupted_at", None), ("uncaught", [])):
        monkeypatch.setattr(end, name, value)
    for name in ("last_exc", "last_value"):
        monkeypatch.delattr(sys, name, raising=False)


@pytest.fixture
def keras_in_float64(keras_as_it_was: None) -> None:
    """Keras's layers and optimizers are made in float64, from one seed."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")  # Keras fixes it at its first use
    keras.utils.set_random_seed(1)
