"""The order of writes of divided variables on all places."""

from __future__ import annotations

from autodist.graph.names import is_control, node_of
from autodist.kernels import Context, rewrite
from tests.unit.kernels.in_one_process import on_mesh
from tests.unit.kernels.shard.mesh_models import perceptron


def test_parts_are_written_between_the_beginning_and_the_end_of_all_members():
    model = perceptron()
    strategy = on_mesh(model.captured.step, {"data": 2, "model": 2}, {"w1": "[–, model]", "w2": "[model, –]"})
    step = rewrite(model.captured.step, Context(strategy, 2))
    nodes = step.graph_index.nodes
    queues = {n.name: n.attr["shared_name"].s.decode() for n in step.graph_index.of_op("FIFOQueueV2")}
    divided = {step.by_name[name].handle for name in step.shardings}
    writes = {name for name, effect in step.graph_index.effects.items() if effect.writes & divided}
    taken = {n.name: queues[node_of(n.input[0])] for n in step.graph_index.of_op("QueueDequeueV2")}
    put = {n.name: queues[node_of(n.input[0])] for n in step.graph_index.of_op("QueueEnqueueV2")}
    begun = {name for name, queue in taken.items() if "/begun/3/2" in queue}
    (written,) = (name for name, queue in put.items() if "/written/2/3" in queue)
    ended = {name for name, queue in taken.items() if "/written/3/2" in queue}
    assert len(writes) == 4 and begun and ended <= set(step.targets)
    for write in writes:
        assert begun <= {node_of(i) for i in nodes[write].input if is_control(i)}
    assert writes <= {node_of(i) for i in nodes[written].input if is_control(i)}


def test_a_step_that_writes_no_parts_sends_no_signals():
    model = perceptron()
    strategy = on_mesh(model.captured.step, {"model": 2}, {})
    step = rewrite(model.captured.step, Context(strategy, 0))
    assert not step.graph_index.of_op("FIFOQueueV2")
