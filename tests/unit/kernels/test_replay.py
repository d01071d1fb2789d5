"""Replay: the rewritten text of stored steps equals the record, so that any unintended change is visible.

`scripts/replay.py` shows the differences and records them.
"""

from __future__ import annotations

import itertools

import pytest

from autodist.graph.parts import PendingReductionKind, ReduceOp, RowJoin
from autodist.kernels import KERNELS, LOCAL_KERNELS, SETTING_KERNELS
from autodist.kernels.pipeline import IMPORT_PASSES
from autodist.kernels.rows.report_table_writes import ReportTableWrites
from autodist.kernels.rows.rewrite_rows import RULES
from autodist.kernels.shard.holders import HoldInRows
from autodist.proto import strategy_pb2
from autodist.strategies import registered_names
from tests.replay import stored
from tests.replay.capture import capture
from tests.replay.cases import CASES, CLUSTERS, STRATEGIES
from tests.replay.layouts import PREFIX, layouts_of
from tests.replay.names import differ_by_names_alone
from tests.replay.recorded import difference, recorded, recorded_names, recorded_version, tensorflow_version
from tests.replay.rewriting import load, replay
from tests.replay.stored import PIPELINES, StoredStep, stored_names
from tests.transfers.graphs import faults_of

LINES = 30


@pytest.mark.parametrize("name", CASES)
def test_a_stored_step_is_rewritten_as_recorded(name):
    text = replay(CASES[name]).text
    if tensorflow_version() != recorded_version():
        pytest.skip(f"recorded with TensorFlow {recorded_version()}, whose API may make other nodes of a fragment")
    _require_recorded(name, text)


@pytest.mark.parametrize("step", stored_names())
def test_the_tensors_of_a_stored_step_have_the_recorded_layouts(step):
    _require_recorded(PREFIX + step, layouts_of(step))


def _require_recorded(name, text):
    found = difference(recorded(name), text, LINES)
    assert not found, f"`scripts/replay.py {name}` shows what has changed, `--record` takes it:\n{found}"


def test_every_record_belongs_to_a_case_or_a_stored_step():
    assert recorded_names() == sorted([*CASES, *(PREFIX + step for step in stored_names())])


def test_every_step_strategy_and_cluster_is_in_a_case():
    used = {case.step for case in CASES.values()}
    used |= {planned for step in used if (planned := load(step).planned_by)}
    assert used == set(stored_names())
    assert {case.strategy for case in CASES.values()} == set(STRATEGIES)
    assert {case.cluster for case in CASES.values()} == set(CLUSTERS)


@pytest.fixture(scope="module")
def replayed():
    return [replay(case) for case in CASES.values()]


def test_every_kernel_and_every_rule_for_rows_changes_a_step(replayed):
    changing = {kernel.name for kernel in (*KERNELS, *SETTING_KERNELS, *LOCAL_KERNELS)}
    # No stored step follows one that divides variables along the batch axis: shard/test_data_axis.py.
    changing -= {ReportTableWrites.name, HoldInRows.name}
    changed_by = set().union(*(one.changed_by for one in replayed))
    passes = {one.name for one in IMPORT_PASSES}  # no script of a stored step has annotations
    assert changed_by - passes == (changing - passes) | {rule.name for rule in RULES}


def test_captured_steps_do_not_change(replayed):
    used = {case.step for case in CASES.values()}
    assert [name for name in used if load(name).step.graph_def != StoredStep.load(name).step.graph_def] == []


def test_every_kind_of_reduction_is_made(replayed):
    reductions = [pending for one in replayed for pending in one.reductions]
    assert {pending.kind for pending in reductions} == set(PendingReductionKind)
    assert {pending.merge for pending in reductions} == set(ReduceOp)
    assert {pending.row_join for pending in reductions if pending.is_sparse} == set(RowJoin)


def test_every_builder_builds_a_strategy(replayed):
    # The first is made by a YAML's `variables`, and has the name of the builder beneath. The second has nodes of other
    # builders, which change with the cost model.
    own = {"OverrideVariables", "Auto"}
    assert {one.strategy.builder for one in replayed} >= set(registered_names()) - own


def test_every_synchronizer_and_compressor_is_carried_out(replayed):
    said = [part for one in replayed for node in one.strategy.nodes for part in (*node.shards, node)]
    reduced = [part.all_reduce for part in said if part.HasField("all_reduce")]
    served = [part.parameter_server for part in said if part.HasField("parameter_server")]
    specs = strategy_pb2.AllReduce.Spec
    assert {one.spec for one in reduced} == set(specs.values()) - {specs.Value("AUTO")}
    kinds = strategy_pb2.Compressor.Kind
    own = {"NAMED"}  # scripts' own compressors: tests/unit/compressors
    assert {kinds.Name(one.compressor.kind) for one in reduced} == set(kinds.keys()) - own
    assert {one.compressor.error_feedback for one in reduced} == {True, False}
    paces = {(one.asynchronous, one.staleness > 0, one.local_proxy) for one in served}
    assert paces >= {(False, False, False), (False, False, True), (False, True, False), (False, True, True)}
    assert paces >= {(True, False, False), (True, False, True), (True, True, False)}


def test_all_sequences_of_kernels_are_passed():
    assert {load(case.step).pipeline for case in CASES.values()} == set(PIPELINES)


def test_no_order_of_messages_blocks_the_workers_or_fills_a_queue(replayed):
    assert [fault for one in replayed for fault in faults_of(one.transfers)] == []


@pytest.mark.parametrize(
    "name", ["aggregations", "scattered_state", "update_by_loss", "step_cotangents_clip_under_a_mask"]
)
def test_a_captured_step_is_the_same_once_it_was_stored(name, monkeypatch, tmp_path):
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    step = capture(name)[name]
    step.save(name)
    found = StoredStep.load(name)
    assert found == step
    for node in step.step.graph_def.node:
        for tensor in itertools.takewhile(lambda t: _has_spec(step.step, t), (f"{node.name}:{k}" for k in range(9))):
            assert found.step.spec_of(tensor) == step.step.spec_of(tensor)


def _has_spec(step, tensor):
    try:
        step.spec_of(tensor)
    except IndexError:
        return False
    return True


TEXT = """strategy
worker 0
runs
  returns c:0
nodes
  a = Const[value=float32[] 1.0]()
  b = Neg[T=float32](a)
  c = Sub[T=float32](a, b, ^b) on cpu:0
"""


def test_other_names_are_told_from_another_step():
    renamed = TEXT.replace("(a", "(first").replace("  a ", "  first ").replace("c", "last")
    assert not differ_by_names_alone(TEXT, renamed)  # Const is no name
    renamed = (
        TEXT.replace("(a", "(first").replace("  a ", "  first ").replace("  c ", "  last ").replace("c:0", "last:0")
    )
    assert differ_by_names_alone(TEXT, renamed)
    assert "all else is the same" in difference(TEXT, renamed, LINES)


@pytest.mark.parametrize(
    ("before", "after"),
    [("(a, b, ^b)", "(b, a, ^b)"), ("(a, b, ^b)", "(a, b)"), ("cpu:0", "cpu:1"), ("c:0", "b:0"), ("(a)", "(a:1)")],
)
def test_another_step_is_no_change_of_names(before, after):
    assert before in TEXT
    assert not differ_by_names_alone(TEXT, TEXT.replace(before, after))
    assert "all else" not in difference(TEXT, TEXT.replace(before, after), LINES)
