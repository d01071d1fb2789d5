"""The records of a process for `autodist verify`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import StrategyError
from autodist.graph.step import Step
from autodist.kernels import KERNELS, LOCAL_KERNELS
from autodist.logs.terminal import EXPLAINS_DIFFERENCES
from autodist.proto import strategy_pb2
from autodist.verify.recorder import NOTES, Recorder, Recording
from tests.unit.kernels import in_one_process


def recorder(folder: Path, **told: object) -> Recorder:
    return Recorder(Recording(**{"folder": str(folder), "steps": 2, "in_float64": False, "is_reference": False} | told))  # type: ignore[arg-type]


@pytest.fixture
def step() -> Step:
    """A step with a momentum, in float32."""
    weight = tf.Variable(np.ones((3, 2), np.float32), name="weight")
    moment = tf.Variable(np.zeros((3, 2), np.float32), name="moment", trainable=False)

    def train(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.nn.dropout(x, 0.5) @ weight))
        moment.assign(0.9 * moment + tape.gradient(loss, weight))
        weight.assign_sub(0.1 * moment)
        return loss

    return in_one_process.capture(train, np.zeros((4, 3), np.float32)).step


def mse(truth: tf.Tensor, predicted: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.square(predicted - truth))


VALUES: Callable[[], dict[str, np.ndarray]] = lambda: {"weight": np.ones((3, 2)), "moment": np.zeros((3, 2))}  # noqa: E731


def test_steps_are_written_by_kind_and_the_script_ends_with_the_last(tmp_path: Path, step: Step) -> None:
    one = recorder(tmp_path)
    one.after_step(step, 0, VALUES, lambda: {"loss": tf.constant(2.0), "name": "text"})
    with pytest.raises(SystemExit) as ended:
        one.after_step(step, 0, VALUES, lambda: tf.constant(1.0))
    assert ended.value.code == 0
    with np.load(tmp_path / "0.npz") as first, np.load(tmp_path / "1.npz") as second:
        assert set(first) == {"variable weight", "slot moment", "output loss"}
        assert second["output value"] == 1.0
    notes = json.loads((tmp_path / NOTES).read_text())
    assert notes["is_in_float64"] is False and notes["draws"] and not notes["normalises"]
    with pytest.raises(SystemExit):  # a script that has caught it
        one.after_step(step, 0, VALUES, dict)
    assert len(list(tmp_path.glob("*.npz"))) == 2


@pytest.mark.parametrize(("loss", "is_coarse"), [(tf.compat.v1.losses.mean_squared_error, True), (mse, False)])
def test_a_cast_to_a_lower_precision_is_noted(tmp_path: Path, loss: Callable[..., tf.Tensor], is_coarse: bool) -> None:
    weight = tf.Variable(np.ones((3, 1)), name="weight")

    def train(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            value = loss(tf.zeros_like(x[:, :1]), x @ weight)
        weight.assign_sub(0.1 * tape.gradient(value, weight))

    step = in_one_process.capture(train, np.zeros((4, 3))).step
    recorder(tmp_path).after_step(step, 0, lambda: {"weight": np.ones((3, 1))}, dict)
    assert json.loads((tmp_path / NOTES).read_text())["has_coarse_parts"] is is_coarse


def test_warnings_and_reasons_for_differences_are_noted_also_those_of_later_steps(
    tmp_path: Path, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    log = logging.getLogger("autodist")
    monkeypatch.setattr(log, "handlers", list(log.handlers))
    monkeypatch.setattr(log, "level", log.level)
    one = recorder(tmp_path, steps=3)
    one.begin()
    log.warning("%s combines examples", "loss")
    log.info("traced")
    log.info("batch normalisation", extra=EXPLAINS_DIFFERENCES)
    one.after_step(step, 0, VALUES, dict)
    assert json.loads((tmp_path / NOTES).read_text())["messages"] == ["loss combines examples", "batch normalisation"]
    logging.getLogger("autodist.capture").warning("another")
    one.after_step(step, 0, VALUES, dict)
    assert json.loads((tmp_path / NOTES).read_text())["messages"][2:] == ["another"]


def test_other_workers_make_as_many_steps_and_write_nothing(tmp_path: Path, step: Step) -> None:
    one = recorder(tmp_path, steps=1)
    with pytest.raises(SystemExit):
        one.after_step(step, 1, VALUES, dict)
    assert list(tmp_path.iterdir()) == []


def test_a_script_of_another_precision_ends_at_once_where_float64_was_tried(tmp_path: Path, step: Step) -> None:
    with pytest.raises(SystemExit):
        recorder(tmp_path, in_float64=True, steps=9).after_step(step, 0, VALUES, dict)


def test_the_reference_is_the_step_as_it_was_captured(tmp_path: Path) -> None:
    assert recorder(tmp_path, is_reference=True).kernels(KERNELS) is LOCAL_KERNELS
    assert recorder(tmp_path).kernels(KERNELS) is KERNELS


def test_examples_of_one_batch_are_permuted_alike_and_others_in_the_next_step(tmp_path: Path, step: Step) -> None:
    one = recorder(tmp_path, permutation=0)
    x, y, whole = np.arange(20).reshape(10, 2), tf.range(10), np.arange(3)
    first = one.in_order([x, y, whole], [0, 0, None])
    assert (first[0][:, 0] == 2 * first[1]).all() and (first[2] == whole).all()
    assert sorted(first[1]) == list(range(10)) and list(first[1]) != list(range(10))
    one.after_step(step, 0, VALUES, dict)
    assert list(one.in_order([x, y], [0, 0])[1]) != list(first[1])
    assert recorder(tmp_path).in_order([x], [0])[0] is x


def test_a_batch_that_cannot_be_permuted_is_noted(tmp_path: Path, step: Step) -> None:
    one = recorder(tmp_path, permutation=0)
    rows = tf.SparseTensor([[0, 0]], [1.0], [2, 2])
    assert one.in_order([rows], [0]) == [rows]
    one.after_step(step, 0, VALUES, dict)
    assert json.loads((tmp_path / NOTES).read_text())["is_permuted"] is False


def test_a_batch_of_which_no_axis_is_known_is_noted_and_rates_are_no_batch(tmp_path: Path, step: Step) -> None:
    for number, (values, is_permuted) in enumerate([([np.arange(3), np.array(0.1)], False), ([np.array(0.1)], True)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        one = recorder(folder, permutation=0)
        one.in_order(values, [None] * len(values))
        one.after_step(step, 0, VALUES, dict)
        assert json.loads((folder / NOTES).read_text())["is_permuted"] is is_permuted


@pytest.mark.parametrize(
    "node, told",
    [
        ({"parameter_server": strategy_pb2.ParameterServer(asynchronous=True)}, "without waiting"),
        ({"parameter_server": strategy_pb2.ParameterServer(staleness=2)}, "without waiting"),
        ({"all_reduce": strategy_pb2.AllReduce(compressor=strategy_pb2.Compressor(kind="FLOAT16"))}, "rounds"),
    ],
)
def test_a_strategy_that_means_another_training_is_refused(tmp_path: Path, node: dict[str, object], told: str) -> None:
    inexact = strategy_pb2.Strategy(nodes=[strategy_pb2.VariableNode(variable="weight", **node)])  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match=f"weight .*{told}"):
        recorder(tmp_path).require_exact(inexact)
    exact = strategy_pb2.VariableNode(variable="weight", all_reduce=strategy_pb2.AllReduce())
    recorder(tmp_path).require_exact(strategy_pb2.Strategy(nodes=[exact]))


def test_a_pipeline_is_noted(tmp_path: Path, step: Step) -> None:
    one, staged = recorder(tmp_path, steps=1), strategy_pb2.Strategy()
    staged.graph_config.replicas.add()
    for worker in range(2):
        staged.pipeline.stages.add(worker=worker)
    one.require_exact(staged)
    with pytest.raises(SystemExit):
        one.after_step(step, 0, VALUES, dict)
    notes = json.loads((tmp_path / NOTES).read_text())
    assert (notes["stages"], notes["micro_batches"]) == (2, 1)
