"""bench.py --only paper: the counts equal those of the rewritten graphs, and times are the assumed ones."""

from __future__ import annotations

import pytest
from bench.count_messages import counts_of
from bench.on_paper import Assumed, Counts, Ring

from tests.unit.kernels.in_one_process import capture_one_weight


def test_one_weight_between_two_workers_is_one_message_each_way() -> None:
    counts = counts_of(capture_one_weight().step, "AllReduce", 2, 0)
    assert (counts.bytes, counts.peers, counts.held) == (16, 1, 16)
    assert counts.messages == counts_of(capture_one_weight().step, "AllReduce", 3, 0).messages / 2


def test_an_owner_sends_the_value_to_each_worker() -> None:
    counts = counts_of(capture_one_weight().step, "PS", 4, 0)
    assert (counts.bytes, counts.peers) == (3 * 16, 3)


def test_times_add_up() -> None:
    assumed = Assumed(gigabits=8, message=1.0, threads=2, peer=10.0, latency=100.0)
    assert assumed.seconds(Counts(bytes=10**9, messages=4, peers=1, held=0)) == pytest.approx(1 + 2 + 10 + 200)
    assert assumed.seconds(Counts(bytes=0, messages=0, peers=0, held=0)) == 0


def test_a_ring_sends_all_but_a_part_twice_and_a_ring_of_rings_as_much_in_fewer_messages() -> None:
    size = 96 << 20  # in two buffers
    one, rings = Ring(64, 1), Ring(64, 8)
    assert one.counts(size, 0).bytes == rings.counts(size, 0).bytes == 2 * 63 * (size // 64)
    assert (one.hops, rings.hops) == (2 * 63, 2 * 7 + 2 * 7)
    assert (one.counts(size, 5).messages, one.counts(size, 5).peers, one.counts(size, 5).held) == (2 * 2 * 126, 2, 5)
    assert rings.counts(size, 0).peers == 4
    assert (Ring(4, 8).hops, Ring(4, 8).counts(size, 0).peers, Ring(2, 1).counts(size, 0).peers) == (6, 2, 1)
    assumed = Assumed(gigabits=8 * 2 * 63 * (size // 64) / 1e9, latency=1.0)
    assert one.seconds(size, assumed) == pytest.approx(1 + 2 * 126)
