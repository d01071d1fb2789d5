"""Pipeline: the stage of each variable, and the rejected models."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autodist.errors import StrategyError
from autodist.resources import ResourceSpec
from autodist.strategies import (
    Pipeline,
    arranged,
    builder_from_section,
    check_strategy,
    strategy_table,
)
from autodist.synchronizers import workers_of_stages

SHAPES = {"embedding/table": (100, 4), "block_0/kernel": (4, 8), "block_1/kernel": (8, 4), "head/kernel": (4, 2)}
BY_PATTERNS = (("embedding/.*", "block_0/.*"), (".*",))


def stage_of(strategy):
    return {node.variable: node.parameter_server.owner for node in strategy.nodes}


def read(tmp_path, options, workers=2):
    """Reads a file with a Pipeline whose options begin in line 4."""
    path = tmp_path / "cluster.yml"
    path.write_text(
        f"nodes: [{{address: localhost, cpus: {list(range(workers))}, workers: {workers}}}]\n"
        f"strategy:\n  builder: Pipeline\n  {options}\n"
    )
    return ResourceSpec.from_file(path)


def test_the_first_pattern_that_matches_a_variable_says_its_stage(step, cluster):
    planned, machines = step(SHAPES), cluster(2)
    strategy = Pipeline(stages=BY_PATTERNS).build(planned, machines)
    check_strategy(strategy, planned, machines)
    assert stage_of(strategy) == {"embedding/table": 0, "block_0/kernel": 0, "block_1/kernel": 1, "head/kernel": 1}
    assert [(stage.worker, stage.device) for stage in strategy.pipeline.stages] == [(0, "cpu:0"), (1, "cpu:0")]
    assert {replica.worker for replica in strategy.graph_config.replicas} == {0}
    assert len(strategy.graph_config.replicas) == 4


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=7), stages=st.integers(1, 4), layered=st.booleans())
def test_the_largest_of_balanced_stages_is_as_small_as_can_be(step, cluster, sizes, stages, layered):
    stages = min(stages, len(sizes))
    planned = step({f"layer_{k}/kernel" if layered else f"v{k}": (size,) for k, size in enumerate(sizes)})
    strategy = Pipeline().build(planned, cluster(stages))
    check_strategy(strategy, planned, cluster(stages))
    again = Pipeline().build(planned, cluster(stages))
    assert strategy.SerializeToString(deterministic=True) == again.SerializeToString(deterministic=True)
    found = list(stage_of(strategy).values())
    assert found == sorted(found)
    assert set(found) == set(range(stages))

    def largest(cuts):
        return max(sum(sizes[a:b]) for a, b in itertools.pairwise([0, *cuts, len(sizes)]))

    if layered:  # else all are one layer's, which is split only if necessary
        best = min(largest(cuts) for cuts in itertools.combinations(range(1, len(sizes)), stages - 1))
        assert largest([found.index(stage) for stage in range(1, stages)]) == best


def test_a_layer_is_not_cut_where_there_are_enough(step, cluster):
    planned = step({"a/kernel": (10,), "a/bias": (90,), "b/kernel": (60,), "c/kernel": (1,)})
    found = stage_of(Pipeline().build(planned, cluster(2)))
    assert found == {"a/kernel": 0, "a/bias": 0, "b/kernel": 1, "c/kernel": 1}


def test_the_table_shows_stages_and_what_a_worker_waits(step, cluster):
    table = strategy_table(Pipeline(stages=BY_PATTERNS).build(step(SHAPES), cluster(2)), step(SHAPES), ["a", "b"])
    assert str(table.title) == (
        "Pipeline: 2 stages, 4 micro-batches by GPipe; a worker waits 20 % of a step, if stages take equally long"
    )
    cells = [list(column.cells) for column in table.columns]
    assert [str(cell) for cell in cells[4]] == ["stage 0", "stage 0", "stage 1", "stage 1"]
    assert [str(cell) for cell in cells[5]] == ["a", "a", "b", "b"]
    assert {str(cell) for cell in cells[6]} == {"0 B"}


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        ([["embedding/.*"], ["block.*"]], "head/kernel is in no stage of the Pipeline"),
        ([[".*"], ["head/.*"]], "stage 1 has no variable that an earlier stage has not matched"),
        ([[".*"], []], "stage 1 has no variable"),
        ([["embedding/.*", "nothing"], [".*"]], "the pattern 'nothing' of stage 0 matches no variable"),
        ([["("], [".*"]], "no regular expression"),
        ([["embedding/.*"], ["block.*"], [".*"]], "has 3 stages, more than the 2 workers"),
        (1, "has 1 stages, fewer than the 2 workers"),
    ],
)
def test_stages_that_do_not_fit_are_refused_with_their_place(step, tmp_path, stages, told):
    spec = read(tmp_path, f"stages: {stages}")
    with pytest.raises(StrategyError, match="stage") as caught:
        builder_from_section(spec.strategy).build(step(SHAPES), spec)
    assert told in str(caught.value)
    assert (caught.value.place.file, caught.value.place.line) == (str(tmp_path / "cluster.yml"), 4)


@pytest.mark.parametrize("stages", [[["a"], ["b"], ["c"]], 3])
def test_too_many_stages_are_refused_before_processes_start(tmp_path, stages):
    spec = read(tmp_path, f"stages: {stages}")
    with pytest.raises(StrategyError, match="3 stages, more than the 2 workers") as caught:
        arranged(builder_from_section(spec.strategy), spec)
    assert caught.value.place.line == 4


def test_a_worker_of_several_devices_is_refused(cluster, step):
    with pytest.raises(StrategyError, match="10.0.0.1 has 2 devices"):
        Pipeline().build(step(SHAPES), cluster(2, devices=2))


def test_more_stages_than_variables_are_refused(cluster, step):
    with pytest.raises(StrategyError, match="2 stages for 1 trained variables"):
        Pipeline().build(step({"v": (2,)}), cluster(2))


@pytest.mark.parametrize(
    ("use", "told"),
    [
        ("{synchronizer: PS, sync: false}", "updated asynchronously"),
        ("{synchronizer: PS, staleness: 2}", "updated asynchronously"),
        ("{synchronizer: PS, local_proxy_variable: true}", "has a proxy"),
        ("{synchronizer: AllReduce}", "to be all-reduced"),
        ("{synchronizer: PS, partition: {axis: 0, shards: 2}}", "is partitioned"),
    ],
)
def test_options_that_a_pipeline_excludes_are_refused_with_their_place(step, tmp_path, use, told):
    spec = read(tmp_path, f"variables:\n    head/.*: {use}")
    with pytest.raises(StrategyError, match="head/kernel") as caught:
        builder_from_section(spec.strategy).build(step(SHAPES), spec)
    assert told in str(caught.value)
    assert caught.value.place.line == 5


def test_a_variable_may_be_put_into_another_stage_by_its_owner(step, tmp_path):
    spec = read(tmp_path, "variables:\n    head/.*: {synchronizer: PS, owner: 0}")
    assert stage_of(builder_from_section(spec.strategy).build(step(SHAPES), spec))["head/kernel"] == 0


def meshed(tmp_path, mesh, more=""):
    return read(tmp_path, f"micro_batches: 3\n{more}  mesh: {mesh}", workers=4)


def test_pipelines_side_by_side_have_workers_for_each_stage_that_hold_the_same(step, tmp_path):
    spec = meshed(tmp_path, "{stage: 2, data: 2}")
    builder = builder_from_section(spec.strategy)
    strategy, machines = builder.build(step(SHAPES), spec), arranged(builder, spec)
    check_strategy(strategy, step(SHAPES), machines)
    assert stage_of(strategy) == {"embedding/table": 0, "block_0/kernel": 2, "block_1/kernel": 2, "head/kernel": 2}
    seats = [(one.worker, [(b.worker, b.device) for b in one.stage_group]) for one in strategy.pipeline.stages]
    assert seats == [(0, [(1, "cpu:0")]), (2, [(3, "cpu:0")])]
    assert machines.replica_workers == (0,) * 6
    table = strategy_table(strategy, step(SHAPES), list("abcd"))
    assert str(table.title).startswith(
        "Pipeline: 2 pipelines of 2 stages, 3 micro-batches by GPipe; a worker waits 25 %"
    )
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    assert cells[5] == ["a, b", "c, d", "c, d", "c, d"]
    assert cells[6] == ["1.60 kB", "128 B", "128 B", "32 B"]
    assert "a 1.60 kB, b 1.60 kB, c 288 B, d 288 B" in str(table.caption)


def test_a_mesh_alone_says_how_many_stages_there_are(step, tmp_path):
    for mesh, stages in (("{data: 2}", 2), ("{data: 4}", 1), ("{stage: 4}", 4), ("{}", 4)):
        spec = meshed(tmp_path, mesh)
        assert len(builder_from_section(spec.strategy).build(step(SHAPES), spec).pipeline.stages) == stages


@pytest.mark.parametrize(
    ("mesh", "told"),
    [
        ("{stage: 2, data: 3}", "2 stages in each of 3 pipelines, which are 6 workers, more than the 4 workers"),
        ("{stage: 1, data: 3}", "fewer than the 4 workers"),
        ("{data: 3}", "fewer than the 4 workers"),
        ("{data: 8}", "more than the 4 workers"),
        ("{data: 0}", "data is 0, which is not allowed"),
        ("{stage: -1}", "stage is -1, which is not allowed"),
        ("{data: two}", "data is 'two', which is not allowed"),
        ("{models: 2}", "no option models"),
        ("{model: 3}", "which are 3 workers, fewer than the 4 workers"),
        ("{stage: 2, model: 3}", "with 3 workers for each stage, which are 6 workers, more than the 4 workers"),
        ("4", "mesh is 4, which is not allowed"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_its_place(step, tmp_path, mesh, told):
    spec = meshed(tmp_path, mesh)
    with pytest.raises(StrategyError) as caught:
        arranged(builder_from_section(spec.strategy), spec)
    assert told in str(caught.value)
    assert caught.value.place.line == 5


def test_the_workers_of_a_stage_divide_its_tensors(step, tmp_path):
    more = "  variables:\n    block_./kernel: {sharding: [null, model]}\n"
    spec = meshed(tmp_path, "{stage: 2, model: 2}", more)
    builder = builder_from_section(spec.strategy)
    machines = arranged(builder, spec)
    strategy = builder.build(step(SHAPES), machines)
    check_strategy(strategy, step(SHAPES), machines)
    assert [(axis.name, axis.size) for axis in strategy.mesh.axes] == [("stage", 2), ("data", 1), ("model", 2)]
    assert {one.variable: one.sharding for one in strategy.mesh.variables} == {
        "block_0/kernel": "[–, model]", "block_1/kernel": "[–, model]"
    }  # fmt: skip
    assert set(stage_of(strategy).values()) == {0, 1}  # positions in a row
    assert workers_of_stages(strategy) == [(0, 1), (2, 3)]
    assert [machines.seen_by(worker).replica_workers for worker in range(4)] == [(0,) * 3, (1,) * 3, (0,) * 3, (1,) * 3]
    with pytest.raises(StrategyError, match="several workers compute on the same part"):
        machines.require_own_batches()
    table = strategy_table(strategy, step(SHAPES), list("abcd"))
    assert str(table.title) == "Pipeline: 4 places on 4 workers, mesh {stage: 2, data: 1, model: 2}"
    assert str(table.caption).startswith("the 2 stages of a pipeline hold ")


@pytest.mark.parametrize(
    ("mesh", "layout", "told"),
    [
        ("{stage: 2, data: 2}", "[model]", "the mesh has no axis 'model'"),
        ("{stage: 2, model: 2}", "[data]", "names the axis 'data', but a stage of a pipeline divides variables along"),
        ("{stage: 2, model: 2}", "[null, stage]", "names the axis 'stage', but a stage of a pipeline divides"),
    ],
)
def test_layouts_that_stages_cannot_have_are_refused(tmp_path, mesh, layout, told):
    more = f"  variables:\n    head/.*: {{sharding: {layout}}}\n"
    with pytest.raises(StrategyError, match=told):
        builder_from_section(meshed(tmp_path, mesh, more).strategy)


def test_layouts_and_owners_of_variables_are_not_for_one_pipeline(step, tmp_path):
    more = "  variables:\n    head/.*: {synchronizer: PS, owner: 0}\n    block_./kernel: {sharding: [model]}\n"
    spec = meshed(tmp_path, "{stage: 2, model: 2}", more)
    builder = builder_from_section(spec.strategy)
    with pytest.raises(StrategyError, match="divides variables over a mesh"):
        builder.build(step(SHAPES), arranged(builder, spec))


def test_stages_that_a_mesh_denies_are_refused_with_their_place(step, tmp_path):
    spec = meshed(tmp_path, "{stage: 4}", more="  stages: 2\n")
    with pytest.raises(StrategyError, match="the mesh has 4 stages, but `stages` has 2") as caught:
        arranged(builder_from_section(spec.strategy), spec)
    assert caught.value.place.line == 6


def test_an_owner_that_is_not_the_first_of_a_stage_is_refused(step, tmp_path):
    own = "  variables:\n    head/.*: {synchronizer: PS, owner: 1}\n"
    spec = meshed(tmp_path, "{data: 2}", more=own)
    with pytest.raises(StrategyError, match="not the first of those that compute a stage: these are 0, 2") as caught:
        builder_from_section(spec.strategy).build(step(SHAPES), spec)
    assert caught.value.place.line == 6


def test_a_builder_whose_stages_have_other_numbers_of_workers_is_refused(step, tmp_path):
    spec = meshed(tmp_path, "{data: 2}")
    builder = builder_from_section(spec.strategy)
    machines = arranged(builder, spec)
    strategy = builder.build(step(SHAPES), spec)
    del strategy.pipeline.stages[1].stage_group[:]
    with pytest.raises(StrategyError, match="each must compute one stage"):
        check_strategy(strategy, step(SHAPES), machines)
    strategy = builder.build(step(SHAPES), spec)
    del strategy.graph_config.replicas[5:]
    with pytest.raises(StrategyError, match="5 micro-batches cannot be split evenly over 2 pipelines"):
        check_strategy(strategy, step(SHAPES), machines)


def test_the_machines_of_a_run_have_the_micro_batches_for_replicas(cluster):
    machines = arranged(Pipeline(micro_batches=3), cluster(2))
    for spec in (machines, ResourceSpec.from_payload(machines.to_payload())):
        assert spec.replica_workers == (0, 0, 0)
        assert [spec.replicas_of(worker) for worker in range(2)] == [3, 0]
        assert [worker.devices for worker in spec.workers] == [("cpu:0",), ("cpu:0",)]


MARKS = {"embedding/table": 0, "block_0/kernel": 1, "block_1/kernel": 1, "head/kernel": 1}


@pytest.mark.parametrize("stages", [None, 2])
def test_the_script_says_the_stage_of_each_variable(step, cluster, stages):
    planned = step(SHAPES, stages=MARKS)
    strategy = Pipeline(stages=stages).build(planned, cluster(2))
    check_strategy(strategy, planned, cluster(2))
    assert stage_of(strategy) == MARKS


def test_patterns_say_where_the_script_does_not(step, cluster):
    some = {"block_0/kernel": 1, "head/kernel": 1}
    strategy = Pipeline(stages=(("embedding/.*",), ("block_1/.*",))).build(step(SHAPES, stages=some), cluster(2))
    assert stage_of(strategy) == MARKS


@pytest.mark.parametrize(
    ("stages", "marks", "told"),
    [
        (BY_PATTERNS, MARKS, r"block_0/kernel is made in ad.stage\(1\), but the pattern 'block_0/\.\*' puts it into"),
        (None, {"head/kernel": 1}, r"block_1/kernel are in no stage of the Pipeline, while head/kernel is made in"),
        (None, {**MARKS, "head/kernel": 2}, r"head/kernel is made in ad.stage\(2\), and Pipeline has 2 stages"),
        (None, dict.fromkeys(SHAPES, 1), r"stage 0 has no variable: none is made in ad.stage\(0\)"),
    ],
)
def test_the_stages_of_the_script_have_to_fit(step, cluster, stages, marks, told):
    with pytest.raises(StrategyError, match=told):
        Pipeline(stages=stages).build(step(SHAPES, stages=marks), cluster(2))


def test_an_owner_that_contradicts_the_script_is_refused_with_its_place(step, tmp_path):
    spec = read(tmp_path, "variables:\n    head/.*: {synchronizer: PS, owner: 0}")
    with pytest.raises(StrategyError, match=r"head/kernel is made in ad.stage\(1\), but its owner is worker") as caught:
        builder_from_section(spec.strategy).build(step(SHAPES, stages=MARKS), spec)
    assert caught.value.place.line == 5


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("micro_batches: 1", "by GPipe, a stage runs .* Leave recompute out, or set more micro_batches"),
        ("micro_batches: 1\n  schedule: 1F1B", "by 1F1B, a stage runs .* or set more micro_batches"),
        ("schedule: 1F1B\n  mesh: {stage: 1, data: 2}", "with 1 stage and .* or use schedule: GPipe"),
        ("recompute: some", "recompute is 'some', which is not allowed"),
    ],
)
def test_to_compute_anew_where_nothing_is_kept_less_is_refused_with_its_place(tmp_path, options, told):
    asked = "" if "recompute" in options else "recompute: true\n  "
    spec = read(tmp_path, f"{asked}{options}")
    with pytest.raises(StrategyError, match=told) as caught:
        arranged(builder_from_section(spec.strategy), spec)
    assert caught.value.place.line == 4


@pytest.mark.parametrize("stages", [1, 2])
def test_stages_are_to_compute_anew(step, cluster, stages):
    planned, machines = step(SHAPES), cluster(stages)
    builder = Pipeline(recompute=True)
    strategy = builder.build(planned, machines)
    check_strategy(strategy, planned, arranged(builder, machines))
    assert strategy.pipeline.recompute
    assert not Pipeline().build(planned, machines).pipeline.recompute


def test_a_builder_that_lets_stages_compute_anew_what_they_keep_is_refused(step, cluster):
    strategy = Pipeline(micro_batches=1).build(step(SHAPES), cluster(2))
    strategy.pipeline.recompute = True
    with pytest.raises(StrategyError, match="recomputation would save no memory"):
        check_strategy(strategy, step(SHAPES), arranged(Pipeline(micro_batches=1), cluster(2)))
