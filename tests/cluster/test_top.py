"""`autodist top` follows a run in a terminal, and over SSH."""

from __future__ import annotations

import contextlib
import os
import pty
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autodist.cli.metrics.sources import RemoteFolder
from autodist.errors import ClusterError
from autodist.resources import ResourceSpec
from autodist.runs.metrics.records import METRICS_FILE, MetricsLine
from tests.cluster.hosts import HOST_KINDS
from tests.cluster.runs import MARK, all_gone, within
from tests.unit.cli.metrics.recorded import line, plan, write

pytestmark = pytest.mark.processes


def append(folder: Path, added: MetricsLine) -> None:
    with open(folder / METRICS_FILE, "a", encoding="utf-8") as file:
        file.write(added.model_dump_json() + "\n")


@pytest.mark.ssh
def test_lines_of_another_machine_arrive_as_they_are_written_and_nothing_stays_there(tmp_path: Path) -> None:
    mark, directory = secrets.token_hex(8), tmp_path / "hosts"
    directory.mkdir()
    folder = write(tmp_path / "metrics", [line(10)], [plan()])
    with HOST_KINDS[-1](directory, 1, {MARK: mark}) as hosts:
        spec = ResourceSpec.from_dict(hosts.spec())
        with RemoteFolder(spec, str(folder)) as source:
            first = source.read()
            assert ([*map(step_of, first.lines)], len(first.plans)) == ([10], 1)
            append(folder, line(20))
            assert within(20, lambda: [*map(step_of, source.read().lines)] == [20])
        told = f"there is no folder {tmp_path}/absent; name the `folder`"
        with RemoteFolder(spec, str(tmp_path / "absent")) as source, pytest.raises(ClusterError, match=told):
            source.read()
        assert all_gone(mark)


def step_of(text: str) -> int:
    return MetricsLine.model_validate_json(text).step


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def test_the_view_in_a_terminal_follows_the_run_until_ctrl_c(tmp_path: Path, terminal: tuple[int, int]) -> None:
    folder, (ours, theirs), shown = write(tmp_path / "metrics", [line(10)]), terminal, bytearray()

    def shows(text: bytes) -> bool:
        with contextlib.suppress(BlockingIOError):
            shown.extend(os.read(ours, 1 << 16))
        return text in shown

    # By its name, since a long path would break the line that is looked for.
    command = [sys.executable, "-m", "autodist", "top", folder.name]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env=os.environ | {"TERM": "xterm"}
    )
    try:
        assert within(30, lambda: shows(b": step 10,")), shown
        append(folder, line(20))
        assert within(20, lambda: shows(b": step 20,")), shown
        process.send_signal(signal.SIGINT)
        assert within(20, lambda: shows(b"nothing") or process.poll() is not None)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, shown
    assert b"Traceback" not in shown
