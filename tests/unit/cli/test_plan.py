"""`autodist plan`: its captured steps, counts, output, files and errors."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from autodist.cli.app import app
from autodist.cli.plan_views import page_of
from autodist.cli.plans import PlannedStrategy, Plans, read_plan
from autodist.graph.partial_count import PartialCount

RUNNER = CliRunner()

HEAD = """
import sys
import keras
import numpy as np
import tensorflow as tf
from autodist import AutoDist
"""

STEP = (
    HEAD
    + """
ad = AutoDist()
print("the script prints", ad.num_workers, ad.num_replicas, sys.argv[1:], __name__)
with ad.scope():
    table = tf.Variable(np.zeros((50, 4), np.float32), name="table")
    weight = tf.Variable(np.zeros((4, 3), np.float32), name="weight")
    moment = tf.Variable(np.zeros((4, 3), np.float32), name="moment", trainable=False)

    @ad.function
    def step(ids, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.gather(table, ids) @ weight - y))
        of_table, of_weight = tape.gradient(loss, [table, weight])
        moment.assign(0.9 * moment + of_weight)
        weight.assign_sub(0.1 * moment)
        table.scatter_sub(tf.IndexedSlices(0.1 * of_table.values, of_table.indices))
        return loss

    step(np.arange(8), np.zeros((8, 3), np.float32))
raise RuntimeError("the step was made")
"""
)


def write(folder: Path, text: str, name: str = "train.py") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def plan(*words: str) -> Result:
    return RUNNER.invoke(app, ["plan", *words])


def plans_of(*words: str) -> tuple[PlannedStrategy, ...]:
    result = plan("--json", *words)
    assert result.exit_code == 0, result.stderr
    return Plans.model_validate_json(result.stdout).plans


def test_a_step_is_planned_for_workers_that_are_not_started_and_is_not_made(tmp_path: Path) -> None:
    script = write(tmp_path, STEP)
    strategies = [word for name in ("PS", "AllReduce", "DiLoCo") for word in ("--strategy", name)]
    servers, shared, local = plans_of("--workers", "3", *strategies, script, "--epochs", "2")
    by_name = {variable.name: variable for variable in servers.variables}
    assert [(v.shape, v.bytes, v.gradient, v.synchronizer) for v in (by_name["table"], by_name["weight"])] == [
        ((50, 4), 800, "sparse", "PS, proxies"),
        ((4, 3), 48, "dense", "PS, proxies"),
    ]
    assert [shard.owner for shard in by_name["weight"].shards] == ["localhost:0"]
    assert [(slot.name, slot.bytes) for slot in by_name["weight"].slots] == [("moment", 48)]
    assert by_name["table"].slots == () and by_name["table"].rows == 8
    # The owner sends whole values to two others; each of them sends a gradient, and an index with each of 8 rows.
    assert by_name["weight"].sent == (96, 48, 48)
    assert by_name["table"].sent == (2 * 800, 8 * 24, 8 * 24)
    assert [worker.held for worker in servers.workers] == [896, 848, 848]
    assert [worker.held for worker in shared.workers] == [896, 896, 896]
    assert [worker.held for worker in local.workers] == [896 + 2 * 848] * 3  # a copy and the momentum of each variable
    assert {(link.source, link.target): link.bytes for link in servers.links} == {
        ("localhost:0", "localhost:1"): 48 + 800,
        ("localhost:0", "localhost:2"): 48 + 800,
        ("localhost:1", "localhost:0"): 48 + 8 * 24,
        ("localhost:2", "localhost:0"): 48 + 8 * 24,
    }
    # The backward pass reads the rows and the differences, the number of rows and the shape of the table.
    assert [worker.activations for worker in servers.workers] == [PartialCount(8 * 4 * 4 + 8 * 3 * 4 + 12)] * 3
    # Two products of 8 × 4 with 4 × 3, and one for each gradient; and arithmetic on each element besides.
    forward = 2 * 8 * 4 * 3
    assert 3 * forward <= (servers.workers[0].flops or 0) <= 5 * forward


def test_output_of_the_script_goes_to_standard_error_and_has_the_planned_machines(
    tmp_path: Path,
) -> None:
    result = plan("--json", "--workers", "2", "--replicas", "2", write(tmp_path, STEP), "--epochs", "2")
    assert "the script prints 2 4 ['--epochs', '2'] __main__" in result.stderr
    json.loads(result.stdout)


def test_one_plan_fits_the_terminal_and_several_stand_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write(tmp_path, STEP)
    for columns in (100, 150):
        monkeypatch.setenv("COLUMNS", str(columns))
        result = plan("--workers", "2", "--strategy", "PS", script)
        assert max(map(len, result.stdout.splitlines())) <= columns
        assert "weight" in result.stdout and "localhost:0" in result.stdout and "slots" in result.stdout
    both = plan("--workers", "2", "--strategy", "PS", "--strategy", "AllReduce", script).stdout
    assert "on paper" not in result.stdout  # servers add nothing up
    assert "on paper a step's sums take" in plan("--workers", "2", "--strategy", "AllReduce", script).stdout
    row = next(line for line in both.splitlines() if "4 × 3" in line)
    assert "localhost:0" in row and "all workers" in row


BLOCKS = (
    HEAD
    + """
