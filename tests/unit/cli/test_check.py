"""`autodist check`: its errors, and its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autodist.cli.app import app
from autodist.cli.checking import check_machines, links
from autodist.cli.checking.check_machines import CheckedMachine
from autodist.cli.checking.links import Measured, MeasuredLink
from tests.unit.cli.checking.fakes import THREE, found, lost

RUNNER = CliRunner()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    path = tmp_path / "cluster.yml"
    path.write_text(json.dumps({"nodes": [node.model_dump(mode="json") for node in THREE.nodes]}))
    return str(path)


def everywhere(monkeypatch: pytest.MonkeyPatch, *machines: CheckedMachine, measured: Measured | None = None) -> None:
    """Simulates these machines as the result of the probes."""
    monkeypatch.setattr(check_machines, "check_all_machines", lambda *about: list(machines))
    monkeypatch.setattr(links, "measure", lambda *about: measured or Measured())


def test_machines_that_are_ready_are_told_in_tables(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    link = MeasuredLink(round_trip=0.0002, there=1.25e9, back=1e8).named("10.0.0.1", "10.0.0.2")
    everywhere(monkeypatch, found(0), found(1), found(2), measured=Measured((link,), ("1 of 3 pairs …",)))
    done = RUNNER.invoke(app, ["check", cluster])
    assert done.exit_code == 0, done.output
    for words in (
        "10.0.0.1 (chief)", "TensorFlow 2.21.0", "free: 15000", "8 cores", "200 µs", "10 Gbit/s", "0.8 Gbit/s",
        "1 of 3 pairs …", "ip saddr != { 10.0.0.1, 10.0.0.3 } drop", "No fault: 3 machines, ready to train.",
    ):  # fmt: skip
        assert words in done.output


def test_every_fault_of_every_machine_is_told_with_status_1(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere(monkeypatch, found(0), found(1, tensorflow=None, packages={}), lost(2, "refused. Start a server"))
    done = RUNNER.invoke(app, ["check", cluster])
    assert done.exit_code == 1
    assert "No fault" not in done.output
    faults = done.output.split("Faults:\n")[1].splitlines()
    assert faults[0].startswith("  10.0.0.2  TensorFlow is not installed; run `pip install tensorflow==2.21.0` there")
    assert faults[1].startswith("            Keras is not installed")
    assert faults[2] == "  10.0.0.3  refused. Start a server"


def test_a_link_that_cannot_be_measured_is_a_fault(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    link = MeasuredLink(problem="TensorFlow could not send there: Deadline").named("10.0.0.1", "10.0.0.2")
    everywhere(monkeypatch, found(0), found(1), found(2), measured=Measured((link,)))
    done = RUNNER.invoke(app, ["check", cluster])
    assert done.exit_code == 1
    assert "10.0.0.1 to 10.0.0.2  TensorFlow could not send there: Deadline" in done.output


def test_json_has_it_all(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere(monkeypatch, found(0), found(1, digest="other"), lost(2, "refused"))
    done = RUNNER.invoke(app, ["check", "--json", cluster, __file__])
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert [machine["script"] for machine in told["machines"]] == ["same", "another", None]
    assert [machine["is_reached"] for machine in told["machines"]] == [True, True, False]
    assert told["machines"][2]["faults"] == ["refused"]
    assert told["machines"][1]["hardware"]["cores"] == 8
    assert told["exposure"][0]["commands"]


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        ("nodes: [{address: 10.0.0.1, cpu: [0]}]", [], ["cluster.yml:1: nodes[0].cpu", "allowed"]),
        ("nodes: [", [], ["cluster.yml"]),
        ("nodes: [{address: localhost}]", ["--seconds", "0"], ["--seconds"]),
        ("nodes: [{address: localhost}]", ["--second", "5"], ["No such option"]),
        ("nodes: [{address: localhost}]", ["absent.py"], ["absent.py"]),
        (None, [], ["does not exist"]),
    ],
)
def test_unusable_input_is_reported_with_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, words: list[str], told: list[str]
) -> None:
    monkeypatch.setattr(check_machines, "check_all_machines", lambda *about: pytest.fail("nothing is to be started"))
    path = tmp_path / "cluster.yml"
    if text is not None:
        path.write_text(text)
    done = RUNNER.invoke(app, ["check", str(path), *words])
    assert done.exit_code == 2, done.output
    written = "".join(done.stderr.replace("│", " ").split())  # in a box, whose lines break anywhere
    assert all("".join(word.split()) in written for word in told)
    assert "Traceback" not in done.stderr
