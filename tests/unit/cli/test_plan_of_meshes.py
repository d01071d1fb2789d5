"""`autodist plan` of pipelines and meshes: their parts, and what these exchange."""

from __future__ import annotations

from pathlib import Path

import pytest

from autodist.cli.app import app
from autodist.cli.plans import Plans, read_plan
from tests.unit.cli.planning import HEAD, RUNNER, plan, plans_of, write

STAGES = (
    HEAD
    + """
ad = AutoDist()
with ad.scope():
    layers = [keras.layers.Dense(32, use_bias=False, name=f"part_{k}") for k in range(4)]
    model = keras.Sequential([keras.Input((16,)), *layers])
    model.compile(keras.optimizers.Adam(), "mse")
    model.fit(np.zeros((12, 16)), np.zeros((12, 32)), batch_size=12, verbose=0)
"""
)


def test_of_a_pipeline_it_is_planned_what_each_stage_holds_computes_and_hands_on(tmp_path: Path) -> None:
    stages = tmp_path / "stages.yml"
    stages.write_text("strategy: {builder: Pipeline, stages: [['.*part_[012]/.*'], ['.*part_3/.*']]}\n")
    words = ["--workers", "2", "--strategy", str(stages), write(tmp_path, STAGES)]
    (found,) = plans_of(*words)
    assert found.pipeline is not None
    assert (found.pipeline.examples, found.pipeline.is_fed) == (3, True)
    kernels = [16 * 32, 32 * 32, 32 * 32, 32 * 32]
    first, last = found.pipeline.stages
    assert (first.workers, first.variables, first.bytes) == (("localhost:0",), 3, 4 * sum(kernels[:3]))
    assert (last.workers, last.variables, last.bytes) == (("localhost:1",), 1, 4 * kernels[3])
    for stage in (first, last):  # Adam keeps two numbers more for each
        assert 3 * stage.bytes <= (stage.held or 0) <= 3 * stage.bytes + 64
    # One product forward and two backward, except for the first layer's input, which needs no gradient.
    assert first.forward.known == 2 * 3 * sum(kernels[:3])
    assert first.backward.known == 2 * 3 * (kernels[0] + 2 * kernels[1] + 2 * kernels[2])
    for found_flops, products in ((last.forward, kernels[3]), (last.backward, 2 * kernels[3])):
        assert 2 * 3 * products <= (found_flops.known or 0) <= 1.1 * 2 * 3 * products
    assert [worker.flops for worker in found.workers] == [first.flops(4), last.flops(4)]
    assert found.pipeline.waits == pytest.approx(0.2)
    assert 0.2 < (found.pipeline.waits_by_flops or 0) < 0.6
    # Of 12 examples in 4 micro-batches 3 go on at once, with 32 activations each, and as many gradients back; labels go
    # once, all together.
    there, back = found.pipeline.cuts
    assert (there.source, there.target, back.source, back.target) == (0, 1, 1, 0)
    for cut in (there, back):
        assert 3 * 32 * 4 <= (cut.each.known or 0) <= 3 * 32 * 4 + 64
    assert 12 * 32 * 4 <= (there.once.known or 0) <= 12 * 32 * 4 + 512
    assert 0 < (back.once.known or 0) <= 256
    assert {(link.source, link.target): link.bytes for link in found.links} == {
        ("localhost:0", "localhost:1"): 4 * there.each.count + there.once.count,
        ("localhost:1", "localhost:0"): 4 * back.each.count + back.once.count,
    }
    page = tmp_path / "page.html"
    told = " ".join(plan("--html", str(page), *words).stdout.split())
    assert "2 stages, 4 micro-batches by GPipe; a worker waits 20 % of a step" in told
    assert "FLOPs and bytes of a micro-batch of 3 examples; by FLOPs a worker waits" in told
    assert "0 → 1" in told
    assert "Cross-stage transfers" in page.read_text()


def test_of_a_mesh_the_sums_between_mates_are_planned(tmp_path: Path) -> None:
    mesh = tmp_path / "mesh.yml"
    mesh.write_text("strategy: {builder: Pipeline, micro_batches: 1, mesh: {stage: 2, data: 2}}\n")
    (found,) = plans_of("--workers", "4", "--strategy", str(mesh), write(tmp_path, STAGES))
    assert found.pipeline is not None
    assert [stage.workers for stage in found.pipeline.stages] == [
        ("localhost:0", "localhost:1"),
        ("localhost:2", "localhost:3"),
    ]
    for variable in found.variables:  # a gradient goes to the one other that holds its variable
        (shard,) = variable.shards
        holders = [shard.owner, *shard.mates]
        assert variable.sent == tuple(variable.bytes if w.name in holders else 0 for w in found.workers)
    links = {(link.source, link.target): link.bytes for link in found.links}
    of_stages = [stage.bytes for stage in found.pipeline.stages]
    fed = 6 * 16 * 4  # the second pipeline's half of the batch
    assert of_stages[0] + fed <= links["localhost:0", "localhost:1"] <= of_stages[0] + fed + 256
    assert of_stages[0] <= links["localhost:1", "localhost:0"] <= of_stages[0] + 256
    for way in (("localhost:2", "localhost:3"), ("localhost:3", "localhost:2")):
        assert of_stages[1] <= links[way] <= of_stages[1] + 256
    stage_group = {cut.source: cut for cut in found.pipeline.cuts if cut.source == cut.target}
    assert stage_group.keys() == {0, 1}
    assert sum(worker.sent for worker in found.workers) == sum(links.values())