class Block(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.up, self.down = keras.layers.Dense(8, "gelu"), keras.layers.Dense(4)

    def call(self, x):
        return x + tf.nn.dropout(self.down(self.up(x)), 0.1, seed=1)

ad = AutoDist()
with ad.scope():
    model = keras.Sequential([keras.Input((4,)), Block(), Block(), keras.layers.Dense(1)], name="model")
    model.compile("sgd", "mse")
    model.fit(np.zeros((32, 4)), np.zeros((32, 1)))
"""
)


def test_recomputed_blocks_are_planned_with_their_memory_and_computation(tmp_path: Path) -> None:
    script = write(tmp_path, BLOCKS)
    file = write(tmp_path, "strategy: {builder: AllReduce, recompute: true}\n", "strategy.yml")
    planned, plain = plans_of("--strategy", file, "--strategy", "AllReduce", script)
    assert planned.workers[0].activations is not None and plain.workers[0].activations is not None
    freed = plain.workers[0].activations.count - planned.workers[0].activations.count
    assert freed == planned.recomputed[0].bytes.count  # the activations of one of two blocks exist at a time
    assert [block.name for block in planned.recomputed] == ["model/block", "model/block_1"]
    for block in planned.recomputed:
        # Gelu keeps its result and three values on the way to it, dropout a byte of its mask for each element.
        assert block.bytes.count == 4 * 32 * 8 * 4 + 32 * 4 and not block.bytes.is_least
        # Again: the product of 32 × 4 and 4 × 8, and gelu.
        assert 2 * 32 * 4 * 8 <= block.flops.count <= 4 * 32 * 4 * 8
        assert "RandomUniform" in block.kept
    shown = " ".join(plan("--strategy", file, script).stdout.split())
    assert "recomputation on a worker" in shown and "FLOPs again" in shown and "% more" in shown


def test_the_strategy_of_a_file_and_the_script_s_own_are_planned(tmp_path: Path) -> None:
    yaml = write(tmp_path, "strategy: {builder: PartitionedPS, min_partition_bytes: 1}\n", "ps.yml")
    cluster = write(tmp_path, "nodes: [{address: localhost, cpus: [0, 1], workers: 2}]\nstrategy: PS\n", "cluster.yml")
    script = write(tmp_path, STEP.replace("AutoDist()", f"AutoDist({cluster!r})"))
    (own,) = plans_of(script)
    assert (own.builder, [worker.name for worker in own.workers]) == ("PS", ["localhost:0", "localhost:1"])
    (cut,) = plans_of("--strategy", yaml, script)
    weight = next(v for v in cut.variables if v.name == "weight")
    assert weight.axis is not None and [shard.owner for shard in weight.shards] == ["localhost:0", "localhost:1"]


def test_a_builder_that_stands_beside_the_script_is_found(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
from autodist.strategies import PS

class AtTheLast:
    def build(self, graph_item, resource_spec):
        return PS(owner=len(resource_spec.workers) - 1).build(graph_item, resource_spec)
""",
        "builder_beside_the_script.py",
    )
    script = write(tmp_path, STEP)
    (found,) = plans_of("--workers", "2", "--strategy", "builder_beside_the_script.AtTheLast", script)
    assert {shard.owner for v in found.variables for shard in v.shards} == {"localhost:1"}


def test_a_module_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planned_package").mkdir()
    write(tmp_path / "planned_package", "", "__init__.py")
    write(tmp_path / "planned_package", STEP)
    monkeypatch.chdir(tmp_path)
    (found,) = plans_of("--workers", "2", "-m", "planned_package.train", "--epochs", "2")
    assert [v.name for v in found.variables] == ["table", "weight"]


