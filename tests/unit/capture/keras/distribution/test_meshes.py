"""Meshes of Keras's devices: translated to places, checked against the run, and made before it is known."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from keras.distribution import DataParallel, DeviceMesh

from autodist.capture.keras.distribution import run_settings
from autodist.capture.keras.distribution.meshes import (
    EarlyDevices,
    _early,
    check_early_meshes,
    describe_mesh,
    mesh_of,
)
from autodist.capture.keras.distribution.run_settings import RunSettings, set_run
from autodist.errors import StrategyError
from autodist.logs.formatting import capitalised
from autodist.sharding import Mesh

FOUR = RunSettings(("cpu:0", "cpu:1", "cpu:2", "cpu:3"), "cluster.yml")
DATA_MODEL = Mesh.of({"data": 2, "model": 2})


@pytest.fixture(autouse=True)
def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_settings, "_current", [])


def data_model(devices: Any = None) -> DeviceMesh:
    return DeviceMesh((2, 2), ["data", "model"], devices)


def test_a_mesh_without_devices_stands_for_the_places_of_any_run_of_its_size() -> None:
    mesh = data_model()
    assert mesh.devices.tolist() == [["place:0", "place:1"], ["place:2", "place:3"]]
    assert mesh_of(mesh, FOUR) == mesh_of(mesh, None) == DATA_MODEL


@pytest.mark.parametrize("devices", [None, EarlyDevices(["cpu:0"]), [*FOUR.devices], np.array(FOUR.devices)])
def test_devices_in_their_order_are_the_mesh_without_devices(devices: Any) -> None:
    assert mesh_of(data_model(devices), FOUR) == DATA_MODEL


def test_a_mesh_made_after_the_run_lists_its_places() -> None:
    set_run(FOUR)
    assert data_model().devices.tolist() == [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]
    assert DeviceMesh((2,), ["data"]).devices.tolist() == ["place:0", "place:1"]  # of another run: checked at its use


def test_devices_in_another_order_permute_the_places() -> None:
    mesh = mesh_of(data_model(["cpu:3", "cpu:0", "cpu:1", "cpu:2"]), FOUR)
    assert mesh == Mesh.of({"data": 2, "model": 2}, [3, 0, 1, 2])
    assert mesh.coordinates[3] == {"data": 0, "model": 0}


FAULTS = {
    "too few": (
        lambda: DeviceMesh((2,), ["model"]),
        r"The DeviceMesh {model: 2} (test_meshes.py:LINE) has only 2 places, and the run has 4 (cluster.yml): cpu:0",
    ),
    "too many": (lambda: DeviceMesh((4, 2), ["data", "model"]), "has 8 places, and the run has 4 (cluster.yml)"),
    "a part": (lambda: DeviceMesh((2,), ["model"], ["cpu:0", "cpu:1"]), "has only 2 places, and the run has 4"),
    "a device twice": (lambda: data_model(["cpu:0", "cpu:1", "cpu:1", "cpu:2"]), "lists the device cpu:1 twice"),
    "an axis twice": (lambda: DeviceMesh((2, 2), ["data", "data"]), "has two axes with the name 'data'"),
    "other devices": (
        lambda: data_model(["gpu:0", "cpu:1", "cpu:2", "cpu:3"]),
        "lists gpu:0, and the places of the run (cluster.yml) are cpu:0, cpu:1, cpu:2, cpu:3",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mesh_that_does_not_arrange_the_places_of_the_run_is_refused_with_both_places(fault: str) -> None:
    make, message = FAULTS[fault]
    mesh = make()
    with pytest.raises(StrategyError, match=re.escape(message).replace("LINE", r"\d+")):
        mesh_of(mesh, FOUR)


def test_keras_refuses_its_own_faults_as_without_autodist() -> None:
    with pytest.raises(ValueError, match="Shape and axis_names cannot be empty"):
        DeviceMesh((), [])
    with pytest.raises(ValueError, match="Shape and axis_names should have same size"):
        DeviceMesh((2, 2), ["data"])
    with pytest.raises(ValueError, match="Shape does not match the number of devices"):
        DeviceMesh((2, 2), ["data", "model"], ["cpu:0"])


@pytest.mark.parametrize(
    "make",
    [lambda: DeviceMesh((2,), ["batch"]), lambda: DeviceMesh((1, 2), ["data", "model"], ["cpu:0", "cpu:1"])],
    ids=["without devices", "of several axes"],
)
def test_a_mesh_made_before_the_run_is_checked_with_it_once(make: Any) -> None:
    _early.clear()  # of meshes of other tests
    mesh = make()
    with pytest.raises(
        StrategyError, match=re.escape(f"{capitalised(describe_mesh(mesh))} has only 2 places, and the run has 4")
    ):
        check_early_meshes(FOUR)
    check_early_meshes(FOUR)


def test_the_mesh_of_a_data_parallel_with_other_devices_is_not_checked() -> None:
    _early.clear()  # of meshes of other tests
    kept = [DataParallel(devices=["cpu:0", "cpu:1"]), DataParallel(), data_model(), data_model(FOUR.devices)]
    check_early_meshes(FOUR)
    assert len(kept) == 4


def test_a_mesh_is_described_by_its_axes_and_its_line() -> None:
    assert re.fullmatch(r"the DeviceMesh {data: 2, model: 2} \(test_meshes\.py:\d+\)", describe_mesh(data_model()))
