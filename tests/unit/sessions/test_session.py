"""A session of two replicas: its arguments besides fetches and feeds."""

from __future__ import annotations

import os

import numpy as np
import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec, api
from autodist.errors import CaptureError, EmptyBatchError, UnevenBatchError

v1 = tf.compat.v1


def autodist(replicas: int = 2) -> AutoDist:
    node = {"address": "localhost", "cpus": list(range(replicas))}
    return AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [node]}))


@pytest.fixture
def trained():
    """A session with its loss, its train operation and a batch."""
    ad = autodist()
    with tf.Graph().as_default(), ad.scope():
        x = v1.placeholder(tf.float64, [None, 3], "x")
        weight = v1.get_variable("weight", [3, 1], tf.float64, initializer=tf.ones_initializer())
        loss = tf.reduce_mean(tf.square(x @ weight), name="loss")
        train = v1.train.GradientDescentOptimizer(0.001).minimize(loss)
        session = ad.create_distributed_session()
        session.run(v1.global_variables_initializer())
        yield session, loss, train, {x: np.arange(12.0).reshape(4, 3)}


@pytest.mark.feature("session", "fetches: `RunOptions`, `RunMetadata`")
def test_a_run_takes_options_and_tells_what_ran(trained):
    session, loss, train, batch = trained
    plain = session.run(loss, batch)
    metadata = v1.RunMetadata()
    options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
    traced, _ = session.run([loss, train], batch, options, metadata)
    assert traced == plain
    ran = {node.node_name for device in metadata.step_stats.dev_stats for node in device.node_stats}
    assert any("MatMul" in name for name in ran) and any("autodist/replica_1/" in name for name in ran)
    assert session.run(loss, feed_dict=batch, options=None, run_metadata=None) < plain


def test_messages_of_tensorflow_about_a_new_session_are_hidden(monkeypatch, capfd):
    says = b"I0000 00:00:1795321859.568474   23362 master.cc:243] Scanning workers for devices: 2 total workers\n"
    monkeypatch.setattr(api, "DistributedSession", lambda *_: os.write(2, says + b"another line\n"))
    with tf.Graph().as_default(), (ad := autodist()).scope():
        ad.create_distributed_session()
    assert capfd.readouterr().err == "another line\n"


def test_metadata_alone_is_filled_and_earlier_contents_go(trained):
    session, loss, _, batch = trained
    metadata = v1.RunMetadata()
    metadata.step_stats.dev_stats.add(device="earlier")
    session.run(loss, batch, run_metadata=metadata)
    assert "earlier" not in str(metadata)
    graphs = v1.RunMetadata()
    session.run(loss, batch, options=v1.RunOptions(output_partition_graphs=True), run_metadata=graphs)
    assert graphs.partition_graphs


def test_a_time_limit_is_kept(trained):
    session, _, train, batch = trained
    session.run(train, batch, options=v1.RunOptions(timeout_in_ms=60_000))
    with tf.Graph().as_default(), (ad := autodist()).scope():
        x = v1.placeholder(tf.float64, [None, 3], "x")
        weight = v1.get_variable("weight", [3, 1], tf.float64)
        endless = tf.while_loop(lambda k: k < 1e18, lambda k: k + 1.0, [tf.reduce_mean(x @ weight)])
        v1.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(x @ weight))
        session = ad.create_distributed_session()
        session.run(v1.global_variables_initializer())
        with pytest.raises(tf.errors.DeadlineExceededError):
            session.run(endless, {x: np.ones((4, 3))}, options=v1.RunOptions(timeout_in_ms=200))


def test_options_that_name_nodes_of_the_script_are_refused(trained):
    session, loss, _, batch = trained
    watches = v1.RunOptions()
    watches.debug_options.debug_tensor_watch_opts.add(node_name="loss")
    with pytest.raises(CaptureError, match="debug_options name nodes"):
        session.run(loss, batch, options=watches)
    keyed = v1.RunOptions()
    keyed.experimental.collective_graph_key = 7
    with pytest.raises(CaptureError, match="collective_graph_key"):
        session.run(loss, batch, options=keyed)


def test_invalid_options_are_refused(trained):
    session, loss, _, batch = trained
    with pytest.raises(TypeError, match="options"):
        session.run(loss, batch, options="FULL_TRACE")
    with pytest.raises(TypeError, match="run_metadata"):
        session.run(loss, batch, run_metadata={})


