"""Checksums of files are recorded under their final names while the files are written."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from autodist.checkpoint.files import ChecksummedWrites, checksum, number_of
from autodist.checkpoint.folder import Folder


def test_a_file_that_gets_another_name_has_its_checksum(tmp_path: Path) -> None:
    with ChecksummedWrites() as trail:
        for k in range(5):
            (tmp_path / f"{k}").write_bytes(os.urandom(100 + k))
            trail.follow(str(tmp_path / f"{k}"))
        found = trail.checksums()
    for k in range(5):
        os.rename(tmp_path / f"{k}", tmp_path / f"merged-{k}")
        path = str(tmp_path / f"merged-{k}")
        assert found[number_of(path)] == checksum(path)
    assert not [thread for thread in threading.enumerate() if "worker" in thread.name.lower() and thread.is_alive()]


def test_an_error_of_writing_to_disk_is_raised_by_publishing(tmp_path: Path, monkeypatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    (tmp_path / "part").write_bytes(b"value")
    with ChecksummedWrites() as trail:
        trail.follow(str(tmp_path / "part"))
        with pytest.raises(OSError, match="No space"):
            trail.checksums()


def test_a_file_that_is_finished_is_not_read_again(tmp_path: Path, monkeypatch) -> None:
    folder, read = Folder(tmp_path), []
    with folder.unfinished() as made:
        for name in ("merged.data-00000-of-00001", "merged.index"):
            Path(made, name).write_bytes(name.encode())
        data = os.path.join(made, "merged.data-00000-of-00001")
        finished = {number_of(data): "0123abcd"}
        monkeypatch.setattr("autodist.checkpoint.folder.sync", read.append)
        folder.publish(os.path.join(made, "merged"), 1, {"step": 1}, finished=finished)
    assert data not in read and os.path.join(made, "merged.index") in read
    assert "0123abcd" in (tmp_path / "ckpt-1.json").read_text()