MESH = """
strategy:
  builder: Mesh
  mesh: {data: -1, model: 2}
  variables:
    ".*part_0/kernel": {sharding: [null, model]}
    ".*part_1/kernel": {sharding: [model]}
    "part_9/.*": {sharding: [model]}
"""


def test_of_a_mesh_the_parts_the_collectives_and_their_bytes_are_planned(tmp_path: Path) -> None:
    words = ["--workers", "4", "--strategy", write(tmp_path, MESH, "mesh.yml"), write(tmp_path, STAGES)]
    (found,) = plans_of(*words)
    assert found.mesh is not None
    kernels = [16 * 32 * 4, *[32 * 32 * 4] * 3]
    assert [(v.sharding, v.origin, v.part_bytes) for v in found.mesh.variables] == [
        ("[–, model]", "'.*part_0/kernel'", kernels[0] // 2),
        ("[model, –]", "'.*part_1/kernel'", kernels[1] // 2),
        ("whole", "", kernels[2]),
        ("whole", "", kernels[3]),
    ]
    for variable in found.mesh.variables:
        assert [(slot.sharding, slot.part_bytes) for slot in variable.slots] == [
            (variable.sharding, variable.part_bytes)
        ] * 2
    parts = [v.part_bytes for v in found.mesh.variables]
    # Six examples at a place: one sum of 32 activations each forward. The first layer's input needs no gradient.
    sums, gradients = found.mesh.collectives or ()
    assert (sums.kind, sums.axes, sums.calls, sums.sent.count) == ("all_reduce", ("model",), 1, 6 * 32 * 4)
    assert (gradients.axes, gradients.calls, gradients.sent.count) == (("data",), 4, sum(parts))
    assert [variable.sent for variable in found.variables] == [(size,) * 4 for size in parts]
    names = [worker.name for worker in found.workers]
    assert {(link.source, link.target): link.bytes for link in found.links} == {
        **{(names[k], names[k ^ 1]): 6 * 32 * 4 for k in range(4)},
        **{(names[k], names[k ^ 2]): sum(parts) for k in range(4)},
    }
    for worker in found.workers:
        assert (worker.replicas, worker.sent, worker.received) == (1, 6 * 32 * 4 + sum(parts), worker.sent)
        assert 3 * sum(parts) <= worker.held <= 3 * sum(parts) + 64
        assert worker.activations is not None and 6 * 32 * 4 < worker.activations.count < 6 * 32 * 4 * 8
    assert found.mesh.unused == ("'part_9/.*'",)
    page = tmp_path / "page.html"
    told = " ".join(plan("--html", str(page), *words).stdout.split())
    assert "4 places on 4 workers, mesh {data: 2, model: 2}" in told
    assert "[–, model]" in told and "all_reduce" in told and "'part_9/.*'" in told
    assert "Collectives" in page.read_text()


def test_megatron_finds_the_layouts_and_the_plan_shows_their_origins(tmp_path: Path) -> None:
    (found,) = plans_of("--workers", "2", "--strategy", "Megatron", write(tmp_path, STAGES))
    assert found.builder == "Megatron" and found.mesh is not None
    assert [(v.sharding, v.origin) for v in found.mesh.variables] == [
        ("[–, model]", "Megatron: columns"),
        ("[model, –]", "Megatron: rows"),
        ("[–, model]", "Megatron: columns"),
        ("[model, –]", "Megatron: rows"),
    ]
    (sums,) = found.mesh.collectives or ()
    assert (sums.kind, sums.calls) == ("all_reduce", 3)  # two forward; the input of the first layer has no gradient


def test_a_plan_of_a_mesh_is_read_back_and_compared(tmp_path: Path) -> None:
    mesh, script = write(tmp_path, MESH, "mesh.yml"), write(tmp_path, STAGES)
    both = plan("--workers", "2", "--strategy", mesh, "--strategy", "AllReduce", script)
    assert "[model, –] from" in both.stdout and "all workers" in both.stdout
    of_mesh, of_sums = (tmp_path / f"{name}.json" for name in ("mesh", "sums"))
    of_mesh.write_text(plan("--json", "--workers", "2", "--strategy", mesh, script).stdout)
    of_sums.write_text(plan("--json", "--workers", "2", "--strategy", "AllReduce", script).stdout)
    (found,) = read_plan(of_mesh).values()
    assert found.mesh is not None and found.mesh.examples == 12
    result = RUNNER.invoke(app, ["diff", str(of_mesh), str(of_sums)])
    assert result.exit_code == 1 and "[–, model]" in result.stdout


def test_two_equal_plans_of_a_pipeline_are_read_back(tmp_path: Path) -> None:
    mesh = tmp_path / "mesh.yml"
    mesh.write_text("strategy: {builder: Pipeline, mesh: {stage: 2}}\n")
    (found,) = plans_of("--workers", "2", "--strategy", str(mesh), write(tmp_path, STAGES))
    (tmp_path / "plan.json").write_text(Plans(script="train.py", plans=(found,)).model_dump_json())
    assert read_plan(tmp_path / "plan.json") == {"train_step": found}