@pytest.fixture
def setting():
    """Returns a session, three of its variables, and the op that sets them."""
    ad = autodist()
    with tf.Graph().as_default(), ad.scope():
        x = v1.placeholder(tf.float32, [None, 3], "x")
        weight, bias = v1.get_variable("weight", [3, 2]), v1.get_variable("bias", [2])
        rate = v1.get_variable("rate", [], initializer=v1.zeros_initializer(), trainable=False)
        total = v1.get_variable("total", [3], initializer=v1.zeros_initializer(), trainable=False)
        loss = tf.reduce_mean(tf.square(x @ weight + bias))
        v1.train.GradientDescentOptimizer(rate).minimize(loss, name="train")
        session = ad.create_distributed_session()
        session.run(v1.global_variables_initializer())
        v1.assign(weight, v1.placeholder(tf.float32, [3, 2], "fixed"), name="assign_fixed")
        v1.assign(weight, v1.placeholder(tf.float32, [None, 2], "open"), name="assign_open")
        v1.assign(weight, v1.placeholder(tf.float32, name="shapeless"), name="assign_shapeless")
        bias.assign_add(v1.placeholder(tf.float32, [2], "more"), name="add_more")
        total.assign_add(tf.reduce_sum(x, 0), name="count")
        tf.identity(x @ weight + v1.placeholder(tf.float32, [2], "shift"), name="predicted")
        yield session, weight, bias, rate, total


VALUE = np.arange(6, dtype=np.float32).reshape(3, 2)


@pytest.mark.feature("session", "values: given from Python between steps (`assign`, `load`)")
def test_variables_are_loaded(setting):
    session, weight, bias, rate, _ = setting
    weight.load(VALUE, session)
    bias.load([7, 8], session)
    rate.load(0.5, session)
    found = session.run([weight, bias, rate])
    for value, wanted in zip(found, (VALUE, [7, 8], 0.5), strict=True):
        np.testing.assert_array_equal(value, wanted)


@pytest.mark.parametrize("name", ["fixed", "open", "shapeless"])
def test_variables_are_assigned_what_is_fed(setting, name):
    session, weight = setting[:2]
    session.run(f"assign_{name}", {f"{name}:0": VALUE})
    np.testing.assert_array_equal(session.run(weight), VALUE)


def test_a_fed_summand_is_added_once(setting):
    session, _, bias, *_ = setting
    bias.load([7, 8], session)
    session.run("add_more", {"more:0": [1, 2]})
    np.testing.assert_array_equal(session.run(bias), [8, 10])


def test_a_batch_that_is_counted_is_still_split(setting):
    """Each replica adds up its part, and the variable gets the sum of these, as from one device."""
    session, *_, total = setting
    session.run("count", {"x:0": np.ones((3, 3), np.float32)})
    np.testing.assert_array_equal(session.run(total), np.full(3, 3.0))


def test_a_fixed_shape_in_a_run_that_only_looks_is_still_asked_about(setting):
    session, *_ = setting
    with pytest.raises(CaptureError, match=r"shift:0 has the fixed shape \(2,\)"):
        session.run("predicted:0", {"x:0": np.ones((4, 3)), "shift:0": np.ones(2)})


def test_gradients_of_a_mean_are_gathered_as_one_device_gathers_them():
    ad = autodist()
    with tf.Graph().as_default(), ad.scope():
        x = v1.placeholder(tf.float64, [None, 2], "x")
        weight = v1.get_variable("weight", [2, 1], tf.float64, initializer=v1.ones_initializer())
        kept = v1.get_variable("kept", [2, 1], tf.float64, trainable=False, initializer=v1.zeros_initializer())
        loss = tf.reduce_mean(tf.square(x @ weight))
        optimizer = v1.train.GradientDescentOptimizer(tf.constant(0.1, tf.float64))
        gather = kept.assign_add(tf.gradients(loss, weight)[0])
        apply = optimizer.apply_gradients([(kept, weight)])
        optimizer.minimize(loss)
        session = ad.create_distributed_session()
        session.run(v1.global_variables_initializer())
        batches = [np.arange(6.0).reshape(3, 2), np.arange(10.0).reshape(5, 2)]
        for batch in batches:
            session.run(gather, {x: batch})
        session.run(apply)
        slopes = sum(2 * batch.T @ batch.sum(1, keepdims=True) / len(batch) for batch in batches)
        np.testing.assert_allclose(session.run(kept), slopes, rtol=1e-12)
        np.testing.assert_allclose(session.run(weight), 1 - 0.1 * slopes, rtol=1e-12)


