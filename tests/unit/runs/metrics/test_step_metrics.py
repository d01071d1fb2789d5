"""The metrics of scripts with one worker: steps of several names, sessions, and several steps in one call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.runs.metrics.trace_schedule import FIRST

v1 = tf.compat.v1


def ad_with(folder: Path, every_steps: int) -> AutoDist:
    nodes = {"nodes": [{"address": "localhost", "cpus": [0, 1]}]}
    metrics = {"metrics": {"folder": str(folder), "every_steps": every_steps}}
    return AutoDist(resource_spec=ResourceSpec.from_dict(nodes | metrics))


def lines(ad: AutoDist, folder: Path) -> list[dict[str, Any]]:
    """Ends the metrics, and returns the lines."""
    assert ad._run.metrics is not None
    ad._run.end.before.remove(ad._run.metrics._finish)
    ad._run.metrics._finish()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def columns(lines: Sequence[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(line[name] for name in names) for line in lines]


def step_on(ad: AutoDist, name: str) -> Any:
    variable = tf.Variable([1.0, 2.0], name=name)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(x * variable, 1))
        variable.assign_sub(0.1 * tape.gradient(loss, variable))
        return loss

    step.__name__ = name
    return ad.function(step)


def test_each_step_of_a_script_has_its_own_lines(tmp_path: Path) -> None:
    ad = ad_with(tmp_path, every_steps=6)
    with ad.scope():
        critic, generator = step_on(ad, "critic"), step_on(ad, "generator")
        for _ in range(4):
            critic(np.ones((8, 2), np.float32))
            critic(np.ones((8, 2), np.float32))
            generator(np.ones((4, 2), np.float32))
    found = lines(ad, tmp_path)
    assert columns(found, "step", "name", "steps") == [
        (6, "critic", 4), (6, "generator", 2), (12, "critic", 4), (12, "generator", 2),
    ]  # fmt: skip
    for line in found:
        (measured,) = line["by_worker"]
        assert line["seconds"] == measured["seconds"] > 0
        assert line["examples_per_second"] > 0
        assert measured["peak_memory"] > 1 << 20
        assert measured["bytes_sent"] is None  # there is no other worker
    plans = [json.loads(line) for line in (tmp_path / "plans.jsonl").read_text().splitlines()]
    assert columns(plans, "name", "builder", "predicted") == [
        ("critic", "AllReduce", None), ("generator", "AllReduce", None),
    ]  # fmt: skip
    assert all(plan["name"] in plan["plan"] for plan in plans)  # the name of its variable


def test_a_trace_gives_the_times_of_a_step_and_changes_no_number(tmp_path: Path) -> None:
    ad = ad_with(tmp_path, every_steps=FIRST + 2)
    with ad.scope():
        step = step_on(ad, "train")
        losses = [float(step(np.ones((8, 2), np.float32))) for _ in range(FIRST + 3)]
    assert losses == pytest.approx([3.0 - 0.2 * k for k in range(FIRST + 3)], abs=1e-5)
    first, last = lines(ad, tmp_path)
    (measured,) = first["by_worker"]
    assert 0 < measured["compute"] <= measured["traced"]
    assert measured["compute"] + measured["wait"] + measured["send"] <= measured["traced"]
    assert columns([last], "step", "steps") == [(FIRST + 3, 1)]
    assert last["by_worker"][0]["compute"] is None


def test_several_steps_of_a_fit_in_one_call_count_and_evaluations_do_not(tmp_path: Path) -> None:
    ad = ad_with(tmp_path, every_steps=8)
    with ad.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=4)
        data = np.ones((64, 2), np.float32), np.ones((64, 1), np.float32)
        model.fit(*data, batch_size=4, epochs=2, validation_data=data, shuffle=False, verbose=0)
    found = lines(ad, tmp_path)
    assert columns(found, "step", "steps") == [(8, 8), (16, 8), (24, 8), (32, 8)]
    assert len({line["name"] for line in found}) == 1
    assert [line["by_worker"][0]["compute"] is not None for line in found].count(True) >= 1


def test_the_runs_of_a_session_are_named_by_the_operations_that_they_fetch(tmp_path: Path) -> None:
    ad = ad_with(tmp_path, every_steps=FIRST + 2)
    with tf.Graph().as_default(), ad.scope():
        x = v1.placeholder(tf.float32, [None, 2])
        variable = v1.get_variable("w", initializer=[1.0, 2.0])
        loss = tf.reduce_mean(tf.reduce_sum(x * variable, 1))
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            for _ in range(FIRST + 2):
                session.run([train, loss], {x: np.ones((8, 2), np.float32)})
                session.run(loss, {x: np.ones((8, 2), np.float32)})
    (line,) = lines(ad, tmp_path)
    assert columns([line], "step", "name", "steps") == [(FIRST + 2, "train", FIRST + 2)]
    assert line["by_worker"][0]["compute"] > 0
