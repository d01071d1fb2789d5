"""The file with the measurement of the network: written, read, and refused when it is of something else."""

from __future__ import annotations

import datetime
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autodist.resources import ResourceSpec
from autodist.resources.measurements import MeasuredPair, NetworkMeasurement
from autodist.runs.measuring.measurement_file import (
    ClusterIdentity,
    MachineIdentity,
    MeasurementFile,
    StoredMeasurement,
)


def measured(days_ago: float = 0) -> NetworkMeasurement:
    at = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days_ago)
    pairs = (MeasuredPair(0, 2, 1.5e-4, 1.2e9, 1.1e9), MeasuredPair(0, 1, 1e-4, 3e9, 2.5e9))
    return NetworkMeasurement(pairs, 2e-5, 1e9, 5e8, 1e-4, at.isoformat(timespec="seconds"))


IDENTITY = ClusterIdentity((MachineIdentity("10.0.0.7", 2), MachineIdentity("10.0.0.8", 1)), "2.21.0", "0.1.0")


@pytest.fixture
def file(tmp_path: Path) -> MeasurementFile:
    return MeasurementFile.beside(str(tmp_path / "cluster.yml"))


def path_of(file: MeasurementFile) -> Path:
    assert file.path is not None
    return file.path


def test_a_measurement_is_read_as_it_was_written(file: MeasurementFile) -> None:
    network = measured()
    file.write(IDENTITY, network)
    assert file.read(IDENTITY) == StoredMeasurement(network)
    assert [path.name for path in path_of(file).parent.iterdir()] == ["cluster.measured.json"]


def test_the_file_is_readable_for_people(file: MeasurementFile) -> None:
    file.write(IDENTITY, measured())
    text = path_of(file).read_text()
    assert "Remove this file to measure again" in text.splitlines()[1]
    assert json.loads(text)["machines"] == [
        {"address": "10.0.0.7", "workers": 2},
        {"address": "10.0.0.8", "workers": 1},
    ]


def test_a_new_measurement_replaces_the_old_one(file: MeasurementFile) -> None:
    file.write(IDENTITY, measured(40))
    file.write(IDENTITY, measured())
    assert file.read(IDENTITY).network == measured()


def test_without_a_file_nothing_is_read(file: MeasurementFile, caplog: pytest.LogCaptureFixture) -> None:
    assert file.read(IDENTITY) == StoredMeasurement()
    assert not caplog.records


def test_machines_of_no_file_have_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = MeasurementFile.beside(None)
    file.write(IDENTITY, measured())
    assert file.read(IDENTITY) == StoredMeasurement()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changed", "why_not"),
    [
        (
            {"machines": (MachineIdentity("10.0.0.5", 2), MachineIdentity("10.0.0.8", 1))},
            "of other machines (10.0.0.5 instead of 10.0.0.7)",
        ),
        (
            {"machines": (*IDENTITY.machines, MachineIdentity("10.0.0.9", 1))},
            "of other machines (3 machines instead of 2)",
        ),
        (
            {"machines": (MachineIdentity("10.0.0.7", 3), MachineIdentity("10.0.0.8", 1))},
            "of another number of workers (3 workers instead of 2 on 10.0.0.7)",
        ),
        ({"tensorflow": "2.20.0"}, "of another version of TensorFlow (2.20.0 instead of 2.21.0)"),
        ({"autodist": "0.0.9"}, "of another version of AutoDist (0.0.9 instead of 0.1.0)"),
    ],
)
def test_a_measurement_of_another_cluster_is_not_used(
    file: MeasurementFile, changed: dict[str, Any], why_not: str, caplog: pytest.LogCaptureFixture
) -> None:
    file.write(replace(IDENTITY, **changed), measured())
    assert file.read(IDENTITY) == StoredMeasurement(why_not=f"cluster.measured.json is {why_not}; measured again")
    assert not caplog.records  # the caller logs the reason


def test_an_old_measurement_is_not_used(file: MeasurementFile) -> None:
    file.write(IDENTITY, measured(31))
    why_not = "cluster.measured.json is 31 days old (the limit is 30); measured again"
    assert file.read(IDENTITY) == StoredMeasurement(why_not=why_not)
    assert replace(file, days=32).read(IDENTITY).network is not None


def written(file: MeasurementFile, *keys: str | int, value: Any) -> bytes:
    """Returns the content of a file with another value in one place."""
    file.write(IDENTITY, measured())
    content = json.loads(path_of(file).read_text())
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return json.dumps(content).encode()


def test_another_version_may_have_another_form(file: MeasurementFile, caplog: pytest.LogCaptureFixture) -> None:
    file.write(replace(IDENTITY, autodist="0.0.9"), measured())
    content = json.loads(path_of(file).read_text())
    content["network"] = "in another form"
    path_of(file).write_text(json.dumps(content))
    assert "another version of AutoDist" in file.read(IDENTITY).why_not
    assert not caplog.records


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"machines": 3}'])
def test_a_file_of_a_wrong_form_is_reported_once(
    file: MeasurementFile, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path_of(file).write_bytes(content)
    assert file.read(IDENTITY) == StoredMeasurement()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"{file.path} is not a measurement of AutoDist (")


@pytest.mark.parametrize(
    ("keys", "value", "reason"),
    [
        (("network", "pairs", 0, "there"), 0, "a rate of 0"),
        (("network", "message"), -1, "negative"),
        (("network", "exchanged"), float("inf"), "not finite"),
        (("network", "call"), float("nan"), "not finite"),
        (("network", "pairs", 1, "other"), 3, "none of the 3"),
        (("network", "at"), "2026-01-01", "time zone"),
        (("network", "at"), "yesterday", "yesterday"),
        (("network", "gathered"), "much", "network.gathered"),
    ],
)
def test_impossible_values_are_reported(
    file: MeasurementFile, keys: tuple[str | int, ...], value: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    path_of(file).write_bytes(written(file, *keys, value=value))
    assert file.read(IDENTITY) == StoredMeasurement()
    (record,) = caplog.records
    assert reason in record.getMessage()


def test_a_file_that_cannot_be_read_is_reported(file: MeasurementFile, caplog: pytest.LogCaptureFixture) -> None:
    path_of(file).mkdir()
    assert file.read(IDENTITY) == StoredMeasurement()
    (record,) = caplog.records
    assert f"{file.path} cannot be read (Is a directory)" in record.getMessage()


def test_a_folder_that_is_not_writable_is_reported_once(
    file: MeasurementFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)  # the superuser may write anywhere
    for _ in range(2):
        file.write(IDENTITY, measured())
    (record,) = caplog.records
    assert f"{file.path} cannot be written (Permission denied)" in record.getMessage()


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(
    file: MeasurementFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file.write(IDENTITY, measured())
    before = path_of(file).read_text()

    def refuse(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    file.write(IDENTITY, measured(1))
    assert [path.name for path in path_of(file).parent.iterdir()] == ["cluster.measured.json"]
    assert path_of(file).read_text() == before
    assert "No space left" in caplog.text


def test_the_identity_has_the_machines_in_the_order_of_their_workers() -> None:
    nodes = [
        {"address": "10.0.0.8", "cpus": [0]},
        {"address": "10.0.0.7", "cpus": [0, 1], "workers": 2, "chief": True},
    ]
    identity = ClusterIdentity.of(ResourceSpec.from_dict({"nodes": nodes}))
    assert identity.machines == (MachineIdentity("10.0.0.7", 2), MachineIdentity("10.0.0.8", 1))
    assert identity.workers == 3
    assert identity.difference(identity) == ""
