"""`ad.checkpoint` on several workers: other workers resume from them; a worker that restores alone gets an error."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.cluster.trainings import Training

pytestmark = [pytest.mark.processes, pytest.mark.slow]

BOTH = """
from autodist.checkpoint import slices
from autodist.errors import CheckpointError

slices.LARGE = 1  # its old value is released before the new one arrives, also on another worker
draw = np.random.default_rng(0)
with ad.scope():
    table, momentum = tf.Variable(draw.normal(size=(6, 4))), tf.Variable(np.zeros((6, 4)))

def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.tanh(x @ table) ** 2)
    momentum.assign(0.9 * momentum + tape.gradient(loss, table))
    table.assign_sub(0.1 * momentum)
    return loss

batches = draw.normal(size=(8, 9, 6))
folder = FOLDER
checkpoint = ad.checkpoint(folder, table=table, momentum=momentum)
done = checkpoint.restore() or 0
train = ad.function(batch="global")(step)
"""

FIRST = """
for batch in batches[:5]:
    train(batch)
checkpoint.save(step=5)
"""

SECOND = """
for _ in range(2):
    for batch in batches[done:7]:
        train(batch)
    again = table.numpy()
    assert checkpoint.restore() == 5  # into the shards
for batch in batches[done:7]:
    train(batch)
assert (table.numpy() == again).all()
told = ""
if ad.is_chief:
    try:
        checkpoint.restore()
    except CheckpointError as error:
        told = str(error)
train(batches[7])
plain = tf.train.Checkpoint(table=table)
paths = [plain.save(os.path.join(folder, "all")) for _ in range(4)]  # one writes, or they spoil each other's parts
if ad.is_chief:
    paths.append(plain.write(os.path.join(folder, "chief")))
paths.append(plain.write(os.path.join(folder, f"own{me}")))
for path in paths:
    assert (tf.train.load_checkpoint(path).get_tensor("table/.ATTRIBUTES/VARIABLE_VALUE") == table.numpy()).all()
found = [table.numpy(), momentum.numpy()]
table.assign(np.random.default_rng(0).normal(size=(6, 4)))  # on one device from here on
momentum.assign(np.zeros((6, 4)))
for batch in batches:
    step(tf.constant(batch))
keep(done=done, told=told, found=found, expected=[table.numpy(), momentum.numpy()])
"""


def test_what_three_workers_have_saved_in_shards_two_go_on_with(tmp_path: Path):
    """A chief that restores alone gets an error, and nothing changes, since the other workers did not take part."""
    both = BOTH.replace("FOLDER", repr(str(tmp_path / "saved")))
    nodes = [{"address": "localhost", "cpus": [0, 1, 2], "workers": 3}]
    strategy = {"builder": "PartitionedPS", "max_shards": 3, "min_partition_bytes": 1}
    with Training(tmp_path / "first", both + FIRST, {"nodes": nodes, "strategy": strategy}) as run:
        assert run.wait(120) == 0, run.stderr
    nodes = [{"address": "localhost", "cpus": [0, 1], "workers": 2}]
    strategy = {"builder": "PartitionedPS", "max_shards": 2, "min_partition_bytes": 1}
    with Training(tmp_path / "second", both + SECOND, {"nodes": nodes, "strategy": strategy}) as run:
        assert run.wait(120) == 0, run.stderr
        for worker in range(2):
            kept = run.kept(worker)
            assert kept["done"] == 5
            np.testing.assert_allclose(kept["found"], kept["expected"], rtol=1e-9, atol=1e-12)
        assert "on every worker at the same place" in str(run.kept(0)["told"])
        run.assert_gone()


GRAPH = """
draw = np.random.default_rng(0)
batches = draw.normal(size=(8, 8, 6))
x = tf.compat.v1.placeholder(tf.float64, [None, 6])
table = tf.compat.v1.get_variable("table", initializer=draw.normal(size=(6, 4)), use_resource=True)
loss = tf.reduce_mean(tf.tanh(x @ table) ** 2)
train = tf.compat.v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
"""

SESSION = """
tf.compat.v1.disable_v2_behavior()  # as most scripts of TensorFlow 1
with tf.Graph().as_default(), ad.scope():
    exec(GRAPH)
    saver = tf.compat.v1.train.Saver(max_to_keep=2)
    session = ad.create_distributed_session()
    session.run(tf.compat.v1.global_variables_initializer())
    checkpoint = ad.checkpoint(FOLDER, session=session)
    done = checkpoint.restore() or 0
    for number in range(done, 8):
        if number == STOP:
            note(f"stopped{me}")
            wait_for("never")
        session.run(train, {x: batches[number][me::2]})
        if number == 3:
            checkpoint.save(step=4)
    paths = [saver.save(session, SAVERS, global_step=step) for step in range(4)]  # one writes
    assert saver.last_checkpoints == paths[2:]
    values = session.run(tf.compat.v1.global_variables())
    for path in paths[2:]:
        assert (tf.train.load_checkpoint(path).get_tensor("table") == values[0]).all()
    keep(done=done, values=values)
"""


def test_a_session_s_shards_are_saved_and_another_strategy_goes_on_with_them(tmp_path: Path):
    """The first run is killed; the second ends with a Saver's file that all workers write."""
    script = SESSION.replace("FOLDER", repr(str(tmp_path / "saved"))).replace("SAVERS", repr(str(tmp_path / "all")))
    script = f"GRAPH = {GRAPH!r}\n{script}"
    nodes = [{"address": "localhost", "cpus": [0, 1], "workers": 2}]
    sharded = {"builder": "PartitionedPS", "max_shards": 2, "min_partition_bytes": 1}
    with Training(tmp_path / "first", script.replace("STOP", "6"), {"nodes": nodes, "strategy": sharded}) as run:
        for worker in range(2):
            run.wait_for_note(f"stopped{worker}", 120)
        os.kill(run.chief.pid, signal.SIGKILL)
        run.wait(60)
    with Training(
        tmp_path / "second", script.replace("STOP", "-1"), {"nodes": nodes, "strategy": {"builder": "AllReduce"}}
    ) as run:
        assert run.wait(120) == 0, run.stderr
        kept = [run.kept(worker) for worker in range(2)]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        plain: dict = {"np": np, "tf": tf}
        exec(GRAPH, plain)  # noqa: S102
        session.run(tf.compat.v1.global_variables_initializer())
        for batch in plain["batches"]:
            session.run(plain["train"], {plain["x"]: batch})
        expected = session.run(tf.compat.v1.global_variables())
    for found in kept:
        assert found["done"] == 4
        np.testing.assert_allclose(found["values"], expected, rtol=1e-9, atol=1e-12)