def test_fed_tensors_can_be_fetched(trained):
    session, loss, train, feeds = trained
    ((x, batch),) = feeds.items()
    np.testing.assert_array_equal(session.run(x, feeds), batch)
    fetched = session.run({"x": x, "loss": loss, "train": train}, feeds)
    np.testing.assert_array_equal(fetched["x"], batch)
    assert fetched["loss"] > 0 and fetched["train"] is None
    assert session.run(x, {x: batch[:0]}).shape == (0, 3)


@pytest.mark.feature("session", "fetches: sparse tensors", refused="CaptureError")
def test_sparse_tensors_are_not_fetched_and_fed_only_where_they_are_placeholders():
    ad = autodist()
    with tf.Graph().as_default(), ad.scope():
        table = v1.get_variable("table", [9, 3])
        words = tf.sparse.from_dense(v1.placeholder(tf.int64, [None, 5]), name="words")
        loss = tf.reduce_mean(tf.nn.safe_embedding_lookup_sparse([table], words))
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        session = ad.create_distributed_session()
        with pytest.raises(CaptureError, match="belongs to a SparseTensor.* cannot be fed.*sparse_placeholder"):
            session.run(loss, {words: v1.SparseTensorValue([[0, 0]], [3], [2, 5])})
        with pytest.raises(CaptureError, match="cannot be fetched.*tf.sparse.to_dense"):
            session.run(words)


@pytest.fixture
def sparse():
    """Returns a session of an embedding, its gradients with the train operation, and one device that runs the same."""
    ad = autodist()
    with tf.Graph().as_default() as graph, ad.scope():
        ids = v1.placeholder(tf.int32, [None, 2], "ids")
        table = v1.get_variable("table", [6, 2], tf.float64, initializer=tf.ones_initializer())
        loss = tf.reduce_mean(tf.square(tf.reduce_sum(tf.nn.embedding_lookup(table, ids), [1, 2]) - 3.0))
        (gradient,) = tf.gradients(loss, [table])
        train = v1.train.GradientDescentOptimizer(0.1).apply_gradients([(gradient, table)])
        alone = v1.Session(graph=graph)
        session = ad.create_distributed_session()
        for one in (session, alone):
            one.run(v1.global_variables_initializer())
        yield session, alone, gradient, train, {ids: np.array([[0, 1], [2, 1], [3, 0], [1, 1], [4, 5]])}


@pytest.mark.feature("session", "fetches: `IndexedSlices`")
@pytest.mark.parametrize("trains", [False, True])
def test_a_sparse_gradient_is_fetched_with_the_rows_of_all_replicas(sparse, trains):
    session, alone, gradient, train, feeds = sparse
    fetches = {"gradient": [gradient], "train": train if trains else gradient.dense_shape}
    for _ in range(2):
        found, expected = session.run(fetches, feeds), alone.run(fetches, feeds)
        (mine,), (theirs,) = found["gradient"], expected["gradient"]
        assert type(mine) is type(theirs)
        for name in ("values", "indices", "dense_shape"):
            np.testing.assert_allclose(getattr(mine, name), getattr(theirs, name), rtol=1e-12, err_msg=name)


def test_a_sparse_gradient_that_tells_no_shape_is_fetched(sparse):
    session, alone, gradient, _, feeds = sparse
    shapeless = tf.IndexedSlices(gradient.values, gradient.indices)
    mine, theirs = session.run(shapeless, feeds), alone.run(shapeless, feeds)
    assert mine.dense_shape is None and theirs.dense_shape is None
    np.testing.assert_allclose(mine.values, theirs.values, rtol=1e-12)


@pytest.mark.feature("session", "fetches: `make_callable`")
def test_a_callable_runs_what_it_was_made_for(trained):
    session, loss, train, feeds = trained
    (x, batch), plain = next(iter(feeds.items())), session.run(loss, feeds)
    step = session.make_callable([loss, train], [x])
    assert step(batch) == [plain, None]
    assert session.make_callable("loss:0", ["x"])(batch) < plain
    metadata = v1.RunMetadata()
    traced = session.make_callable(loss, [x], accept_options=True)
    traced(batch, options=v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE), run_metadata=metadata)
    assert metadata.step_stats.dev_stats
    assert session.make_callable(session.graph.get_operation_by_name("init"))() is None
    with pytest.raises(TypeError, match="1 values are fed in each run, and 0 were passed"):
        step()
    with pytest.raises(TypeError, match="options.*accept_options=True"):
        step(batch, options=v1.RunOptions())
    with pytest.raises(TypeError, match="feed_list"):
        session.make_callable(loss, x)
    with pytest.raises(TypeError):
        session.make_callable([3])


