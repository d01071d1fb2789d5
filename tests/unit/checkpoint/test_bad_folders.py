"""A full disk or a read-only folder: the error names the cause, and earlier checkpoints stay unchanged."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from autodist.checkpoint import save
from autodist.checkpoint.content import Content
from autodist.errors import CheckpointError
from autodist.strategies import PartitionedPS
from tests.unit.checkpoint.models import IDS, SHARDS, Model, X, autodist, distributed


@contextmanager
def files_of_at_most(size: int):
    """Simulates a full disk: the system refuses writes to a file beyond that size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("is_in_session", [False, True], ids=["here", "in shards"])
@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_fills_while_it_saves_leaves_the_last_one(tmp_path, is_in_session, background):
    """The last checkpoint can be restored, and the next is saved once there is room again."""
    ad = autodist(PartitionedPS(max_shards=3, **SHARDS))
    model, step = distributed(ad)
    large = tf.Variable(np.zeros(50_000))
    checkpoint = ad.checkpoint(tmp_path, model=model, large=large)
    path = checkpoint.save(step=1)
    before = sorted(os.listdir(tmp_path))
    if is_in_session:
        step(X, IDS)

    def save_at(step: int) -> None:
        checkpoint.save(step=step, background=background)
        checkpoint.wait()

    limit = 100 if is_in_session else 9_000  # the session's values are written first, in small files
    with (
        pytest.raises(CheckpointError, match=r"could not be written in .*: .*Raise the limit on the size of a file"),
        files_of_at_most(limit),
    ):
        save_at(2)
    assert sorted(os.listdir(tmp_path)) == before
    assert checkpoint.latest == path and checkpoint.restore() == 1
    save_at(3)
    assert checkpoint.restore() == 3


def test_a_side_file_that_finds_no_room_leaves_the_last_one(tmp_path):
    """The values are there by then, in files without a name."""
    checkpoint = autodist().checkpoint(tmp_path, weight=tf.Variable(1.0))
    path = checkpoint.save(step=1)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(CheckpointError, match="Raise the limit on the size of a file"), files_of_at_most(20_000):
        checkpoint.save_with(lambda: Content(about={"told": "much" * 6_000}), step=2, background=False)
    assert sorted(os.listdir(tmp_path)) == before
    assert checkpoint.restore() == 1 and checkpoint.latest == path
    checkpoint.save(step=3)
    assert len(os.listdir(tmp_path)) == len(before) + 4


@pytest.mark.parametrize(
    "error, mend",
    [
        (OSError(errno.ENOSPC, "No space left on device"), "Free some space there"),
        (tf.errors.ResourceExhaustedError(None, None, "part-0; No space left on device"), "Free some space there"),
        (OSError(errno.EFBIG, "File too large"), "Raise the limit on the size of a file"),
        (tf.errors.OutOfRangeError(None, None, "part-0; File too large"), "Raise the limit on the size of a file"),
        (OSError(errno.EIO, "Input/output error"), "Check its disk"),
    ],
)
def test_each_cause_has_its_mend(tmp_path, monkeypatch, error, mend):
    checkpoint = autodist().checkpoint(tmp_path, weight=tf.Variable(1.0))

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(save, "write_from_process", fail)
    with pytest.raises(CheckpointError, match=mend):
        checkpoint.save(step=1)


@pytest.mark.parametrize("folder", ["/proc/checkpoints", "/dev/null", "/dev/null/checkpoints"])
def test_a_folder_that_cannot_be_written_is_named(folder):
    with pytest.raises(CheckpointError, match=f"no checkpoint can be written in {folder}: .*Name another folder"):
        autodist().checkpoint(folder, model=Model()).save()


def test_a_folder_that_is_removed_while_it_saves_is_told_so_and_checkpoints_that_are_gone_with_the_next_save(
    tmp_path, caplog
):
    checkpoint = autodist().checkpoint(tmp_path / "there", weight=tf.Variable(1.0))
    checkpoint.save(step=1)

    def remove() -> Content:
        shutil.rmtree(tmp_path / "there")
        return Content()

    with pytest.raises(CheckpointError, match=r"there, since that folder, .*, was removed meanwhile: .*Find out what"):
        checkpoint.save_with(remove, step=2, background=False)
    checkpoint.save(step=3)
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'there' / 'ckpt-1'}, the last checkpoint of this run, was removed; find out what removes it."
    ]
    assert checkpoint.restore() == 3


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no file system in memory beside the disk")
def test_a_link_to_another_file_system_is_a_folder_as_any_other(tmp_path):
    other = Path("/dev/shm") / f"autodist-{os.getpid()}"
    (tmp_path / "link").symlink_to(other)
    other.mkdir()
    try:
        checkpoint = autodist().checkpoint(tmp_path / "link", model=Model())
        assert checkpoint.restore(checkpoint.save(step=4)) == 4
    finally:
        for path in other.iterdir():
            path.unlink()
        other.rmdir()
