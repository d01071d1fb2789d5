"""Compressors that reduce within subgroups first follow their formulas, with the same bits on all workers, in few
messages.
"""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
import tensorflow as tf

from autodist.compressors import BFloat16, Float16, PowerSGD
from autodist.kernels import Context, rewrite
from autodist.placement.group import Group
from autodist.proto import strategy_pb2
from autodist.synchronizers import Subgroups
from tests.unit.kernels.communicate.test_compressors import gradients
from tests.unit.kernels.communicate.test_reduce_by_shuffle import check_queues
from tests.unit.kernels.compressed_models import (
    expected,
    given_gradient,
    pieces,
    power_iteration,
    to_short,
)
from tests.unit.kernels.in_one_process import Session, capture, plan
from tests.unit.kernels.in_one_session import partners_of
from tests.unit.kernels.wire import sent_bytes

FED = Float16(error_feedback=True)
SIXTEEN_BITS = {"float16": Float16(), "float16 with feedback": FED, "bfloat16": BFloat16(error_feedback=True)}
RANK_2 = PowerSGD(rank=2)
TEAMS = {"4": [0, 0, 1, 1], "6": [0, 1, 2, 0, 1, 2], "uneven": [0, 0, 0, 1, 1]}
SIZES = (7, 11, 1, 2)
"""Examples a step: fewer than workers, too."""


def planned(step, compressor, subgroups, servers=0):
    strategy = plan(step, len(subgroups) - servers, compressor=compressor, servers=servers)
    strategy.graph_config.subgroups[:] = subgroups
    for node in strategy.nodes:
        node.all_reduce.spec = strategy_pb2.AllReduce.HIERARCHICAL
    return strategy


def trained(compressor, batches, subgroups, servers=0):
    """The variable of `given_gradient` after a step a batch, the same bits on all workers."""
    captured = capture(given_gradient(tf.Variable(np.zeros(batches[0].shape[1:]), name="v")), batches[0])
    session = Session(captured, planned(captured.step, compressor, subgroups, servers))
    check_queues(session.steps)
    found = session.train([(batch,) for batch in batches])
    assert len([values for values in found.variables if "v" in values]) == len(subgroups)
    return found.variable("v")


def rounding_in_subgroups(compressor, subgroups):
    """Sixteen bits: each hop rounds, and the rounding worker adds the error to its next part."""
    residuals = []

    def add_up(shares):
        residuals[:] = residuals or [np.zeros_like(share) for share in shares]
        owed = [s + r * compressor.error_feedback for s, r in zip(shares, residuals, strict=True)]
        found = Subgroups.of(subgroups, Group.of_workers(range(len(subgroups))))
        total = np.zeros_like(shares[0])
        count = len(found.groups)
        places = pieces(total, found.ranks * count)
        for rank in range(found.ranks):
            across, mine = found.across(rank), places[rank * count : (rank + 1) * count]
            piece = slice(mine[0].start, mine[-1].stop)
            ours = []
            for members in (group.workers for group in found.groups):
                sent = {w: to_short(owed[w][piece], compressor.short) for w in members if w != members[rank]}
                for worker, told in sent.items():
                    residuals[worker][piece] = owed[worker][piece] - told
                ours.append(sum([sent.get(w, owed[w][piece]) for w in members]))
            for owner, place in zip(across, mine, strict=True):
                at = slice(place.start - piece.start, place.stop - piece.start)
                came = [p[at] if w == owner else to_short(p[at], compressor.short) for w, p in zip(across, ours)]
                total[place] = to_short(sum(came), compressor.short)
                for worker, part, told in zip(across, ours, came, strict=True):
                    residuals[worker][place] = sum(came) - total[place] if worker == owner else part[at] - told
        return total

    return add_up


@pytest.mark.parametrize(
    ("name", "subgroups"),
    [("float16", "4"), ("float16 with feedback", "uneven"), ("bfloat16", "6")],
)
def test_sixteen_bits_round_on_each_hop(name, subgroups):
    batches = gradients((112,), SIZES)
    model = rounding_in_subgroups(SIXTEEN_BITS[name], TEAMS[subgroups])
    found = trained(SIXTEEN_BITS[name], batches, TEAMS[subgroups])
    np.testing.assert_allclose(
        found, expected(model, np.zeros(112), batches, len(TEAMS[subgroups])), rtol=0, atol=1e-12
    )


def test_pieces_may_be_empty():
    batches = gradients((12,), SIZES)
    model = rounding_in_subgroups(FED, TEAMS["4"])
    found = trained(FED, batches, TEAMS["4"])
    padded = [np.pad(batch, [(0, 0), (0, 4)]) for batch in batches]
    np.testing.assert_allclose(found, expected(model, np.zeros(16), padded, 4)[:12], rtol=0, atol=1e-12)


@pytest.mark.parametrize("subgroups", ["uneven", "6"])
def test_power_sgd_is_one_power_iteration_on_the_sum(subgroups, monkeypatch):
    batches, right = gradients((12, 7), SIZES), np.random.default_rng(3).normal(size=(7, 2))
    monkeypatch.setattr("autodist.compressors.power_sgd.first_right", lambda *_: tf.constant(right))
    found = trained(RANK_2, batches, TEAMS[subgroups])
    model = expected(power_iteration(right), np.zeros((12, 7)), batches, len(TEAMS[subgroups]))
    np.testing.assert_allclose(found, model, rtol=0, atol=1e-10)


@pytest.mark.parametrize("compressor", [FED, RANK_2], ids=["float16", "power_sgd"])
def test_workers_without_replicas_learn_the_same_sums(compressor):
    batches = gradients((16, 12), SIZES)
    beside = trained(compressor, batches, [0, 0, 1, 1, 0, 1], servers=2)
    np.testing.assert_array_equal(beside, trained(compressor, batches, TEAMS["4"]))


@pytest.mark.parametrize("compressor", [FED, RANK_2], ids=["float16", "power_sgd"])
def test_values_that_are_not_finite_reach_all_workers(compressor):
    batches = gradients((16, 12), (5,))
    batches[0][-1, 3, 3] = np.inf  # the last worker's alone
    assert not np.isfinite(trained(compressor, batches, [0, 0, 0, 1, 1])).all()


@pytest.mark.parametrize("compressor", [FED, RANK_2], ids=["float16", "power_sgd"])
@pytest.mark.parametrize("workers", [9, 16])
def test_calls_and_messages_grow_with_the_root_of_the_workers(compressor, workers):
    captured = capture(given_gradient(tf.Variable(np.zeros((64, 48)), name="v")), gradients((64, 48), (3,))[0])
    root = int(sqrt(workers))
    strategy = planned(captured.step, compressor, [worker // root for worker in range(workers)])
    step = rewrite(captured.step, Context(strategy, 1))
    called = partners_of(step)
    assert len(called) == 2 * (root - 1)
    puts = [node for node in step.graph_def.node if node.op == "QueueEnqueueV2"]
    assert len(puts) <= 2 * 4 * root + 2 * (root - 1)  # of each factor, or of the pieces; and the weight's


def test_sixteen_bits_send_in_subgroups_what_they_send_without():
    captured = capture(given_gradient(tf.Variable(np.zeros(1152), name="v")), gradients((1152,), (3,))[0])
    workers, root = 9, 3
    strategy = planned(captured.step, BFloat16(), [worker // root for worker in range(workers)])
    sent = [sent_bytes(rewrite(captured.step, Context(strategy, worker))) for worker in range(workers)]
    total = sum(size for by_kind in sent for what, size in by_kind.items() if "weight" not in what)
    assert total == 2 * (workers - 1) * 1152 * 2
