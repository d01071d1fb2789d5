"""The look for machines that a run does not have."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autodist.cluster.script import Script
from autodist.errors import ClusterError
from autodist.resources import Node, ResourceSpec
from autodist.runs import joining_search
from autodist.runs.joining_search import MissingMachines
from autodist.runs.lost_run import Joining
from autodist.strategies import BuildsStrategy, Mesh

LIMIT = 30.0

HEAD = "min_nodes: 1\nrejoin_interval: 0.01\ncheckpoint: {folder: saved, every_steps: 9}\nnodes:\n"
FIRST = "- {address: 10.0.0.1, chief: true}\n"

Faults = tuple[str, ...] | None


class Looked:
    """A run on machines of which some are missing, and what each look at one of them finds.

    Args:
        file: its YAML file.
        left_out: addresses of the missing machines.
        builder: its strategy builder.
    """

    def __init__(self, file: Path, left_out: list[str], builder: BuildsStrategy | None = None) -> None:
        self.faults: dict[str, Callable[[int], Faults]] = {}
        self.found: queue.SimpleQueue[Joining] = queue.SimpleQueue()
        self.looks: dict[str, int] = {}
        self._spec, self._builder = ResourceSpec.from_file(file).without(left_out), builder

    def begin(self) -> MissingMachines:
        self.machines = MissingMachines(self._spec, self._builder, self.found.put)
        os.chdir("/")  # as the script may
        self.machines.begin()
        return self.machines

    def find_faults(
        self, spec: ResourceSpec, node: Node, script: Script, environment: object, is_stopped: Callable[[], bool]
    ) -> Faults:
        look = self.looks[node.address] = self.looks.get(node.address, 0) + 1
        return self.faults[node.address](look)


@pytest.fixture
def looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Looked]]:
    """Makes a run; its look has ended afterwards."""
    made: list[Looked] = []
    monkeypatch.chdir(tmp_path)
    file = Path("cluster.yml")

    def make(count: int, left_out: list[str], builder: BuildsStrategy | None = None) -> Looked:
        file.write_text(HEAD + FIRST + "".join(f"- {{address: 10.0.0.{k}}}\n" for k in range(2, count + 1)))
        made.append(Looked(file, left_out, builder))
        monkeypatch.setattr(joining_search, "find_faults", made[-1].find_faults)
        return made[-1]

    monkeypatch.setattr(Script, "of_this_process", lambda: Script(("train.py",), "/", None))
    yield make
    for one in made:
        one.machines.end()
        assert not one.machines._thread.is_alive()


def after(looks: int, faults: Faults, before: Faults) -> Callable[[int], Faults]:
    return lambda look: faults if look > looks else before


def test_those_that_are_back_or_new_join_and_others_stay_out(looked: Callable[..., Looked], tmp_path: Path) -> None:
    run = looked(3, ["10.0.0.2", "10.0.0.3"])
    file = tmp_path / "cluster.yml"
    file.write_text(file.read_text() + "- {address: 10.0.0.4}\n")
    run.faults = {"10.0.0.2": after(0, (), None), "10.0.0.3": after(0, None, None), "10.0.0.4": after(0, (), None)}
    run.begin()
    assert run.found.get(timeout=LIMIT) == Joining(
        ("10.0.0.2", "10.0.0.4"), "10.0.0.2 is back and 10.0.0.4 is new in cluster.yml", ("10.0.0.3",), (1, 3)
    )
    assert run.machines.addresses == ("10.0.0.2", "10.0.0.3", "10.0.0.4")


def test_a_fault_is_logged_once_and_each_other_one_too(
    looked: Callable[..., Looked], caplog: pytest.LogCaptureFixture
) -> None:
    run = looked(2, ["10.0.0.2"])
    run.faults["10.0.0.2"] = lambda look: ("old TensorFlow",) if look < 4 else ("no script",) if look < 6 else ()
    run.begin()
    assert run.found.get(timeout=LIMIT).addresses == ("10.0.0.2",)
    said = [message for message in caplog.messages if "left out" in message]
    start = "10.0.0.2 is left out: it is there, but cannot be used: "
    assert said == [start + "old TensorFlow", start + "no script"]
    assert run.machines.refused == {"10.0.0.2": "it is there, but cannot be used: no script"}


def test_a_file_that_cannot_be_read_is_reported_once_and_does_no_harm(
    looked: Callable[..., Looked], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = looked(2, ["10.0.0.2"])
    (tmp_path / "cluster.yml").write_text("nodes: [\n")
    run.faults["10.0.0.2"] = after(3, (), None)
    run.begin()
    assert run.found.get(timeout=LIMIT).reason == "10.0.0.2 is back"
    (said,) = [message for message in caplog.messages if "not valid YAML" in message]
    assert said.endswith("The machines that it named before are used.")


def test_an_error_of_the_chief_s_machine_is_a_fault_and_too_few_nodes_are_not_joined(
    looked: Callable[..., Looked], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = looked(3, ["10.0.0.2", "10.0.0.3"])
    file = tmp_path / "cluster.yml"
    file.write_text(file.read_text().replace("min_nodes: 1", "min_nodes: 3"))

    def fail(look: int) -> Faults:
        if look < 5:
            raise ClusterError("sync: src does not exist")
        return ()

    run.faults = {"10.0.0.2": after(0, (), None), "10.0.0.3": fail}
    run.begin()
    assert run.found.get(timeout=LIMIT).addresses == ("10.0.0.2", "10.0.0.3")
    assert len([message for message in caplog.messages if "sync: src does not exist" in message]) == 1


def test_on_a_mesh_they_join_in_whole_rows(looked: Callable[..., Looked]) -> None:
    run = looked(4, ["10.0.0.2", "10.0.0.3", "10.0.0.4"], Mesh(mesh={"data": -1, "model": 2}))
    run.faults = {f"10.0.0.{k}": after(k, (), None) for k in (2, 3, 4)}
    run.begin()
    found = run.found.get(timeout=LIMIT)
    assert (len(found.addresses) + 1) % 2 == 0 and found.workers == (1, 1 + len(found.addresses))


def test_the_end_of_the_run_ends_a_look_at_once(
    looked: Callable[..., Looked], caplog: pytest.LogCaptureFixture
) -> None:
    run, looks = looked(2, ["10.0.0.2"]), threading.Event()

    def wait(look: int) -> Faults:
        looks.set()
        assert run.machines._over.wait(LIMIT)  # as for a machine that does not answer
        return ("cancelled",)

    run.faults["10.0.0.2"] = wait
    machines = run.begin()
    assert looks.wait(LIMIT)
    machines.end()
    assert run.found.empty() and not [message for message in caplog.messages if "left out" in message]
