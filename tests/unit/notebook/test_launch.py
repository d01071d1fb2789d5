"""The errors before any process starts, and the result of a process that has ended."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from autodist.cluster.script_client import CONTROL_VARIABLE
from autodist.errors import LaunchError, ResourceSpecError, StrategyError, WorkerFailedError
from autodist.notebook import launch as launch_module
from autodist.notebook.call import LaunchedCall, LaunchedTraceback, Outcome
from autodist.notebook.launch import launch
from autodist.notebook.pickled import pack, unpack
from autodist.notebook.process import Ended
from autodist.resources import ResourceSpec
from autodist.strategies import PS

ONE = {"nodes": [{"address": "localhost"}], "stop_timeout": 7}


def train(ad: object, more: int = 0) -> int:
    return more


SETTINGS = {"rate": 1, "lock": threading.Lock()}


def locks(ad: object) -> object:
    return SETTINGS


locks.__module__ = "__main__"  # as if it were a cell's


class LockedBuilder(PS):
    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("it holds a lock")


async def trains_later(ad: object) -> None: ...


def trains_bit_by_bit(ad: object) -> Iterator[int]:
    yield 1


class Orders:
    """Replaces processes: records their orders, and ends on request."""

    def __init__(self) -> None:
        self.calls: list[LaunchedCall] = []
        self.stop_timeouts: list[float] = []
        self.ended = Ended(0, pickle.dumps(Outcome(pack("returned", "", ""))), None)

    def run(self, module: str, order: bytes, stop_timeout: float) -> Ended:
        self.calls.append(unpack(order))
        self.stop_timeouts.append(stop_timeout)
        return self.ended


@pytest.fixture(autouse=True)
def orders(monkeypatch: pytest.MonkeyPatch) -> Orders:
    one = Orders()
    monkeypatch.setattr(launch_module, "run_module", one.run)
    return one


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: launch(3), LaunchError, "takes a function, but got 3"),
        (lambda: launch(trains_later), LaunchError, "does not run when it is called"),
        (lambda: launch(trains_bit_by_bit), LaunchError, "does not run when it is called"),
        (lambda: launch(lambda: None), LaunchError, "cannot be called with an AutoDist and 0 arguments"),
        (lambda: launch(train, 1, 2), LaunchError, r"train\(ad: 'object', more: .*with an AutoDist and 2 arguments"),
        (lambda: launch(train, cluster=ONE, workers=2), LaunchError, "a cluster, or workers and replicas"),
        (lambda: launch(train, cluster=3), LaunchError, "cluster is a int"),
        (lambda: launch(train, cluster={"nodes": "given"}), LaunchError, "`nodes: given`"),
        (lambda: launch(train, cluster="nowhere.yml"), ResourceSpecError, "nowhere.yml"),
        (lambda: launch(train, workers=0), ResourceSpecError, "workers is 0"),
        (lambda: launch(train, strategy="Nothing"), StrategyError, "Nothing"),
        (lambda: launch(train, (one for one in ())), LaunchError, "train → more, a generator, cannot go to another"),
        (
            lambda: launch(locks),
            LaunchError,
            r"locks → SETTINGS\['lock'\], a lock, cannot go to another process \(Type",
        ),
        (lambda: launch(train, strategy=LockedBuilder()), LaunchError, "train, with its arguments.*cannot go to anoth"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_starts(
    orders: Orders, call: Callable[[], Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        call()
    assert not orders.calls


def test_a_function_that_is_too_large_is_refused(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "LARGEST", 1 << 20)
    with pytest.raises(LaunchError, match="has 2 MiB, of which `more` has 2, .*the limit is 1 MiB"):
        launch(train, bytes(2 << 20))
    assert not orders.calls


def test_a_launch_within_a_run_is_refused(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONTROL_VARIABLE, "taken")
    with pytest.raises(LaunchError, match="within a run"):
        launch(train)
    assert not orders.calls


def test_machines_and_strategy_go_with_the_function(orders: Orders, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yml"
    file.write_text("nodes: [{address: localhost, cpus: [0, 1], workers: 2}]")
    assert launch(train, 3, cluster=file, strategy=PS()) == "returned"
    launch(train, cluster=ONE, strategy="PS")
    launch(train, workers=3, replicas=2)
    by_file, by_mapping, local = orders.calls
    assert by_file.spec is not None
    assert ResourceSpec.from_payload(by_file.spec) == ResourceSpec.from_file(file)
    assert (by_file.args, by_file.function(None, 4)) == ((3,), 4)
    assert isinstance(by_file.builder, PS)
    assert isinstance(by_mapping.builder, PS)
    assert (local.spec, local.builder, local.overrides.workers, local.overrides.replicas) == (None, None, 3, 2)
    assert orders.stop_timeouts == [3.0, 7.0, 3.0]


def test_error_of_the_function_is_raised_with_its_traceback(orders: Orders) -> None:
    try:
        raise WorkerFailedError("a:1", "has gone.")
    except WorkerFailedError as error:
        orders.ended = Ended(1, pickle.dumps(Outcome.of_error(error)), None)
    with pytest.raises(WorkerFailedError, match="a:1 has gone") as caught:
        launch(train)
    assert isinstance(caught.value.__cause__, LaunchedTraceback)
    assert __file__ in str(caught.value.__cause__)


def test_error_that_cannot_come_back_is_told_in_words(orders: Orders) -> None:
    error = ValueError("bad", (one for one in ()))
    orders.ended = Ended(1, pickle.dumps(Outcome.of_error(error)), None)
    with pytest.raises(LaunchError, match=r"ValueError: \('bad', <generator"):
        launch(train)


@pytest.mark.parametrize(
    ("status", "outcome", "said"),
    [
        (-9, b"", "train: the chief's process was ended by SIGKILL"),
        (3, b"", "train: the chief's process ended with exit status 3"),
        (
            -15,
            pickle.dumps(Outcome(pack(1, "", ""))),
            "train returned, and then the chief's process was ended by SIGTERM",
        ),
    ],
)
def test_process_that_ends_badly_is_told(orders: Orders, status: int, outcome: bytes, said: str) -> None:
    orders.ended = Ended(status, outcome, None)
    with pytest.raises(LaunchError, match=said):
        launch(train)


def test_interrupt_counts_unless_the_function_has_caught_it(orders: Orders) -> None:
    interrupt = KeyboardInterrupt("this one")
    orders.ended = Ended(-2, pickle.dumps(Outcome.of_error(KeyboardInterrupt())), interrupt)
    with pytest.raises(KeyboardInterrupt, match="this one"):
        launch(train)
    orders.ended = Ended(0, pickle.dumps(Outcome(pack("saved", "", ""))), interrupt)
    assert launch(train) == "saved"


def test_what_is_trained_and_not_returned_is_told(orders: Orders, caplog: pytest.LogCaptureFixture) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    launch(lambda ad: model)
    assert not caplog.messages
    orders.ended = Ended(0, pickle.dumps(Outcome(pack(None, "", ""))), None)
    launch(lambda ad, of, weight: (model, of), 3, tf.Variable(1.0))
    assert "<lambda> returned nothing, and its workers had copies of model, weight, which" in caplog.text


def test_names_that_only_the_workers_assign_are_told(orders: Orders, caplog: pytest.LogCaptureFixture) -> None:
    def counts(ad: object) -> None:
        global count  # noqa: PLW0603 - it is what is told of
        count = 1

    launch(counts)
    assert "counts assigns count (`global`) only in the workers' processes" in caplog.text
