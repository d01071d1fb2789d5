from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from autodist.cluster.child_processes import ChildProcesses
from tests.cluster.runs import within

HOLD = """
import subprocess, sys
from autodist.cluster.child_processes import ChildProcesses
with ChildProcesses() as child_processes:
    program = child_processes.start(["sh", "-c", "sleep 60 & echo $!; wait"], -3, 1, -3)
    print(child_processes.folder, program.pid, flush=True)
    program.wait()
"""


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_programs_end_with_the_process_that_has_started_them_and_the_folder_goes() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert holder.stdout is not None
    words = " ".join(holder.stdout.readline() for _ in range(2)).split()
    pids = [int(word) for word in words if word.isdecimal()]
    (folder,) = (Path(word) for word in words if not word.isdecimal())
    assert len(pids) == 2 and all(map(is_there, pids)) and folder.stat().st_mode & 0o777 == 0o700
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    assert within(10, lambda: not any(map(is_there, pids)) and not folder.exists())


def test_leaving_ends_them_and_what_they_have_started() -> None:
    with ChildProcesses() as child_processes:
        reading, writing = os.pipe()
        child_processes.start(["sh", "-c", "sleep 60 & echo $!; wait"], subprocess.DEVNULL, writing, subprocess.DEVNULL)
        os.close(writing)
        with os.fdopen(reading) as said:
            pid = int(said.readline())
        folder = Path(child_processes.folder)
        assert is_there(pid) and folder.is_dir()
    assert within(10, lambda: not is_there(pid))
    assert not folder.exists()


def test_a_socket_fits_into_the_folder_where_the_usual_one_is_deep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with ChildProcesses() as child_processes, socket.socket(socket.AF_UNIX) as made:
        made.bind(f"{child_processes.folder}/0.{'x' * 16}")
