"""The nodes common to a pipeline's micro-batches become a function that each of them calls."""

from __future__ import annotations

import pytest

from autodist.graph.walks import reach
from tests.unit.kernels.in_one_process import Session, capture, rewritten
from tests.unit.kernels.pairs import pairs
from tests.unit.kernels.pipelined import models

MICRO_BATCHES = 4


def strategy_of(captured, stages=2, micro_batches=MICRO_BATCHES, schedule="GPipe", recompute=False):
    lies = models.stage_of(captured, stages)
    return models.pipelined(captured.step, lies, stages, micro_batches, schedule, recompute=recompute)


def calls_of(step):
    return [node for node in step.graph_index.of_op("PartitionedCall") if node.name.startswith("autodist/unit/")]


def functions_of(step):
    return [node.attr["f"].func.name for node in calls_of(step)]


@pytest.fixture(scope="module")
def layers():
    """A step of four layers, captured, and a batch."""
    given = models.batches("mlp", (12,))[0]
    return capture(models.made("mlp", "sgd"), *given, is_global=True), given


@pytest.mark.parametrize(
    ("model", "recompute"), pairs(["skip", "tied", "dropout", "recurrent", "draws", "norms"], [False, True])
)
def test_no_bit_is_another_where_micro_batches_share_functions(model, recompute):
    given = models.batches(model, (7, 1))
    captured = capture(models.made(model, "sgd"), *given[0], is_global=True)
    strategy = strategy_of(captured, recompute=recompute)
    calling, copying = Session(captured, strategy), Session(captured, strategy, models.IN_COPIES)
    assert all(map(calls_of, calling.steps))
    assert not any(map(calls_of, copying.steps))
    found, expected = calling.train(given), copying.train(given)
    for mine, theirs in zip(found.variables, expected.variables, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(mine[name].tobytes() == theirs[name].tobytes() for name in mine)
    assert [[v.tobytes() for v in w] for s in found.outputs for w in s] == [
        [v.tobytes() for v in w] for s in expected.outputs for w in s
    ]


def test_a_stage_is_one_function_in_each_direction_however_many_micro_batches_there_are(layers):
    captured, _ = layers
    few, many = (rewritten(captured, strategy_of(captured, micro_batches=m)) for m in (MICRO_BATCHES, 12))
    for stage, (one, other) in enumerate(zip(few, many, strict=True)):
        assert len(set(functions_of(one))) == 2, stage
        assert set(functions_of(one)) == set(functions_of(other))
        assert len(functions_of(other)) == 2 * 12
        products = [n.op for f in other.graph_def.library.function for n in f.node_def].count("MatMul")
        assert products == (2 + 3 if stage == 0 else 2 + 4)  # the gradient of the batch is unused
        assert not list(other.graph_index.of_op("MatMul"))


def test_recomputed_nodes_wait_for_no_gradient(layers):
    """Of a stage that goes back with all after it went forward with all."""
    captured, _ = layers
    first, _ = rewritten(captured, strategy_of(captured, recompute=True))
    assert len(set(functions_of(first))) == 3
    gradients = {node.name for node in first.graph_index.of_op("QueueDequeueV2")}
    before = [reach([call.name], first.graph_index.sources.__getitem__) for call in calls_of(first)]
    assert sum(gradients.isdisjoint(needed) for needed in before) == MICRO_BATCHES + 1  # the first one, recomputed


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_few_micro_batches_have_copies(layers, micro_batches):
    captured, _ = layers
    assert not any(map(calls_of, rewritten(captured, strategy_of(captured, micro_batches=micro_batches))))


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_outputs_of_forward_calls_wait_for_as_many_backward_calls_as_scheduled(layers, schedule):
    """Counted in a trace: the number of micro-batches whose activations are still needed by a gradient."""
    stages, micro_batches = 2, 6
    captured, given = layers
    session = Session(captured, strategy_of(captured, stages, micro_batches, schedule))
    when = session.trace_once(given)
    for stage, step in enumerate(session.steps):
        calls = {node.name for node in calls_of(step)}
        spans = [
            (when[f"worker_{stage}/{name}"][1], when[f"worker_{stage}/{reader}"][0])
            for name in calls for reader in step.graph_index.consumers[name] if reader in calls
        ]  # fmt: skip
        assert len(spans) == micro_batches
        most = micro_batches if schedule == "GPipe" else stages - stage
        assert max(sum(a <= start < b for a, b in spans) for start, _ in spans) == most
