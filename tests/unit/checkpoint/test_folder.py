"""Folder: a checkpoint is complete or absent, at whatever point its run is killed."""

from __future__ import annotations

import contextlib
import json
import os
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from autodist.checkpoint import files
from autodist.checkpoint import folder as module
from autodist.checkpoint.folder import Folder
from autodist.errors import CheckpointError

CHANGING = ("makedirs", "open", "fsync", "close", "replace", "unlink")


class KilledError(BaseException):
    """Stands for a signal that no code survives."""


def save(folder: Folder, number: int, keep: int = 3) -> str:
    with folder.unfinished() as made:
        prefix = os.path.join(made, "merged")
        tf.raw_ops.SaveV2(
            prefix=prefix, tensor_names=["w"], shape_and_slices=[""], tensors=[tf.fill([100], float(number))]
        )
        path = folder.publish(prefix, number, {"step": number})
        folder.keep(keep)
    return path


def saved_in(path: str | None) -> float:
    return float(tf.train.load_checkpoint(path).get_tensor("w")[0]) if path else 0.0


def killing_at(count: int, error: type[BaseException] = KilledError, only: bool = False) -> types.SimpleNamespace:
    """Returns `os` with functions that have no effect on files from call number `count` on, or in that call only."""
    left = [count]

    def wrapped(plain: Callable) -> Callable:
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == -1 or (left[0] < 0 and not only):
                raise error
            return plain(*args, **kwargs)

        return call

    names = {name: getattr(os, name) for name in dir(os)}
    return types.SimpleNamespace(**names | {name: wrapped(names[name]) for name in CHANGING}, left=left)


def test_a_kill_at_any_file_operation_leaves_the_last_checkpoint_readable(tmp_path, monkeypatch):
    """Also the temporary folder stays then, as after SIGKILL; the next one to be saved clears all that is left."""
    found = set()
    for count in range(100):
        folder = Folder(tmp_path / str(count))
        save(folder, 1, keep=1)
        killed = killing_at(count)
        with monkeypatch.context() as patch:
            for changed in (module, files):
                patch.setattr(changed, "os", killed)
            patch.setattr(module.shutil, "rmtree", lambda *args, **kwargs: None)
            with contextlib.suppress(KilledError):
                save(folder, 2, keep=1)
        value = saved_in(Folder(folder.path).latest())
        assert value in (1.0, 2.0)
        assert saved_in(tf.train.latest_checkpoint(folder.path)) in (1.0, 2.0)
        found.add(value)
        save(folder, 3, keep=1)
        names = ["checkpoint", "ckpt-3.data-00000-of-00001", "ckpt-3.index", "ckpt-3.json"]
        assert sorted(os.listdir(folder.path)) == names
        if killed.left[0] >= 0:
            break
    assert count >= 15 and found == {1.0, 2.0}


def test_a_file_operation_that_fails_leaves_complete_checkpoints_alone(tmp_path, monkeypatch):
    """As on a full disk, after which the run may end: nothing removes the rest later."""
    for count in range(100):
        folder = Folder(tmp_path / str(count))
        save(folder, 1, keep=1)
        failing = killing_at(count, OSError, only=True)
        with monkeypatch.context() as patch:
            for changed in (module, files):
                patch.setattr(changed, "os", failing)
            with contextlib.suppress(OSError, CheckpointError):
                save(folder, 2, keep=1)
        complete = {f"ckpt-{number}" for number in folder.numbers()}
        names = set(os.listdir(folder.path)) - {"checkpoint"}
        endings = (".data-00000-of-00001", ".index", ".json")
        assert complete and names == {name + ending for name in complete for ending in endings}
        if failing.left[0] >= 0:
            break
    assert count >= 15


def test_a_kill_before_the_first_index_has_its_name_leaves_no_checkpoint(tmp_path, monkeypatch):
    folder = Folder(tmp_path)
    with monkeypatch.context() as patch:
        killed = killing_at(6)
        for changed in (module, files):
            patch.setattr(changed, "os", killed)
        with pytest.raises(KilledError):
            save(folder, 1)
    assert folder.latest() is None and folder.numbers() == []


def test_only_the_last_ones_stay_and_tensorflow_knows_them(tmp_path):
    folder = Folder(tmp_path)
    for number in (1, 2, 3, 4):
        path = save(folder, number, keep=2)
    state = tf.train.get_checkpoint_state(str(tmp_path))
    assert state.model_checkpoint_path == path == folder.latest() == tf.train.latest_checkpoint(str(tmp_path))
    assert [os.path.basename(p) for p in state.all_model_checkpoint_paths] == ["ckpt-3", "ckpt-4"]
    assert folder.numbers() == [3, 4]
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(), str(tmp_path), 2, checkpoint_name="ckpt")
    assert manager.latest_checkpoint == path


@pytest.mark.parametrize("content", [b"", b"\0\0\xff", b"model_checkpoint_path: 'gone'"])
def test_the_last_checkpoint_is_found_by_its_number_if_the_state_file_names_none(tmp_path, content):
    path = save(Folder(tmp_path), 3)
    (tmp_path / "checkpoint").write_bytes(content)
    assert Folder(tmp_path).latest() == path


def test_a_folder_that_was_moved_is_read(tmp_path):
    save(Folder(tmp_path / "before"), 1)
    os.rename(tmp_path / "before", tmp_path / "after")
    np.testing.assert_array_equal(saved_in(Folder(tmp_path / "after").latest()), 1.0)


def test_the_side_file_has_what_it_was_given_and_a_checksum_of_each_file(tmp_path):
    path = save(Folder(tmp_path), 7)
    about = json.loads(Path(f"{path}.json").read_text())
    assert about["format"] == 1 and about["step"] == 7
    assert about["files"].keys() == {".index", ".data-00000-of-00001"}
    assert about["files"][".data-00000-of-00001"]["bytes"] == 400


def test_other_files_in_the_folder_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    save(Folder(tmp_path), 1)
    save(Folder(tmp_path), 2, keep=1)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("path", ["gs://bucket/run", "s3://bucket"])
def test_a_path_without_a_file_system_is_refused(path):
    with pytest.raises(CheckpointError, match="not on a file system"):
        Folder(path)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="no checkpoint can be written in .*file"):
        save(Folder(tmp_path / "file" / "folder"), 1)


def test_a_folder_that_cannot_be_looked_into_is_no_empty_one(tmp_path):
    """Training from the beginning, because a drive does not answer, would be the wrong thing to do."""
    folder = tmp_path / "folder"
    folder.symlink_to(folder)
    with pytest.raises(CheckpointError, match=f"in {folder} cannot be listed: .*levels.*Name another folder, or"):
        Folder(folder).latest()
