"""The order of the kernels, and the dumps between them."""

from __future__ import annotations

import pytest
import tensorflow as tf

from autodist.errors import RewriteError
from autodist.graph.step import CapturedStep, PlacedStep, ReplicatedStep
from autodist.kernels import KERNELS, SETTING_KERNELS, Context, rewrite, run_pipeline
from autodist.kernels.base import in_order
from autodist.kernels.finish.place_on_devices import PlaceOnDevices
from autodist.kernels.finish.prune import Prune
from autodist.kernels.pipeline import DUMP_VARIABLE
from autodist.kernels.place.assign_owners import AssignOwners
from autodist.kernels.place.read_remote_variables import ReadRemoteVariables
from autodist.kernels.replicate.replicate import Replicate
from autodist.kernels.rows.merge_rows import MergeRows
from tests.unit.kernels.in_one_process import capture_one_weight, plan


def test_every_kernel_has_a_name_of_its_own():
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)


def test_the_step_is_dumped_after_each_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv(DUMP_VARIABLE, str(tmp_path))
    step = capture_one_weight().step
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
    step = capture_one_weight().step
    rewrite(step, Context(plan(step, workers=2, replicas=2), 0), "some_step")
    texts = {f.parent.name.partition("_")[2]: f.read_text() for f in tmp_path.glob("some_step/worker_0/*/step.txt")}
    assert texts.keys() == {"captured", *(kernel.name for kernel in KERNELS)}
    (gradient,) = step.gradients
    assert f"gradients\n  weight: {gradient.tensors[0]} of call 0\n" in texts["captured"]
    assert "pending reductions\n  weight/" not in texts["captured"]
    assert "pending reductions\n  weight/0: gradient, level 1" in texts["replicate"]
    assert "\n  returns " in texts["place-on-devices"] and "/job:worker/replica:0/task:0" in texts["place-on-devices"]


def test_an_error_says_in_which_kernel_it_was_raised():
    class Fails(Prune):
        def apply(self, step, context):
            raise RewriteError("no way")

    step = capture_one_weight().step
    with pytest.raises(RewriteError) as raised:
        rewrite(step, Context(plan(step, replicas=2), 0), kernels=[Fails()])
    assert raised.value.__notes__ == ["in the kernel prune, for worker 0"]


def test_nothing_is_dumped_unasked(tmp_path, monkeypatch):
    monkeypatch.delenv(DUMP_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    step = capture_one_weight().step
    rewrite(step, Context(plan(step, replicas=2), 0))
    assert not list(tmp_path.iterdir())


def test_a_kernel_before_one_that_it_must_follow_is_refused():
    reason = "place-on-devices must run after read-remote-variables: it places nodes on other workers"
    with pytest.raises(ValueError, match=reason):
        in_order(AssignOwners(), PlaceOnDevices(), ReadRemoteVariables())
    assert in_order(AssignOwners(), ReadRemoteVariables(), PlaceOnDevices())


def test_every_reason_for_an_order_names_a_kernel():
    names = {kernel.name for kernel in (*KERNELS, *SETTING_KERNELS)}
    assert {name for kernel in KERNELS for name in kernel.after} <= names


def test_kernels_swapped_against_their_order_are_refused():
    refused = 0
    for k, kernel in enumerate(KERNELS):
        for before in range(k):
            if KERNELS[before].name in kernel.after:
                swapped = list(KERNELS)
                swapped[before], swapped[k] = kernel, KERNELS[before]
                with pytest.raises((ValueError, TypeError), match="must run after|takes a"):
                    in_order(*swapped)
                refused += 1
    assert refused > len(KERNELS)


def test_a_kernel_that_would_get_another_phase_is_refused():
    with pytest.raises(TypeError, match="the kernel replicate takes a PlacedStep, and gets a CapturedStep"):
        in_order(Replicate(), AssignOwners())
    with pytest.raises(TypeError, match="merge-rows takes a ReplicatedStep, and gets a CapturedStep: run it after the"):
        run_pipeline([MergeRows()], capture_one_weight().step, Context(plan(capture_one_weight().step), 0))


@pytest.mark.parametrize(("workers", "replicas"), [(1, 1), (1, 2), (2, 1)])
def test_kernels_turn_a_captured_step_into_a_placed_and_a_replicated_one(workers, replicas):
    step, phases = capture_one_weight().step, {}

    def watch(kernel, seen):
        phases[kernel] = type(seen)

    rewrite(step, Context(plan(step, workers=workers, replicas=replicas), 0), also=watch)
    names = [kernel.name for kernel in KERNELS]
    placed, replicated = names.index("assign-owners"), names.index("replicate")
    assert {phases[name] for name in ["captured", *names[:placed]]} == {CapturedStep}
    assert {phases[name] for name in names[placed:replicated]} == {PlacedStep}
    assert {phases[name] for name in names[replicated:]} == {ReplicatedStep}


def test_a_kernel_that_loses_the_phase_is_refused():
    class Forgets(Prune):
        def apply(self, step, context):
            return CapturedStep(step.graph_def, step.variables)

    step = capture_one_weight().step
    kernels = [AssignOwners(), Forgets()]
    with pytest.raises(RewriteError, match="returned a CapturedStep: return a PlacedStep, made from its argument"):
        run_pipeline(kernels, step, Context(plan(step), 0))
