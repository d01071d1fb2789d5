"""The bytes that compressors send, counted from the rewritten graph, equal their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from autodist.compressors import BFloat16, Dense, Float8, Float16, Int8, PowerSGD, TopK
from autodist.compressors.power_sgd import assign_owners
from tests.unit.kernels.compressed_models import given_gradient
from tests.unit.kernels.in_one_process import capture, plan, rewritten
from tests.unit.kernels.wire import sent_bytes

BFLOAT16 = BFloat16()
FLOAT16_FED = Float16(error_feedback=True)
TOP_K = TopK(fraction=0.1)

N, M = 256, 192


def bytes_with(compressor, workers, dtype="float32"):
    """Returns the bytes that each worker sends for an N × M gradient in a step, besides weights."""
    variable = tf.Variable(np.zeros((N, M), dtype), name="v")
    captured = capture(given_gradient(variable), np.zeros((3, N, M), dtype))
    items = rewritten(captured, plan(captured.step, workers, compressor=compressor))
    return [{what: n for what, n in sent_bytes(step).items() if what != "weight"} for step in items]


def total(sent):
    return sum(sum(by_kind.values()) for by_kind in sent)


@pytest.mark.parametrize("workers", [2, 3])
def test_sixteen_bits_halve_what_travels(workers):
    hops = 2 * (workers - 1)
    assert total(bytes_with(BFLOAT16, workers)) == hops * N * M * 2
    assert total(bytes_with(FLOAT16_FED, workers)) == hops * (N * M * 2 + 4 * workers)  # a unit for each piece
    weights = hops // 2 * workers * 4
    assert total(bytes_with(None, workers)) == hops * N * M * 4 + weights
    assert total(bytes_with(BFLOAT16, workers, "float64")) == hops * N * M * 2


@pytest.mark.parametrize("compressor, workers", [(Int8(), 2), (Float8(), 3), (Int8(block=64), 2)])
def test_eight_bits_send_a_byte_for_each_element_and_a_scale_for_each_block(compressor, workers):
    sent = N * M + 4 * (N * M // compressor.block)
    assert compressor.bytes_of(Dense((N, M), 4)) == sent
    assert total(bytes_with(compressor, workers)) == 2 * (workers - 1) * sent


@pytest.mark.parametrize("workers, rank", [(2, 1), (3, 4)])
def test_power_sgd_sends_two_thin_matrices(workers, rank):
    sent = bytes_with(PowerSGD(rank=rank), workers)
    assert total(sent) == 2 * (workers - 1) * rank * (N + M) * 4


@pytest.mark.parametrize("workers", [2, 3])
def test_top_k_sends_values_and_places_to_all(workers):
    count = math.ceil(0.1 * N * M)
    for by_kind in bytes_with(TOP_K, workers):
        assert by_kind == {"largest": (workers - 1) * count * (4 + 4)}


def test_matrices_are_dealt_out_by_size():
    sizes = [5, 5, 1, 9, 1]
    owners = assign_owners(sizes, (0, 2), first=1)
    assert owners[3] == 2  # the largest first, to the first worker
    assert sorted(sum(s for s, o in zip(sizes, owners, strict=True) if o == w) for w in (0, 2)) == [10, 11]
    assert assign_owners([1, 1, 1], (0, 1, 2), first=7) == [1, 2, 0]
