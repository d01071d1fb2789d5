"""`autodist plan`: counts, output and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from autodist.graph.partial_count import PartialCount
from tests.unit.cli.planning import HEAD, STEP, plan, plans_of, write


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
