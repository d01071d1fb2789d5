"""bench.py --only paper: what is counted is what the rewritten graphs send, and times are the assumed ones."""

from __future__ import annotations

import pytest
from bench.count_messages import counts_of
from bench.on_paper import Assumed, Counts

from tests.unit.kernels.in_one_process import capture_one_weight


def test_one_weight_between_two_workers_is_one_message_each_way() -> None:
    counts = counts_of(capture_one_weight().item, "AllReduce", 2, 0)
    assert (counts.bytes, counts.peers, counts.held) == (16, 1, 16)
    assert counts.messages == counts_of(capture_one_weight().item, "AllReduce", 3, 0).messages / 2


def test_an_owner_sends_the_value_to_each_worker() -> None:
    counts = counts_of(capture_one_weight().item, "PS", 4, 0)
    assert (counts.bytes, counts.peers) == (3 * 16, 3)


def test_times_add_up() -> None:
    assumed = Assumed(gigabits=8, message=1.0, threads=2, peer=10.0, latency=100.0)
    assert assumed.seconds(Counts(bytes=10**9, messages=4, peers=1, held=0)) == pytest.approx(1 + 2 + 10 + 200)
    assert assumed.seconds(Counts(bytes=0, messages=0, peers=0, held=0)) == 0
