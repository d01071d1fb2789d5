"""ReduceByCollective: under RING and NCCL, all tensors between workers travel in TensorFlow's collectives."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

from autodist.batch.examples import share_of, take
from autodist.errors import StrategyError
from autodist.graph.editor import GraphEditor
from autodist.graph.names import node_of
from autodist.graph.parts import PendingReduction, PendingReductionKind
from autodist.graph.step import EXAMPLES
from autodist.kernels.communicate.reduce_by_collective import ReduceByCollective, padded_lengths
from autodist.kernels.context import Context
from autodist.kernels.pipeline import KERNELS
from autodist.proto import strategy_pb2
from tests.unit.graph.replicated import replicated
from tests.unit.kernels.in_one_process import capture, one_device, plan, returned_by, rewritten

Spec = strategy_pb2.AllReduce
ROWS, WIDTH = 9, 4


def make_step(bias_dtype=tf.float64):
    """A step of word ids (n × 3): a table (sparse), a kernel and a bias (dense), trained by plain subtraction."""
    rng = np.random.default_rng(0)
    table = tf.Variable(rng.normal(size=(ROWS, WIDTH)), name="table")
    kernel = tf.Variable(rng.normal(size=(WIDTH, 2)), name="kernel")
    bias = tf.Variable(np.zeros(2), dtype=bias_dtype, name="bias")

    def step(ids):
        with tf.GradientTape() as tape:
            scores = tf.reduce_mean(tf.gather(table, ids), 1) @ kernel + tf.cast(bias, tf.float64)
            loss = tf.reduce_mean(tf.square(scores - 1.0))
        rows, *dense = tape.gradient(loss, [table, kernel, bias])
        table.scatter_sub(tf.IndexedSlices(0.1 * rows.values, rows.indices))
        for variable, gradient in zip((kernel, bias), dense, strict=True):
            variable.assign_sub(tf.cast(0.1, gradient.dtype) * gradient)
        return loss

    return step


def words(count):
    return np.random.default_rng(count).integers(0, ROWS, (count, 3)).astype(np.int32)


def by(spec, captured, workers=2, device="cpu"):
    strategy = plan(captured.step, workers)
    for node in strategy.nodes:
        node.all_reduce.spec = spec
    for replica in strategy.graph_config.replicas:
        replica.device = f"{device}:0"
    return strategy


def collectives(step):
    return {n.name: n for n in step.graph_def.node if n.op.startswith("Collective")}


def keys(step):
    """The instance keys of each collective: one, or those among which the number of rows chooses."""
    editor = GraphEditor(step.graph_def)
    return {name: constants(editor, node.input[3]) for name, node in collectives(step).items()}


def constants(editor, name):
    node = editor[node_of(name)]
    while node.op in ("Identity", "GatherV2"):
        node = editor[node_of(node.input[0])]
    assert node.op == "Const"
    return tf.make_ndarray(node.attr["value"].tensor).ravel().tolist()


def run_together(captured, strategy, batches, kernels=KERNELS):
    """All workers in one session, each on a CPU device of its own; their variables and outputs at the end."""
    items = rewritten(captured, strategy, kernels)
    values = [source.numpy() for source in captured.sources]
    graph, variables, outputs = tf.Graph(), [], []
    with graph.as_default():
        for worker, step in enumerate(items):
            tf.import_graph_def(on_device(step.graph_def, worker), name=f"w{worker}")
            with tf.device(f"/device:CPU:{worker}"):
                variables.append(handles(graph, worker, captured))
        initial = [
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
            for handled in variables
            for (handle, _), value in zip(handled, values, strict=True)
        ]
        final = [[tf.raw_ops.ReadVariableOp(resource=h, dtype=d) for h, d in handled] for handled in variables]
    config = tf.compat.v1.ConfigProto(device_count={"CPU": len(items)}, inter_op_parallelism_threads=2)
    config.graph_options.rewrite_options.disable_meta_optimizer = True  # it takes longer than these small steps
    options = tf.compat.v1.RunOptions(timeout_in_ms=60_000)
    with tf.compat.v1.Session(graph=graph, config=config) as session:
        session.run(initial)
        for batch in batches:
            feeds, fetches = {}, []
            for worker, step in enumerate(items):
                share = share_of(len(batch), [r.worker for r in strategy.graph_config.replicas], worker)
                feeds[f"w{worker}/{next(iter(step.inputs))}"] = take(batch, 0, share)
                feeds[f"w{worker}/{EXAMPLES}"] = share.size
                fetches += [f"w{worker}/{name}" for name in (*returned_by(step), *step.targets)]
            ran = [graph.as_graph_element(name) for name in fetches]
            outputs.append([v for v in session.run(ran, feeds, options=options) if v is not None])
        return session.run(final), outputs


def on_device(graph_def, worker):
    out = tf.compat.v1.GraphDef()
    out.CopyFrom(graph_def)
    for node in out.node:
        node.device = f"/device:CPU:{worker}"
        if node.op == "VarHandleOp":
            node.attr["shared_name"].s = b"w%d/" % worker + node.attr["shared_name"].s
    return out


def handles(graph, worker, captured):
    return [(graph.get_tensor_by_name(f"w{worker}/{v.handle}:0"), v.dtype) for v in captured.step.variables]


def test_a_step_by_shuffle_is_left_as_it_is():
    captured = capture(make_step(), words(4))
    context = Context(plan(captured.step, 2), 0)
    pending = PendingReduction(
        "j", PendingReductionKind.STATE, ("a:0",), ("b:0",), None, 1, tf.float32, tf.TensorShape([]), context.group
    )
    step = replicated(tf.compat.v1.GraphDef(), reductions=(pending,))
    assert ReduceByCollective().apply(step, context) is step


def test_no_queue_is_left_and_all_nodes_stand_on_their_own_worker():
    captured = capture(make_step(), words(4))
    for worker, step in enumerate(rewritten(captured, by(Spec.RING, captured))):
        assert not [n.name for n in step.graph_def.node if "Queue" in n.op or "Accumulator" in n.op]
        assert {tf.DeviceSpec.from_string(n.device).task for n in step.graph_def.node} == {worker}
        assert step.reductions == ()
        assert set(collectives(step)) <= set(step.targets)


def test_instance_keys_are_positive_unique_in_a_step_and_equal_on_all_workers():
    captured = capture(make_step(), words(4))
    first, second = (keys(step) for step in rewritten(captured, by(Spec.RING, captured)))
    assert first == second
    every = [key for some in first.values() for key in some]
    assert len(first) == 5  # gradients, the loss; sizes, indices and values of the rows
    assert len(set(every)) == len(every) == 3 + 2 * len(padded_lengths())
    assert all(0 < key < 2**31 for key in every)


def test_the_same_reduction_with_and_without_a_weight_has_different_keys():
    """TensorFlow binds an instance key to a length for as long as its servers live."""
    (weighted,), (plain,) = (keys(reduced_alone(weight)).values() for weight in ("weight:0", None))
    assert weighted != plain


def reduced_alone(weight):
    context = Context(by(Spec.RING, capture(make_step(), words(4))), 0)
    graph = tf.Graph()
    with graph.as_default():
        local = tf.compat.v1.placeholder(tf.float64, [2], name="local")
        tf.compat.v1.placeholder(tf.float64, [], name="weight")
        tf.identity(local, name="result")
    pending = PendingReduction(
        "kernel/0", PendingReductionKind.GRADIENT, ("local:0",), ("result:0",), weight, 1, tf.float64,
        tf.TensorShape([2]), context.group,
        variable="kernel", weight_dtype=weight and tf.float64,
    )  # fmt: skip
    step = replicated(graph.as_graph_def(), reductions=(pending,))
    return ReduceByCollective().apply(step, context)


def test_the_weight_travels_in_its_bucket():
    captured = capture(make_step(), words(4))
    step = rewritten(captured, by(Spec.RING, captured))[0]
    reduced = [n for n in collectives(step).values() if n.op == "CollectiveReduceV2"]
    assert len(reduced) == 2  # kernel with bias; the loss with whether there are examples
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(step.graph_def, name="")
        lengths = [graph.get_tensor_by_name(f"{n.name}:0").shape[0] for n in reduced]
    assert lengths == [8 + 8 + 1] * 2  # values aligned to 64 bytes, and one element behind them


def test_nccl_stands_on_the_gpu_and_each_collective_waits_for_the_one_before():
    captured = capture(make_step(), words(4))
    orders = []
    for step in rewritten(captured, by(Spec.NCCL, captured, device="gpu")):
        found = collectives(step)
        assert {n.attr["communication_hint"].s for n in found.values()} == {b"nccl"}
        assert {tf.DeviceSpec.from_string(n.device).device_type for n in found.values()} == {"GPU"}
        editor = GraphEditor(step.graph_def)
        before = {name: len((editor.ancestors([name]) & set(found)) - {name}) for name in found}
        assert sorted(before.values()) == list(range(len(found)))
        orders.append(sorted(found, key=before.__getitem__))
    assert orders[0] == orders[1]


def test_ring_collectives_do_not_wait_for_one_another():
    captured = capture(make_step(), words(4))
    step = rewritten(captured, by(Spec.RING, captured))[0]
    editor = GraphEditor(step.graph_def)
    dense = [name for name, n in collectives(step).items() if n.op == "CollectiveReduceV2"]
    assert all(not (editor.ancestors([name]) & set(dense)) - {name} for name in dense)


def test_a_type_that_collectives_do_not_know_is_refused():
    captured = capture(make_step(), words(4))
    context = Context(by(Spec.RING, captured), 0)
    pending = PendingReduction(
        "state/z",
        PendingReductionKind.STATE,
        ("a:0",),
        ("b:0",),
        None,
        1,
        tf.complex64,
        tf.TensorShape([2]),
        context.group,
    )
    with pytest.raises(StrategyError, match="state/z has dtype complex64.*SHUFFLE instead of RING"):
        ReduceByCollective().apply(replicated(tf.compat.v1.GraphDef(), reductions=(pending,)), context)


def test_padded_lengths_waste_at_most_a_quarter_and_reach_all_sizes():
    lengths = padded_lengths()
    assert lengths[0] == 1
    assert lengths[-1] == 2**31 - 1
    assert len(lengths) < 128
    assert all(b <= max(a + 1, a * 5 // 4) and b > a for a, b in itertools.pairwise(lengths))


def test_a_ring_trains_as_one_device_does_with_uneven_and_missing_parts():
    step, workers = make_step(), 3
    captured = capture(step, words(4))
    batches = [words(n) for n in (7, 6, 1, 2, 7)]
    values, outputs = run_together(captured, by(Spec.RING, captured, workers), batches)
    expected = one_device(captured, step, [[b] for b in batches])
    for mine in values:
        for variable, value, same in zip(captured.step.variables, mine, values[0], strict=True):
            np.testing.assert_allclose(value, expected.variables[0][variable.name], rtol=1e-12, atol=1e-12)
            np.testing.assert_array_equal(value, same, err_msg=variable.name)
    for losses, ((wanted,),) in zip(outputs, expected.outputs, strict=True):
        np.testing.assert_allclose(losses, [wanted] * workers, rtol=1e-12)


def test_gradients_of_16_bits_travel_in_32():
    captured = capture(make_step(tf.bfloat16), words(4))
    strategy = by(Spec.RING, captured)
    types = {n.attr["T"].type for n in collectives(rewritten(captured, strategy)[0]).values()}
    assert tf.bfloat16.as_datatype_enum not in types
    values, _ = run_together(captured, strategy, [words(5)])
    for mine, same in zip(values[0], values[1], strict=True):
        np.testing.assert_array_equal(mine, same)
