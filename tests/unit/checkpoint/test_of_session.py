"""`ad.checkpoint(folder, session=session)`: a session's variables by their names, in the format of a Saver."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.errors import CheckpointError, CheckpointMismatchError
from autodist.strategies import AllReduce, PartitionedPS

v1 = tf.compat.v1
X = np.random.default_rng(0).normal(size=(6, 4, 5))


class Script:
    """A script of TensorFlow 1, distributed or on one device."""

    def __init__(self, builder=None, replicas=2, width=3, dtype=tf.float64) -> None:
        self.graph = tf.Graph()
        spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": list(range(replicas))}]})
        self.ad = AutoDist(resource_spec=spec, strategy=builder or AllReduce())
        with self.graph.as_default(), self.ad.scope():
            self.x = v1.placeholder(dtype, [None, 5])
            weight = v1.get_variable("weight", initializer=tf.ones([5, width], dtype))
            loss = tf.reduce_mean(tf.square(tf.tanh(self.x @ weight)))
            steps = v1.train.get_or_create_global_step()
            self.train = v1.train.AdamOptimizer(0.1).minimize(loss, global_step=steps)
            self.saver = v1.train.Saver()
            self.fetches = {v.op.name: v for v in v1.global_variables()}
            self.session = self.ad.create_distributed_session() if builder else v1.Session()
            if builder is None:
                self.session.run(v1.global_variables_initializer())

    def run(self, batches) -> dict[str, np.ndarray]:
        for batch in batches:
            self.session.run(self.train, {self.x: batch})
        return self.session.run(self.fetches)


def assert_close(found, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_one_strategy_goes_on_with_what_another_has_saved_and_a_saver_with_both(tmp_path):
    expected = Script().run(X)
    first = Script(PartitionedPS(max_shards=3, min_partition_bytes=1))
    first.run(X[:2])
    path = first.ad.checkpoint(tmp_path, session=first.session).save(step=2)
    second = Script(AllReduce(), replicas=3)
    checkpoint = second.ad.checkpoint(tmp_path, session=second.session)
    assert checkpoint.restore() == 2  # before anything was initialised
    second.run(X[2:4])
    second_path = checkpoint.save(step=4)
    for saved, begin in ((path, 2), (second_path, 4)):
        plain = Script()
        with plain.graph.as_default():
            plain.saver.restore(plain.session, saved)
            assert_close(plain.run(X[begin:]), expected)
    assert_close(second.run(X[4:]), expected)
    assert checkpoint.restore() == 4  # between two runs
    assert_close(second.run(X[4:]), expected)


def test_checkpoints_of_savers_and_of_objects_are_restored(tmp_path):
    plain = Script()
    values = plain.run(X[:3])
    with plain.graph.as_default():
        by_names = plain.saver.save(plain.session, str(tmp_path / "names"))
    eager = {name: tf.Variable(value, name=name) for name, value in values.items()}
    by_objects = tf.train.Checkpoint(variables=list(eager.values())).save(str(tmp_path / "objects"))
    script = Script(PartitionedPS(max_shards=2, min_partition_bytes=1))
    checkpoint = script.ad.checkpoint(tmp_path / "own", session=script.session)
    assert checkpoint.restore() is None
    for path in (by_names, by_objects):
        script.run(X[3:4])
        assert checkpoint.restore(path) == 0
        assert_close(script.run([]), values)


def test_variables_that_no_run_has_set_are_saved_with_their_initial_values(tmp_path):
    script = Script(AllReduce())
    path = script.ad.checkpoint(tmp_path, session=script.session).save()
    np.testing.assert_array_equal(tf.train.load_checkpoint(path).get_tensor("weight"), np.ones((5, 3)))


@pytest.mark.parametrize("other, listed", [({"width": 2}, "(5, 3) float64"), ({"dtype": tf.float32}, "float32")])
def test_another_graph_s_checkpoint_is_refused_with_all_that_differs(tmp_path, other, listed):
    saved = Script(AllReduce())
    path = saved.ad.checkpoint(tmp_path, session=saved.session).save()
    script = Script(AllReduce(), **other)
    with pytest.raises(CheckpointMismatchError) as raised:
        script.ad.checkpoint(tmp_path, session=script.session).restore(path)
    assert {"weight", "weight/Adam", "weight/Adam_1"} <= {one.partition(" ")[0] for one in raised.value.others}
    assert listed in str(raised.value)


def test_a_part_of_a_partitioner_s_variable_is_refused(tmp_path):
    spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0]}]})
    ad = AutoDist(resource_spec=spec, strategy=AllReduce())
    with tf.Graph().as_default(), ad.scope():
        weight = v1.get_variable("weight", [4, 2], partitioner=tf.compat.v1.fixed_size_partitioner(2))
        loss = tf.reduce_mean(tf.square(v1.placeholder(tf.float32, [None, 4]) @ tf.convert_to_tensor(weight)))
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        session = ad.create_distributed_session()
        with pytest.raises(CheckpointError, match="weight/part_0.*Saver"):
            ad.checkpoint(tmp_path, session=session)


def test_a_session_is_saved_without_objects(tmp_path):
    script = Script(AllReduce())
    with pytest.raises(ValueError, match="model"):
        script.ad.checkpoint(tmp_path, session=script.session, model=tf.Module())


def test_generators_beside_a_graph_go_on_though_it_is_being_built(tmp_path):
    """Their states were turned into nodes of the graph, which no session ran."""
    tf.random.set_global_generator(tf.random.Generator.from_seed(5))
    first = Script(AllReduce())
    path = first.ad.checkpoint(tmp_path, session=first.session).save()
    expected = tf.random.get_global_generator().normal([3]).numpy()
    tf.random.set_global_generator(tf.random.Generator.from_seed(6))
    second = Script(AllReduce())
    with second.graph.as_default():
        second.ad.checkpoint(tmp_path / "other", session=second.session).restore(path)
    np.testing.assert_array_equal(tf.random.get_global_generator().normal([3]), expected)
