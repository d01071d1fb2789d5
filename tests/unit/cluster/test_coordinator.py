"""The coordinator without processes of other workers: its checks of the chief's machine, and the reasons it gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autodist.cluster.coordinator import Coordinator, _Phase
from autodist.cluster.failure import Ending, exit_reason, would_repeat
from autodist.cluster.protocol import Lost, Message, Release, Stop
from autodist.cluster.script import Script
from autodist.cluster.stalls import SAME_STEPS
from autodist.cluster.start import content_digest
from autodist.cluster.worker_connection import WorkerGroup
from autodist.errors import ClusterError, MachinesAwayError
from autodist.resources import ResourceSpec

ALONE = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0]}]})
TWO = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}], "cause_timeout": 0.2})
ELASTIC = ResourceSpec.from_dict(
    {"nodes": "given", "min_nodes": 1, "checkpoint": {"folder": "saved", "every_steps": 9}}
).with_nodes([{"address": "localhost", "cpus": [0, 1], "workers": 2, "chief": True}], [])


def test_script_that_was_changed_since_its_start_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("print(1)")
    script = Script((str(file),), str(tmp_path), str(file), content_digest(str(file)))
    coordinator = Coordinator(ALONE, pytest.fail, script)
    coordinator.prepare()
    coordinator.reserved_port.release()
    file.write_text("print(2)")
    with pytest.raises(ClusterError, match=f"localhost  the script {file} differs from .*start it again"):
        Coordinator(ALONE, pytest.fail, script).prepare()


def test_ssh_is_loaded_by_those_who_need_it_alone() -> None:
    code = "import sys, autodist.cluster.coordinator; sys.exit('paramiko' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


class Connection:
    """To a worker that has reported that it is done, and ends with a status once it may; None: it does not end."""

    name, last_lines = "localhost:1", ()

    def __init__(self, coordinator: Coordinator, status: int | None) -> None:
        self._coordinator, self._ends_with = coordinator, status
        self.done, self.is_released = True, False
        self.status: int | None = None
        self.ending: Ending | None = None
        self.received: list[Message] = []

    def send(self, message: Message) -> None:
        self.received.append(message)
        if isinstance(message, Release) and self._ends_with is not None:
            self.status = self._ends_with
            self.ending = Ending(self.name, exit_reason(self.status, joined=True, done=True))
            self._coordinator._note_ending(self)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "reason"),
    [(3, "ended with exit status 3: it is needed"), (0, "is needed"), (-11, "is needed"), (None, "is needed")],
)
def test_a_worker_that_is_done_while_others_need_it_is_blamed_with_the_status_that_its_script_has_chosen(
    status: int | None, reason: str
) -> None:
    coordinator = Coordinator(TWO, pytest.fail, Script(("train.py",), "/", None))
    connection: Any = Connection(coordinator, status)
    coordinator._group.connections = (connection,)
    coordinator._phase = _Phase.RUNNING
    coordinator.end_with_failure("localhost:1", "is needed")
    assert [ending.reason for ending in coordinator._endings] == [reason]


def test_a_script_that_ends_before_a_step_of_others_would_do_so_again_whatever_its_exit_status() -> None:
    for status in (0, 3):
        coordinator = Coordinator(TWO, pytest.fail, Script(("train.py",), "/", None))
        connection: Any = Connection(coordinator, status)
        coordinator._group.connections = (connection,)
        coordinator._phase = _Phase.RUNNING
        coordinator.end_with_failure("localhost:1", f"has ended its script, and localhost:0 waits. {SAME_STEPS}")
        (ending,) = coordinator._endings
        assert would_repeat(ending.error())


def test_a_failure_that_must_not_wait_ends_the_run_without_the_exit_status() -> None:
    coordinator = Coordinator(TWO, pytest.fail, Script(("train.py",), "/", None))
    connection: Any = Connection(coordinator, 3)
    coordinator._group.connections = (connection,)
    coordinator._phase = _Phase.RUNNING
    coordinator.end_with_failure("localhost:1", "has failed in a step", waits=False)
    assert (coordinator._endings[0].reason, connection.received) == ("has failed in a step", [])


def test_processes_that_leave_an_elastic_run_before_its_checks_are_away_and_the_others_join_the_next_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator = Coordinator(ELASTIC, pytest.fail, Script(("train.py",), "/", None))
    coordinator.starts_again = lambda: True
    connection: Any = Connection(coordinator, None)
    monkeypatch.setattr(connection, "answer", Lost("its process has ended", is_away=True), raising=False)

    def open_connections() -> None:
        coordinator._group.connections = (connection,)

    monkeypatch.setattr(coordinator, "_open_connections", open_connections)
    monkeypatch.setattr(WorkerGroup, "request_facts", lambda group, requests: None)
    monkeypatch.setattr(WorkerGroup, "close", lambda group: None)
    with pytest.raises(MachinesAwayError, match="its process has ended") as away:
        coordinator.prepare()
    assert (away.value.workers, connection.received) == (("localhost:1",), [])
    coordinator.abort("the chief's script failed")
    (stop,) = connection.received
    assert isinstance(stop, Stop) and stop.starts_again