@pytest.mark.feature("session", "fetches: those of hooks in `MonitoredSession`")
def test_hooks_of_a_monitored_session_ask_for_more_of_a_run(trained):
    """Hooks request further fetches, here as keys in addition to a string."""
    session, loss, train, batch = trained
    seen = []

    class Watch(v1.train.SessionRunHook):
        def before_run(self, run_context):
            return v1.train.SessionRunArgs({"loss": loss, "again": [loss]})

        def after_run(self, run_context, run_values):
            seen.append(run_values.results)
            if len(seen) == 2:
                run_context.request_stop()

    class Creator(v1.train.SessionCreator):
        def create_session(self):
            return session

    asked = []
    with v1.train.MonitoredSession(Creator(), [Watch(), v1.train.NanTensorHook(loss)]) as monitored:
        while not monitored.should_stop():
            asked.append(monitored.run([train, loss], batch)[1])
    assert [one["loss"] for one in seen] == [one["again"][0] for one in seen] == asked
    assert asked[1] < asked[0]


@pytest.mark.feature("session", "fetches: `partial_run`", refused="CaptureError")
def test_runs_in_pieces_are_refused(trained):
    session, loss, _, feeds = trained
    for call in (lambda: session.partial_run_setup([loss], list(feeds)), lambda: session.partial_run("handle", loss)):
        with pytest.raises(CaptureError, match="partial_run continues .* one session.run"):
            call()


def test_the_graph_is_told_as_the_script_has_built_it(trained):
    session, *_ = trained
    assert session.graph_def == session.graph.as_graph_def()


@pytest.mark.feature("session", "data: batches without examples", refused="EmptyBatchError")
def test_a_batch_without_examples_is_refused_where_something_asks_for_examples(trained):
    session, loss, train, feeds = trained
    x = next(iter(feeds))
    for fetch in (train, loss, [loss, x]):
        with pytest.raises(EmptyBatchError, match="no examples at all"):
            session.run(fetch, {x: np.zeros((0, 3))})
    assert session.run(x * 2.0, {x: np.zeros((0, 3))}).shape == (0, 3)
    assert session.run(loss, feeds) > 0


def test_repeated_fetches_are_cached_and_changes_are_seen(trained):
    session, loss, train, batch = trained
    (x,) = batch
    weight = session.graph.get_tensor_by_name("weight/Read/ReadVariableOp:0")
    fetches = [loss, {"b": weight, "a": ("loss:0", train)}]
    first = session.run(fetches, batch)
    again = session.run([loss, {"b": weight, "a": ("loss:0", train)}], {x: batch[x] + 1.0})
    assert len(session._requests._known) == 2  # with that of the initializer
    for found in (first, again):
        assert list(found[1]) == ["b", "a"] and found[1]["a"] == (found[0], None)
    fetches.append("loss")
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(first[0], again[0])
    longer = session.run([loss, weight, loss], {"x": batch[x]})
    assert longer[0] == longer[2] and longer[1].shape == (3, 1)


@pytest.mark.parametrize("first", [(4, 4), (5, 2)])
def test_a_run_that_only_evaluates_takes_inputs_of_two_lengths(first):
    ad = autodist()
    with tf.Graph().as_default(), ad.scope():
        points, noise = (v1.placeholder(tf.float64, [None, 2], name) for name in ("points", "noise"))
        weight = v1.get_variable("weight", [2, 1], tf.float64, initializer=v1.ones_initializer())
        loss = tf.reduce_mean(tf.tanh(noise @ weight)) - tf.reduce_mean(tf.tanh(points @ weight))
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        with ad.create_distributed_session() as session:
            session.run(v1.global_variables_initializer())
            rng = np.random.default_rng(0)
            for lengths in (first, (5, 2), (3, 3), (2, 7)):
                fed = {p: rng.normal(size=(n, 2)) for p, n in zip((points, noise), lengths, strict=True)}
                found = session.run(loss, fed)
                one, other = (np.tanh(fed[p].sum(1)).mean() for p in (points, noise))
                np.testing.assert_allclose(found, other - one, rtol=1e-12)
            with pytest.raises(UnevenBatchError, match="different numbers of examples"):
                session.run(train, fed)