def test_fit_is_planned_with_the_part_of_the_batch_that_a_worker_gets(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        HEAD
        + """
ad = AutoDist()
with ad.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5)])
    model.compile(keras.optimizers.Adam(), "mse")
    model.evaluate(np.zeros((8, 6)), np.zeros((8, 5)), verbose=0)
    model.fit(np.zeros((8, 6)), np.zeros((8, 5)), batch_size=8, verbose=0)
""",
    )
    (one,), (two,) = plans_of(script), plans_of("--workers", "2", script)
    kernel = two.variables[0]
    assert (kernel.shape, len(kernel.slots), sum(slot.bytes for slot in kernel.slots)) == ((6, 5), 2, 2 * 120)
    whole, half = one.workers[0].flops or 0, two.workers[0].flops or 0
    assert 0.5 * whole <= half < 0.75 * whole  # the update's arithmetic is no less
    assert one.links == ()


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


SESSION = (
    HEAD
    + """
v1 = tf.compat.v1
ad = AutoDist()
with tf.Graph().as_default(), ad.scope():
    x = v1.placeholder(tf.float32, [None, 4])
    weight = v1.get_variable("weight", [4, 3])
    train = v1.train.MomentumOptimizer(0.1, 0.9).minimize(tf.reduce_mean(tf.square(x @ weight)))
    session = ad.create_distributed_session()
"""
)


def test_a_session_s_step_is_planned_without_the_flops_of_a_batch_that_is_not_fed_yet(tmp_path: Path) -> None:
    (found,) = plans_of("--workers", "2", write(tmp_path, SESSION))
    assert [(v.name, [slot.bytes for slot in v.slots]) for v in found.variables] == [("weight", [48])]
    assert found.workers[0].flops is None
    assert "not known" in plan("--workers", "2", write(tmp_path, SESSION)).stdout


@pytest.mark.parametrize(
    "text, told",
    [
        ("print('no training')", "creates no AutoDist"),
        (HEAD + "AutoDist()\nAutoDist()", "creates two AutoDist objects"),
        (HEAD + "ad = AutoDist()\nwith ad.scope():\n    tf.Variable(1.0)", "ended before a training step"),
        ("import sys\nsys.exit(3)", r"ended by sys.exit\(3\)"),
        ("raise ValueError('of its own')", r"ValueError: of its own \(.*train.py:1\)"),
        ("this is no python", "is not a Python script"),
    ],
)
def test_a_script_that_comes_to_no_step_is_refused(tmp_path: Path, text: str, told: str) -> None:
    result = plan(write(tmp_path, text))
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(told, result.stderr), result.stderr
    assert "Traceback" not in result.stderr


def test_an_impossible_plan_is_refused_before_the_script_runs(tmp_path: Path) -> None:
    script = write(tmp_path, "raise SystemExit('it ran')")
    missing = str(tmp_path / "missing.py")
    cluster = write(tmp_path, "nodes: [{address: localhost}]", "cluster.yml")
    nowhere = str(tmp_path / "no" / "plan.html")
    for words, told in [
        ([missing], f"the script {missing} does not exist"),
        (["-m", "no_module_of_this_name"], "there is no module no_module_of_this_name"),
        (["--strategy", "AllReduced", script], "There is no builder named AllReduced"),
        (["--strategy", cluster, script], "has no section `strategy`"),
        (["--cluster", cluster, "--workers", "2", script], "leave out --workers"),
        (["--html", nowhere, script], f"{nowhere} cannot be written"),
        (["/proc/self/mem"], "/proc/self/mem cannot be read"),
        (["/dev/null"], "/dev/null is not a file"),
    ]:
        result = plan(*words)
        assert (result.exit_code, result.stdout) == (2, ""), words
        assert told in result.stderr and "it ran" not in result.stderr, result.stderr


def test_a_strategy_that_cannot_be_done_is_refused_as_in_a_run(tmp_path: Path) -> None:
    yaml = write(tmp_path, "strategy: {builder: PS, owner: 7}\n", "ps.yml")
    result = plan("--workers", "2", "--strategy", yaml, write(tmp_path, STEP))
    assert result.exit_code == 2
    assert f"{yaml}:1" in result.stderr and "owner" in result.stderr


GAN = (
    HEAD
    + """
ad = AutoDist()
def trained_by(step, table):
    def train(ids, target):
        with tf.GradientTape() as tape:
            rows = tf.gather(table, ids)
            loss = tf.reduce_mean(tf.square(rows - target)) + 0.0 * tf.reduce_sum(tf.gather(critic, ids))
        table.scatter_sub(tape.gradient(loss, table))
        return {"loss": loss, "rows": rows}
    train.__name__ = step
    return ad.function(train)

with ad.scope():
    critic = tf.Variable(np.zeros((90, 2)), name="critic")
    maker = tf.Variable(np.zeros((60, 2)), name="maker")
    critic_step, maker_step = trained_by("critic_step", critic), trained_by("maker_step", maker)
ids = np.arange(8)[ad.worker_index :: ad.num_workers]
"""
)
CALLS = """
found = critic_step(ids, np.zeros((len(ids), 2)))
assert found["rows"].shape == (len(ids), 2) and found["rows"].dtype == tf.float64 and float(found["loss"]) == 1
"""


