"""File sync of a folder: only changed files are sent, each atomically, and only synced files are removed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import paramiko
import pytest

from autodist.cluster.file_sync import sync_to_all
from autodist.cluster.folder import PART, RECORD, find_files
from autodist.cluster.sftp_folder import FolderCopy, StoppedError, SyncResult
from autodist.cluster.ssh_errors import UnreachableError
from autodist.cluster.ssh_settings import SSHSettings
from autodist.errors import ClusterError, MachinesAwayError
from autodist.resources import ResourceSpec, Sync


class FakeSFTP:
    """Speaks as paramiko does, of this machine's files."""

    def __init__(self) -> None:
        self.fails: Callable[[str], None] = lambda path: None

    def stat(self, path: str) -> paramiko.SFTPAttributes:
        return paramiko.SFTPAttributes.from_stat(os.stat(path))

    def lstat(self, path: str) -> paramiko.SFTPAttributes:
        return paramiko.SFTPAttributes.from_stat(os.lstat(path))

    def listdir_attr(self, path: str) -> list[paramiko.SFTPAttributes]:
        found = [paramiko.SFTPAttributes.from_stat(entry.stat(follow_symlinks=False)) for entry in os.scandir(path)]
        for entry, name in zip(found, (entry.name for entry in os.scandir(path)), strict=True):
            entry.filename = name
        return found

    def mkdir(self, path: str) -> None:
        self.fails(path)
        os.mkdir(path)

    def putfo(self, content: BinaryIO, path: str, size: int, callback: Callable[[int, int], None]) -> None:
        with open(path, "wb") as file:
            file.write(content.read(1))
            callback(1, size)
            self.fails(path)
            shutil.copyfileobj(content, file)

    def open(self, path: str, mode: str = "r") -> Any:
        return open(path, mode)

    chmod = staticmethod(os.chmod)
    utime = staticmethod(os.utime)
    posix_rename = staticmethod(os.replace)
    remove = staticmethod(os.remove)


class Pair:
    """A folder here and one there."""

    def __init__(self, root: Path) -> None:
        self.here, self.there = root / "here", root / "far" / "there"
        self.here.mkdir()
        self.sftp = FakeSFTP()
        self.free: int | None = 1 << 40
        self.is_stopped = False

    def write(self, path: str, text: str, modified: int = 1_000_000) -> None:
        (self.here / path).parent.mkdir(parents=True, exist_ok=True)
        (self.here / path).write_text(text)
        os.utime(self.here / path, (modified, modified))

    def sync_folder(self, *exclude: str) -> SyncResult:
        files = find_files(str(self.here), exclude)
        sftp: Any = self.sftp
        return FolderCopy(
            sftp, str(self.here), str(self.there), files, lambda: self.is_stopped, lambda: self.free
        ).run()

    def contents(self) -> dict[str, str]:
        found = (path for path in self.there.rglob("*") if path.is_file() and path.name != RECORD)
        return {str(path.relative_to(self.there)): path.read_text() for path in found}


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    made = Pair(tmp_path)
    made.write("train.py", "train")
    made.write("package/model.py", "model")
    return made


def test_all_is_synced_once_and_then_what_has_changed(pair: Pair) -> None:
    os.chmod(pair.here / "train.py", 0o755)
    os.utime(pair.here / "train.py", (1_000_000, 1_000_000))
    assert pair.sync_folder() == SyncResult(files=2, bytes=10)
    assert pair.contents() == {"train.py": "train", "package/model.py": "model"}
    assert os.stat(pair.there / "train.py").st_mode & 0o777 == 0o755
    assert os.stat(pair.there / "train.py").st_mtime == 1_000_000
    assert pair.sync_folder() == SyncResult(unchanged=2)
    pair.write("package/model.py", "other", modified=1_000_001)  # of the same length
    assert pair.sync_folder() == SyncResult(files=1, bytes=5, unchanged=1)
    assert pair.contents()["package/model.py"] == "other"


def test_what_is_there_already_is_neither_brought_nor_ever_removed(pair: Pair) -> None:
    shutil.copytree(pair.here, pair.there)
    assert pair.sync_folder() == SyncResult(unchanged=2)
    assert not (pair.there / RECORD).exists()
    (pair.here / "train.py").unlink()
    assert pair.sync_folder() == SyncResult(unchanged=1)
    assert "train.py" in pair.contents()


def test_what_was_brought_and_is_gone_here_is_removed_and_nothing_else(pair: Pair) -> None:
    pair.write("old.py", "old")
    pair.write("edited.py", "edited")
    pair.write("data.bin", "data")
    pair.sync_folder()
    (pair.there / "results").write_text("of a run there")
    (pair.there / "edited.py").write_text("changed there since")
    for name in ("old.py", "edited.py"):
        (pair.here / name).unlink()
    brought = pair.sync_folder("data.bin")
    assert brought == SyncResult(unchanged=2, removed=1, kept=(str(pair.there / "edited.py"),))
    assert sorted(pair.contents()) == ["data.bin", "edited.py", "package/model.py", "results", "train.py"]
    assert pair.sync_folder("data.bin") == SyncResult(unchanged=2)


