"""The order of writes of divided variables on all places."""

from __future__ import annotations

import pytest

from autodist.graph.names import is_control, node_of
from autodist.kernels import Context, rewrite
from tests.unit.kernels.in_one_process import on_mesh
from tests.unit.kernels.shard.mesh_models import perceptron


def readers(steps):
    """The workers that read parts of each worker between two steps."""
    found = {worker: set() for worker in range(len(steps))}
    for worker, step in enumerate(steps):
        for name in step.shardings:
            for one in step.holders[name].slices:
                if worker not in one.group:
                    found[one.owner].add(worker)
    return found


@pytest.mark.parametrize(
    "layouts",
    [
        {"w1": "[–, model]", "w2": "[model, –]"},
        {"w1": "[data, model]", "w2": "[model, data]"},
        {"w1": "[–, model]", "w2": "[data, –]"},
    ],
    ids=str,
)
def test_parts_are_written_when_all_readers_have_begun_and_readers_wait_for_the_writes(layouts):
    model = perceptron()
    strategy = on_mesh(model.captured.step, {"data": 2, "model": 2}, layouts)
    steps = [rewrite(model.captured.step, Context(strategy, worker)) for worker in range(4)]
    assert any(readers(steps).values())
    for owner, reading in readers(steps).items():
        for worker in reading:
            assert_in_order(steps[owner], owner, steps[worker], worker)


def assert_in_order(owner_step, owner, step, worker):
    """The writes of an owner follow the beginning of a reader's step, whose end follows the writes."""
    nodes = owner_step.graph_index.nodes
    handles = {
        v.handle for v in owner_step.variables if v.name.partition("/")[0].partition(":")[0] in owner_step.shardings
    }
    effects = owner_step.graph_index.effects
    writes = {name for name, effect in effects.items() if effect.writes & handles and name in nodes}
    begun = by_queue(owner_step, "QueueDequeueV2", f"/begun/{worker}/{owner}")
    (written,) = by_queue(owner_step, "QueueEnqueueV2", f"/written/{owner}/{worker}")
    assert writes and begun
    for write in writes:
        assert begun <= {node_of(i) for i in nodes[write].input if is_control(i)}, write
    assert writes <= {node_of(i) for i in nodes[written].input if is_control(i)}
    ended = by_queue(step, "QueueDequeueV2", f"/written/{owner}/{worker}")
    assert ended and ended <= set(step.targets)
    assert by_queue(step, "QueueEnqueueV2", f"/begun/{worker}/{owner}") <= set(step.targets)


def by_queue(step, op, name):
    """The nodes of an op that use a queue with a name."""
    queues = {n.name: n.attr["shared_name"].s.decode() for n in step.graph_index.of_op("FIFOQueueV2")}
    return {n.name for n in step.graph_index.of_op(op) if name in queues[node_of(n.input[0])]}


def test_a_step_that_writes_no_parts_sends_no_signals():
    model = perceptron()
    strategy = on_mesh(model.captured.step, {"model": 2}, {})
    step = rewrite(model.captured.step, Context(strategy, 0))
    assert not step.graph_index.of_op("FIFOQueueV2")