def tables_of_gan(*words: str) -> tuple[list[tuple[str, str, str | None]], str]:
    """Returns the name, the trained table and its owner for each step; and the note on the planned step."""
    result = plan("--json", "--workers", "2", "--strategy", "PSLoadBalancing", *words)
    assert result.exit_code == 0, result.stderr
    found = Plans.model_validate_json(result.stdout)
    return [(p.step, v.name, v.shards[0].owner) for p in found.plans for v in p.variables], found.note


CRITIC, MAKER = ("critic_step", "critic", "localhost:0"), ("maker_step", "maker", "localhost:1")


def test_both_steps_of_a_gan_are_planned_the_second_with_the_loads_of_the_first(tmp_path: Path) -> None:
    script = write(tmp_path, GAN + CALLS + "maker_step(ids, found['rows'])\nraise RuntimeError('it went on')")
    found, note = tables_of_gan(script)
    assert found == [CRITIC, MAKER]
    assert note.startswith("Planned: critic_step, maker_step. The script was ended there. Later steps")
    told = plan("--workers", "2", "--strategy", "PS", "--strategy", "AllReduce", script).stdout
    assert "variables of critic_step" in told and "variables of maker_step" in told and "Planned: critic_step" in told


def test_no_step_is_made_where_the_script_goes_on_to_its_end(tmp_path: Path) -> None:
    later = """
for _ in range(3): maker_step(ids, found['rows'])
assert not np.any(critic.numpy()) and not np.any(maker.numpy())
"""
    found, note = tables_of_gan("--calls", "9", write(tmp_path, GAN + CALLS + later))
    assert (found, note) == ([CRITIC, MAKER], "Planned: critic_step, maker_step. The script then ended.")


def test_a_script_whose_other_functions_train_nothing_is_ended_at_its_first_step(tmp_path: Path) -> None:
    text = STEP.replace(
        "@ad.function", "@ad.function\n    def test(ids): return tf.gather(table, ids)\n\n    @ad.function"
    )
    result = plan("--json", write(tmp_path, text))
    assert result.exit_code == 0, result.stderr
    found = Plans.model_validate_json(result.stdout)
    assert [one.step for one in found.plans] == ["step"]
    assert found.note.startswith("Planned: step. The script was ended there. Later steps are not shown")


@pytest.mark.parametrize(
    ("later", "end"),
    [
        (CALLS, "The script was ended when it called a step again, before maker_step."),
        ("1 / (float(found['loss']) - 1)", "After that, the script failed: ZeroDivisionError: "),
        ("", "The script then ended."),
    ],
)
def test_it_is_told_why_a_later_step_is_not_planned(tmp_path: Path, later: str, end: str) -> None:
    found, note = tables_of_gan(write(tmp_path, GAN + CALLS + later))
    assert found == [CRITIC]
    assert note.startswith(f"Planned: critic_step. {end}")


def test_a_step_behind_several_calls_of_another_is_planned_where_so_many_are_asked_for(tmp_path: Path) -> None:
    script = write(tmp_path, GAN + 3 * CALLS + "maker_step(ids, found['rows'])\nraise RuntimeError('it went on')")
    assert tables_of_gan(script)[0] == [CRITIC]
    found, note = tables_of_gan("--calls", "4", script)
    assert found == [CRITIC, MAKER]
    assert "The script was ended at call 4 of a training step." in note


def test_a_script_whose_step_returns_a_shape_that_a_run_shows_is_ended_there(tmp_path: Path) -> None:
    text = GAN.replace('"rows": rows}', '"rows": rows, "some": tf.boolean_mask(rows, rows[:, 0] > 0)}')
    found, note = tables_of_gan(write(tmp_path, text + CALLS + "maker_step(ids, found['rows'])"))
    assert found == [CRITIC]
    assert note.startswith(
        "Planned: critic_step. An output of that step has a shape that is known only after the step runs: "
    )


def test_a_step_that_is_part_of_another_is_not_waited_for(tmp_path: Path) -> None:
    text = """
@ad.function
def both(ids):
    critic_step(ids, tf.zeros((tf.shape(ids)[0], 2), tf.float64))
    maker_step(ids, tf.zeros((tf.shape(ids)[0], 2), tf.float64))
both(ids)
raise RuntimeError('it went on')
"""
    found, _ = tables_of_gan(write(tmp_path, GAN + text))
    assert found == [("both", "critic", "localhost:0"), ("both", "maker", "localhost:1")]


