"""FolderLock: one process writes into a folder, and the error of a second one names it."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autodist.checkpoint import lock as module
from autodist.checkpoint.lock import NAME, FolderLock, Owner
from autodist.errors import CheckpointError

HOLDING = f"""
import importlib.util, sys, time
sys.modules["autodist.errors"] = type(sys)("errors")
sys.modules["autodist.errors"].CheckpointError = RuntimeError
spec = importlib.util.spec_from_file_location("lock", {module.__file__!r})
sys.modules["lock"] = lock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lock)
lock.FolderLock.take(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""
"""Alone, without TensorFlow: a process that takes a folder and keeps it until its input ends."""


@pytest.fixture(autouse=True)
def let_go():
    yield
    FolderLock.release_all()


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.stdin.close()
        process.wait(60)


def note(folder: Path, **changed: object) -> None:
    owner = dataclasses.replace(Owner.this_process(), **changed)
    (folder / NAME).write_text(json.dumps(dataclasses.asdict(owner)))


def test_the_holder_of_the_lock_is_named(tmp_path, holder):
    with pytest.raises(CheckpointError) as raised:
        FolderLock.take(tmp_path)
    owner = Owner.from_json((tmp_path / NAME).read_bytes())
    assert owner.pid == holder.pid and not owner.has_ended
    assert str(raised.value).startswith(f"{tmp_path} is in use by process {holder.pid} on {owner.host} since 20")


def test_the_lock_of_a_killed_process_is_free(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait(60)
    assert Owner.from_json((tmp_path / NAME).read_bytes()).has_ended
    FolderLock.take(tmp_path)
    assert Owner.from_json((tmp_path / NAME).read_bytes()).pid == os.getpid()


def test_a_process_that_ends_leaves_no_file(tmp_path, holder):
    holder.stdin.close()
    holder.wait(60)
    assert os.listdir(tmp_path) == []


def test_a_process_has_its_folder_once_by_whatever_path(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    assert FolderLock.take(tmp_path / "folder") is FolderLock.take(tmp_path / "link")
    FolderLock.release_all()
    assert os.listdir(tmp_path / "folder") == []


def test_a_forked_process_does_not_keep_it(tmp_path):
    """For example, a data loader that outlives the run."""
    FolderLock.take(tmp_path)
    theirs, ours = os.pipe()
    heard, said = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        os.close(ours)
        os.write(said, b".")
        os.read(theirs, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.read(heard, 1)
    held = FolderLock._held.pop(str(tmp_path / NAME))
    held._let_go()
    try:
        FolderLock.take(tmp_path)
    finally:
        os.close(ours)
        os.waitpid(child, 0)


def test_the_content_of_the_file_counts_on_file_systems_without_locks(tmp_path, monkeypatch):
    def unknown(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unknown)
    note(tmp_path, pid=1, began=module._began(1))
    with pytest.raises(CheckpointError, match="in use by process 1 on"):
        FolderLock.take(tmp_path)
    note(tmp_path, pid=1, began="0 or so")  # another process has that number now
    FolderLock.take(tmp_path).release()
    note(tmp_path)
    FolderLock.take(tmp_path).release()  # this process's, before its re-exec
    note(tmp_path, host="elsewhere")
    with pytest.raises(CheckpointError, match="on elsewhere since .*remove .*checkpoint.lock"):
        FolderLock.take(tmp_path)


@pytest.mark.parametrize("options", ["rw,vers=3,nolock", "rw,local_lock=all,addr=1", "rw,flock", "rw,local_lock=none"])
def test_another_machines_word_counts_where_its_locks_are_not_seen(tmp_path, monkeypatch, options):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "22 1 8:1 / / rw - ext4 /dev/sda rw\n" + f"40 22 0:50 / {tmp_path} rw - nfs server:/folder {options}\n"
    )
    monkeypatch.setattr(module, "_MOUNTS", str(mounts))
    note(tmp_path, host="elsewhere")
    if options in ("rw,flock", "rw,local_lock=none"):
        FolderLock.take(tmp_path)  # it is dead, or its lock would be seen
    else:
        with pytest.raises(CheckpointError, match="on elsewhere since"):
            FolderLock.take(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"host": 3}', b"\xff"])
def test_a_file_that_is_not_whole_names_nobody(tmp_path, content):
    (tmp_path / NAME).write_bytes(content)
    FolderLock.take(tmp_path)
    assert Owner.from_json((tmp_path / NAME).read_bytes()) is not None


def test_a_file_that_was_removed_is_made_again(tmp_path):
    """The process that holds the folder notices at its next save that the lock file is gone."""
    FolderLock.take(tmp_path)
    (tmp_path / NAME).unlink()
    FolderLock.take(tmp_path)
    assert Owner.from_json((tmp_path / NAME).read_bytes()).pid == os.getpid()


def test_a_folder_that_was_moved_stays_its_holders_by_the_path_that_leads_there_now(tmp_path):
    (tmp_path / "folder").mkdir()
    lock = FolderLock.take(tmp_path / "folder")
    (tmp_path / "folder").rename(tmp_path / "larger disk")
    (tmp_path / "folder").symlink_to(tmp_path / "larger disk")
    assert FolderLock.take(tmp_path / "folder") is lock
    FolderLock.release_all()
    assert os.listdir(tmp_path / "larger disk") == []


def test_a_file_in_the_place_of_the_folder_is_told_by_who_saves_there_alone(tmp_path):
    """At the process's end nothing is left to be let go."""
    folder = tmp_path / "folder"
    folder.mkdir()
    FolderLock.take(folder)
    folder.rename(tmp_path / "away")
    folder.touch()
    with pytest.raises(NotADirectoryError):
        FolderLock.take(folder)
    FolderLock.release_all()
    assert folder.read_text() == ""