def test_a_file_that_fails_on_its_way_leaves_the_old_one_and_no_piece(pair: Pair) -> None:
    pair.sync_folder()
    pair.write("train.py", "longer than before")

    def fail(path: str) -> None:
        raise OSError("Failure")

    pair.sftp.fails = fail
    with pytest.raises(ClusterError, match=r"train.py cannot be written: Failure; check that"):
        pair.sync_folder()
    assert pair.contents()["train.py"] == "train"
    assert not list(pair.there.rglob(f"*{PART}*"))


def test_what_was_brought_before_a_failure_is_known_the_next_time(pair: Pair) -> None:
    def fail(path: str) -> None:
        if "train.py" in path:
            raise OSError("Failure")

    pair.sftp.fails = fail
    with pytest.raises(ClusterError):
        pair.sync_folder()
    pair.sftp.fails = lambda path: None
    assert pair.sync_folder() == SyncResult(files=1, bytes=5, unchanged=1)
    (pair.here / "package" / "model.py").unlink()
    assert pair.sync_folder().removed == 1


def test_no_space_and_no_right_are_reported_by_name(pair: Pair) -> None:
    def fail(path: str) -> None:
        raise OSError("Failure")

    pair.sftp.fails, pair.free = fail, 0
    with pytest.raises(ClusterError, match=r"no space for .*/far: 0 bytes are needed and 0 free"):
        pair.sync_folder()
    pair.there.mkdir(parents=True)
    pair.write("a.bin", "x" * 100)
    with pytest.raises(ClusterError, match=r"no space for .*/a.bin: 100 bytes are needed and 0 free; free some there"):
        pair.sync_folder()

    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied")

    pair.sftp.fails = refuse
    with pytest.raises(
        ClusterError, match=r"no right to write .*/a.bin: create its folder there, owned by the user who"
    ):
        pair.sync_folder()


def test_a_folder_in_the_place_of_a_file_is_reported_and_left(pair: Pair) -> None:
    (pair.there / "train.py").mkdir(parents=True)
    with pytest.raises(ClusterError, match=r"train.py is a folder there, and a file here; move it away"):
        pair.sync_folder()
    assert (pair.there / "train.py").is_dir()


def test_of_a_folder_that_machines_share_links_stay_links(pair: Pair) -> None:
    (pair.here / "link.py").symlink_to(pair.here / "train.py")
    pair.there = pair.here
    assert pair.sync_folder() == SyncResult(unchanged=3)
    assert (pair.here / "link.py").is_symlink()


def test_it_ends_in_the_middle_of_a_file_when_nobody_wants_it_any_more(pair: Pair) -> None:
    pair.is_stopped = True
    with pytest.raises(StoppedError):
        pair.sync_folder()
    assert pair.contents() == {}


SPEC = ResourceSpec.from_dict(
    {"nodes": [{"address": "localhost", "chief": True}, {"address": "198.51.100.1"}, {"address": "198.51.100.2"}]}
)


def test_each_machine_is_reported_and_all_faults_come_in_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def sync_folder(settings: SSHSettings, *about: object) -> SyncResult:
        if settings.host == failing:
            raise ClusterError("no right to write /home/ann")
        return SyncResult(files=3, bytes=45, unchanged=117, removed=1)

    monkeypatch.setattr("autodist.cluster.file_sync.sync_folder", sync_folder)
    caplog.set_level("INFO", "autodist")
    spec = SPEC.model_copy(update={"sync": Sync(folder=str(tmp_path))})
    failing = ""
    sync_to_all(spec, lambda: False)
    reported = f"copied 3 of 120 files (45 bytes) to {tmp_path}, removed 1 that no longer exist here"
    assert caplog.messages == [f"198.51.100.1: {reported}", f"198.51.100.2: {reported}"]
    failing = "198.51.100.1"
    with pytest.raises(ClusterError) as caught:
        sync_to_all(spec, lambda: False)
    assert str(caught.value).splitlines()[1:] == ["  198.51.100.1  no right to write /home/ann"]
    assert len(caplog.messages) == 3


def test_machines_that_do_not_answer_are_away_where_nothing_else_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync_folder(settings: SSHSettings, *about: object) -> SyncResult:
        if settings.host in refusing:
            raise ClusterError("its host key has changed")
        raise UnreachableError("no route to it")

    monkeypatch.setattr("autodist.cluster.file_sync.sync_folder", sync_folder)
    spec = SPEC.model_copy(update={"sync": Sync(folder=str(tmp_path))})
    refusing: tuple[str, ...] = ()
    with pytest.raises(MachinesAwayError, match="no route") as away:
        sync_to_all(spec, lambda: False)
    assert away.value.workers == ("198.51.100.1", "198.51.100.2")
    refusing = ("198.51.100.2",)
    with pytest.raises(ClusterError) as other:
        sync_to_all(spec, lambda: False)
    assert type(other.value) is ClusterError


def test_without_sync_nothing_is_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autodist.cluster.file_sync.sync_folder", lambda *about: pytest.fail("nothing was asked for"))
    sync_to_all(SPEC, lambda: False)


def test_where_a_scheduler_has_started_the_processes_it_is_said_that_nothing_is_synced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sync_to_all(SPEC.model_copy(update={"sync": Sync(folder=str(tmp_path)), "is_given": True}), lambda: False)
    (reported,) = caplog.messages
    assert reported.startswith("sync is skipped: a scheduler has started the processes")