def test_fit_goes_on_with_made_up_logs_where_that_is_asked_for(tmp_path: Path) -> None:
    text = """
ad = AutoDist()
with ad.scope():
    for units in (5, 6):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units)])
        model.compile("sgd", "mse", metrics=["mae"])
        print(model.fit(np.zeros((8, 6)), np.zeros((8, units)), batch_size=4, verbose=0).history)
"""
    script = write(tmp_path, HEAD + text)
    result = plan("--json", "--workers", "2", "--calls", "3", script)
    assert result.exit_code == 0, result.stderr
    found = Plans.model_validate_json(result.stdout).plans
    assert [(one.step, one.variables[0].shape) for one in found] == [
        ("train_step", (6, 5)),
        ("train_step (2)", (6, 6)),
    ]
    assert [one.step for one in plans_of("--workers", "2", script)] == ["train_step"]


def test_diff_compares_the_plans_of_each_step(tmp_path: Path) -> None:
    both = write(tmp_path, GAN + CALLS + "maker_step(ids, found['rows'])")
    words = ["--json", "--workers", "2", "--strategy"]
    files = [write(tmp_path, plan(*words, name, both).stdout, f"{name}.json") for name in ("PSLoadBalancing", "PS")]
    files.append(write(tmp_path, plan(*words, "PS", "--calls", "1", both).stdout, "first.json"))
    balanced = RUNNER.invoke(app, ["diff", files[0], files[1]])
    assert "1 variables differ, 1 are equal" in balanced.stdout and "maker" in balanced.stdout
    fewer = RUNNER.invoke(app, ["diff", files[1], files[2]])
    assert fewer.exit_code == 1 and f"maker_step is only in the plan {files[1]}" in fewer.stdout.replace("\n", " ")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_has_a_bar_for_each_link_and_worker_and_loads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    result = plan("--workers", "3", "--strategy", "PS", "--html", str(path), write(tmp_path, STEP))
    assert result.exit_code == 0, result.stderr
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert (page.tags.count("svg"), page.tags.count("rect")) == (2, 3 + 4)
    assert "localhost:1 → localhost:0" in page.text and "moment (48 B)" in page.text
    assert page.links == [] and not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "url(" not in path.read_text() and "@import" not in path.read_text()


def test_a_page_that_is_not_written_is_not_begun_either(tmp_path: Path) -> None:
    path, script = tmp_path / "plan.html", write(tmp_path, "print('no training')")
    assert plan("--html", str(path), script).exit_code == 2
    assert not path.exists()
    path.write_text("of yesterday")
    assert plan("--html", str(path), script).exit_code == 2
    assert path.read_text() == "of yesterday"
    full = plan("--html", "/dev/full", write(tmp_path, STEP))
    assert full.exit_code == 2
    assert full.stderr.endswith("autodist: error: /dev/full cannot be written: No space left on device.\n")


def test_names_in_the_page_are_text_whatever_they_hold() -> None:
    assert "<script>" not in page_of(Plans(script="<script>alert(1)</script>", plans=()))


def test_diff_names_the_variables_that_differ(tmp_path: Path) -> None:
    script, files = write(tmp_path, STEP), []
    for name in ("Parallax", "PS", "AllReduce"):
        files.append(
            write(tmp_path, plan("--json", "--workers", "2", "--strategy", name, script).stdout, f"{name}.json")
        )
    parallax, servers, shared = files
    result = RUNNER.invoke(app, ["diff", parallax, servers])
    assert result.exit_code == 1
    assert "1 variables differ, 1 are equal" in result.stdout and "weight" in result.stdout
    assert "table" not in result.stdout
    assert "2 variables differ, 0 are equal" in RUNNER.invoke(app, ["diff", servers, shared]).stdout
    alike = RUNNER.invoke(app, ["diff", servers, servers])
    assert (alike.exit_code, alike.stdout) == (0, "0 variables differ, 2 are equal\n")


def test_diff_refuses_what_is_no_plan_or_several(tmp_path: Path) -> None:
    script = write(tmp_path, STEP)
    several = write(tmp_path, plan("--json", "--strategy", "PS", "--strategy", "AllReduce", script).stdout, "both.json")
    for file, told in [(several, "holds 2 plans"), (script, "is not a plan")]:
        result = RUNNER.invoke(app, ["diff", file, file])
        assert result.exit_code == 2 and told in result.stderr
        assert f"> {file}" not in result.stderr, "who does as told would lose it"
