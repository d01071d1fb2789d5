"""The order of the kernels, and the dumps between them."""

from __future__ import annotations

import pytest
import tensorflow as tf

from autodist.errors import RewriteError
from autodist.kernels import KERNELS, Context, rewrite
from autodist.kernels.finish.prune import Prune
from autodist.kernels.pipeline import DUMP_VARIABLE
from tests.unit.kernels.in_one_process import capture_one_weight, plan


def test_every_kernel_has_a_name_of_its_own():
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)


def test_the_step_is_dumped_after_each_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv(DUMP_VARIABLE, str(tmp_path))
    step = capture_one_weight().item
    rewrite(step, Context(plan(step, replicas=2), 0), "some_step")
    folders = sorted((tmp_path / "some_step" / "worker_0").iterdir(), key=lambda f: int(f.name.partition("_")[0]))
    assert [f.name.partition("_")[2] for f in folders] == ["captured", *(kernel.name for kernel in KERNELS)]
    (events,) = folders[0].glob("events.out.tfevents.*")
    graphs = [event.graph_def for event in tf.compat.v1.train.summary_iterator(str(events)) if event.graph_def]
    assert [tf.compat.v1.GraphDef.FromString(graph) for graph in graphs] == [step.graph_def]
    for folder in folders:
        assert list(folder.glob("events.out.tfevents.*"))


def test_the_dumped_text_has_what_kernels_tell_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv(DUMP_VARIABLE, str(tmp_path))
    step = capture_one_weight().item
    rewrite(step, Context(plan(step, workers=2, replicas=2), 0), "some_step")
    texts = {f.parent.name.partition("_")[2]: f.read_text() for f in tmp_path.glob("some_step/worker_0/*/step.txt")}
    assert texts.keys() == {"captured", *(kernel.name for kernel in KERNELS)}
    (gradient,) = step.gradients
    assert f"gradients\n  weight: {gradient.tensors[0]} of call 0\n" in texts["captured"]
    assert "joins\n  weight/" not in texts["captured"]
    assert "joins\n  weight/0: gradient, level 1" in texts["replicate"]
    assert "\n  returns " in texts["place-on-devices"] and "/job:worker/replica:0/task:0" in texts["place-on-devices"]


def test_an_error_says_in_which_kernel_it_was_raised():
    class Fails(Prune):
        def apply(self, step, context):
            raise RewriteError("no way")

    step = capture_one_weight().item
    with pytest.raises(RewriteError) as raised:
        rewrite(step, Context(plan(step, replicas=2), 0), kernels=[Fails()])
    assert raised.value.__notes__ == ["in the kernel prune, for worker 0"]


def test_nothing_is_dumped_unasked(tmp_path, monkeypatch):
    monkeypatch.delenv(DUMP_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    step = capture_one_weight().item
    rewrite(step, Context(plan(step, replicas=2), 0))
    assert not list(tmp_path.iterdir())
