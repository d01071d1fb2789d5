"""Background saves: they hold the values of their start, training continues, and no error is lost."""

from __future__ import annotations

import os
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

from autodist.checkpoint import files
from autodist.checkpoint.folder import Folder
from autodist.checkpoint.save import Background
from autodist.errors import CheckpointError
from autodist.strategies import PartitionedPS
from tests.equivalence.harness import run_to_its_end
from tests.unit.checkpoint.models import IDS, SHARDS, Model, X, autodist, distributed


@pytest.fixture
def held(monkeypatch):
    """Publishing stands still until it is set; at the latest when the test ends."""
    go_on, publish = threading.Event(), Folder.publish

    def wait_and_publish(self, *args):
        go_on.wait(60)
        return publish(self, *args)

    monkeypatch.setattr(Folder, "publish", wait_and_publish)
    yield go_on
    go_on.set()


def test_training_goes_on_and_what_is_saved_is_what_was_there(tmp_path, held):
    ad = autodist(PartitionedPS(max_shards=3, **SHARDS))
    model, step = distributed(ad)
    step(X, IDS)
    before = model.values()
    checkpoint = ad.checkpoint(tmp_path, model=model)
    path = checkpoint.save(step=1, background=True)
    step(X, IDS)
    assert checkpoint.latest is None and (model.values()["matrix:0"] != before["matrix:0"]).any()
    held.set()
    checkpoint.wait()
    assert checkpoint.latest == path
    plain = Model()
    tf.train.Checkpoint(model=plain).read(path).assert_existing_objects_matched()
    for name, value in plain.values().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_a_step_has_the_cores_before_what_is_done_beside_it(tmp_path, monkeypatch):
    """If training waits for a save, several threads read the files; in the background one thread of the lowest priority
    does.
    """
    seen: list[tuple[int, int]] = []
    compute = files.checksum

    def note(path: str) -> str:
        thread = threading.get_native_id()
        seen.append((thread, os.getpriority(os.PRIO_PROCESS, thread)))
        return compute(path)

    monkeypatch.setattr(files, "checksum", note)
    monkeypatch.setattr("autodist.runtime.variable_slices.GROUP_BYTES", 1)  # a file for each
    now = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    checkpoint = autodist().checkpoint(tmp_path, values=[tf.Variable(float(k)) for k in range(5)])
    checkpoint.save()
    assert {priority for _, priority in seen} == {now} and len(seen) > 5
    seen.clear()
    checkpoint.save(background=True)
    checkpoint.wait()
    assert {thread for thread, _ in seen} == {seen[0][0]} and len(seen) > 5
    assert {priority for _, priority in seen} == {max(now, 15)}


def test_a_save_and_a_restore_wait_for_the_one_before(tmp_path, held):
    ad = autodist()
    checkpoint = ad.checkpoint(tmp_path, model=Model())
    checkpoint.save(step=1, background=True)
    threading.Timer(0.1, held.set).start()
    assert ad.checkpoint(tmp_path, model=Model()).restore() == 1
    checkpoint.save(step=2, background=True)
    assert Folder(checkpoint.save(step=3)[: -len("/ckpt-3")]).numbers() == [1, 2, 3]


def failing(monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autodist.checkpoint.folder.os.fsync", full)


def test_a_failure_is_raised_once_by_the_next_save(tmp_path, monkeypatch):
    ad = autodist()
    checkpoint = ad.checkpoint(tmp_path, model=Model())
    path = checkpoint.save(step=1)
    with monkeypatch.context() as patch:
        failing(patch)
        checkpoint.save(step=2, background=True)
        with pytest.raises(CheckpointError, match="No space left on device.*Free some space"):
            checkpoint.save(step=3)
    assert checkpoint.latest == path
    assert checkpoint.save(step=4) != path


def test_a_failure_of_the_last_save_is_raised_at_the_end_of_the_run(tmp_path, monkeypatch):
    ad = autodist()
    ad.checkpoint(tmp_path, model=Model()).save(step=1, background=True)
    Background.of(tmp_path).wait()
    failing(monkeypatch)
    ad.checkpoint(tmp_path, model=Model()).save(step=2, background=True)
    with pytest.raises(CheckpointError, match="No space left"):
        ad._run.end.finish()


def test_the_end_of_a_run_waits(tmp_path, held):
    ad = autodist()
    path = ad.checkpoint(tmp_path, model=Model()).save(step=1, background=True)
    threading.Timer(0.1, held.set).start()
    ad._run.end.finish()
    assert Folder(tmp_path).latest() == path


@pytest.mark.processes
@pytest.mark.slow
def test_a_checkpoint_of_an_ending_script_is_complete(tmp_path):
    """By its last line, and by exit handlers, when Python starts no threads any more."""
    script = f"""
import atexit
import tensorflow as tf
from autodist import AutoDist
ad = AutoDist()
for background in (False, True):
    checkpoint = ad.checkpoint({str(tmp_path)!r} + f"/{{background}}", weight=tf.Variable(1.0))
    atexit.register(lambda checkpoint=checkpoint: checkpoint.save(step=2))
    checkpoint.save(step=1, background=background)
"""
    (tmp_path / "script.py").write_text(script)
    ended = run_to_its_end([sys.executable, str(tmp_path / "script.py")], tmp_path, 120, is_forked=True)
    assert ended.problem is None, f"{ended.problem}\n{ended.output}"
    assert [Folder(tmp_path / background).numbers() for background in ("False", "True")] == [[1, 2], [1, 2]]
