"""Functions of `keras.distribution` on TensorFlow: a script for the JAX backend runs its first lines."""

from __future__ import annotations

import ast
import inspect
import logging
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend import config
from keras.src.backend.tensorflow import distribution_lib

from autodist.capture.keras.distribution import backend, run_settings
from autodist.capture.keras.distribution.run_settings import RunSettings
from autodist.tf_compat.patches import BACKEND_DEVICES
from tests.versions import since_keras

TOP = """
import os
import tensorflow  # once for both orders of what comes next

other = os.fork()
if other:
    assert os.waitpid(other, 0)[1] == 0
    import autodist, keras
else:
    import keras, autodist

keras.distribution.initialize()
devices = keras.distribution.list_devices()
assert devices == ["cpu:0"], devices
mesh = keras.distribution.DeviceMesh(shape=(2, 4), axis_names=["batch", "model"], devices=devices)
layouts = keras.distribution.LayoutMap(mesh)
layouts[".*kernel"] = (None, "model")
assert keras.distribution.TensorLayout(("batch", None), mesh).axes == ("batch", None)
model_parallel = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
assert getattr(model_parallel, "num_processes", 1) == 1 and getattr(model_parallel, "data_shard_id", 0) == 0
keras.distribution.DataParallel()
keras.distribution.set_distribution(model_parallel)

from tensorflow.python.eager import context
assert not context.context()._initialized

from autodist import AutoDist, ResourceSpec
from autodist.errors import StrategyError
try:
    AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1]}]}))
except StrategyError as error:
    print(error, flush=True)
"""


def test_a_script_for_jax_runs_up_to_its_autodist_without_tensorflows_runtime() -> None:
    made = subprocess.run([sys.executable, "-c", TOP], capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 0, made.stderr
    message = (
        "The DeviceMesh {batch: 2, model: 4} does not fit the run: the mesh {'batch': 2, 'model': 4} has 8 places,"
    )
    assert made.stdout.count(f"{message} but the workers have 2 devices") == 2


@pytest.fixture
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_settings, "_current", [])


def test_keras_has_none_of_the_functions_but_the_one_that_starts_the_runtime() -> None:
    file = inspect.getsourcefile(distribution_lib)
    assert file is not None
    with open(file, encoding="utf-8") as source:
        names = {one.name for one in ast.parse(source.read()).body if isinstance(one, ast.FunctionDef)}
    assert names & BACKEND_DEVICES.keys() == {"list_devices"}
    assert all(hasattr(distribution_lib, name) for name in BACKEND_DEVICES)


@pytest.mark.usefixtures("no_run")
def test_before_the_run_the_devices_of_this_machine_are_listed_with_those_that_the_script_splits_them_into(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def device(name: str) -> Any:
        return tf.config.PhysicalDevice(name, name.rpartition(":")[0].upper())

    machine = [device("cpu:0"), device("gpu:0"), device("gpu:1")]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda: machine)
    monkeypatch.setattr(
        tf.config, "get_logical_device_configuration", lambda one: [1, 2] if one.name == "gpu:1" else None
    )
    assert keras.distribution.list_devices() == ["gpu:0", "gpu:1", "gpu:2"]
    assert keras.distribution.list_devices("CPU") == ["cpu:0"]


def test_a_run_of_both_kinds_lists_all_its_places_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_settings, "_current", [RunSettings(("gpu:0", "gpu:1", "cpu:0"))])
    assert keras.distribution.list_devices() == ["gpu:0", "gpu:1", "cpu:0"]
    assert keras.distribution.list_devices("gpu") == ["gpu:0", "gpu:1"]


@since_keras("3.13", "get_device_count")
def test_the_places_of_a_run_are_counted_as_they_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_settings, "_current", [RunSettings(("gpu:0", "gpu:1", "cpu:0"))])
    assert [keras.distribution.get_device_count(kind) for kind in (None, "gpu", "tpu")] == [3, 2, 0]


@pytest.mark.parametrize("arguments, warned", [
    ({}, []),
    ({"job_addresses": "10.0.0.1:1234", "num_processes": 2}, ["job_addresses='10.0.0.1:1234', num_processes=2"]),
])  # fmt: skip
def test_arguments_of_initialize_have_no_effect_and_are_reported(
    arguments: dict[str, Any], warned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "autodist")
    keras.distribution.initialize(**arguments)
    assert [message.partition(": ")[2].partition(" has no effect")[0] for message in caplog.messages] == warned


def test_a_tensor_of_no_distributed_step_is_returned_as_it_is() -> None:
    layout = keras.distribution.TensorLayout(("batch",))
    tensor = keras.ops.ones((4,))
    assert keras.distribution.distribute_tensor(tensor, layout) is tensor
    doubled = tf.function(lambda x: keras.distribution.distribute_tensor(2 * x, layout))(tensor)
    np.testing.assert_array_equal(doubled, 2 * np.ones(4))


def test_other_backends_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "backend", lambda: "jax")
    changed: list[Any] = []
    for name in ("put", "install"):
        monkeypatch.setattr(backend, name, lambda row, function: changed.append(row))
    backend.complete_backend()
    assert changed == []
