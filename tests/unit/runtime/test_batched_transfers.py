"""Batched transfers: every holder gets each byte once, in few messages, and no link carries shared bytes more than
twice.
"""

from __future__ import annotations

import collections

import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

from autodist.placement.partitioning import Partitioning
from autodist.runtime import batched_transfers
from autodist.runtime.batched_transfers import Listing
from autodist.runtime.variables import StoredVariable
from tests.unit.placement.holders import held_by

MANY = [StoredVariable(f"v{k}", tf.float32, (1 << 20,), held_by((1 << 20,))) for k in range(100)]
"""400 MiB."""


def link_bytes(listing: Listing) -> collections.Counter[tuple[int, int]]:
    """Returns the number of bytes from worker to worker."""
    found: collections.Counter[tuple[int, int]] = collections.Counter()
    for transfer in listing.transfers:
        sizes = [listing.parts[s.part].byte_size if s.stop < 0 else s.stop - s.start for s in transfer.slices]
        if transfer.to is not None:
            found[0, transfer.to] += sum(sizes)
            continue
        for worker in listing.present:
            found.update({(worker, other): sum(sizes) for other in listing.after(worker)})
    return found


@given(st.integers(1, 80))
def test_all_get_from_one_worker_each_and_none_hands_on_to_more_than_two(workers: int):
    listing = Listing.of(MANY, range(workers))
    after = [listing.after(worker) for worker in range(workers)]
    assert sorted(w for some in after for w in some) == list(range(1, workers))
    assert max(map(len, after)) <= 2
    seen = {0}
    for worker in range(workers):
        assert worker in seen  # no worker forwards a value before it has received it
        seen.update(after[worker])


@pytest.mark.parametrize("workers", [2, 3, 16, 64])
def test_a_link_out_of_a_worker_carries_two_models_however_many_workers_there_are(workers: int):
    sent: collections.Counter[int] = collections.Counter()
    for (worker, _), size in link_bytes(Listing.of(MANY, range(workers))).items():
        sent[worker] += size
    assert max(sent.values()) == min(2, workers - 1) * 100 * (4 << 20)


def test_small_values_go_in_one_message():
    small = [StoredVariable(f"v{k}", tf.float32, (8,), held_by((8,), workers=64)) for k in range(752)]
    assert [transfer.to for transfer in Listing.of(small, range(64)).transfers] == [None]


def test_values_of_one_worker_go_to_it_and_those_of_the_chief_to_none():
    cut = held_by((4, 256), range(4), Partitioning(0, (1,) * 4))
    listing = Listing.of([StoredVariable(f"v{k}", tf.float32, (4, 256), cut) for k in range(5)], range(4))
    assert link_bytes(listing) == {(0, worker): 5 * 1024 for worker in (1, 2, 3)}
    assert len(listing.transfers) == 3


def test_values_of_several_holders_go_to_each_of_them():
    held = [
        StoredVariable(f"v{k}", tf.float32, (256,), held_by((256,), [(owner, owner + 1)]))
        for k, owner in ((0, 0), (1, 2))
    ]
    listing = Listing.of(held, range(4))
    assert link_bytes(listing) == {(0, worker): 1024 for worker in (1, 2, 3)}
    assert [
        [held.suffix for held in part.held_by(worker)] for part, worker in zip(listing.parts, range(4), strict=True)
    ] == [
        ["v0"],
        ["v0"],
        ["v1"],
        ["v1"],
    ]


def test_absent_workers_neither_receive_nor_forward_values():
    owned = [
        StoredVariable("a", tf.float32, (4,), held_by((4,), [2])),
        StoredVariable("b", tf.float32, (4,), held_by((4,), workers=5)),
    ]
    listing = Listing.of(owned, [0, 1, 3, 4])
    assert [transfer.to for transfer in listing.transfers] == [None]
    assert {worker for link in link_bytes(listing) for worker in link} == {0, 1, 3, 4}


def test_many_owners_get_smaller_messages_and_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batched_transfers, "TRANSFER_BYTES", 1024)
    cut = held_by((64, 16), range(64), Partitioning(0, (1,) * 64))
    listing = Listing.of([StoredVariable(f"v{k}", tf.float32, (64, 16), cut) for k in range(50)], range(64))
    waiting, sent = 0, iter(listing.transfers)
    assert all(sum(listing.parts[s.part].byte_size for s in p.slices) <= 1024 for p in listing.transfers)
    seen: set[int] = set()
    for transfer in sent:
        seen |= {s.part for s in transfer.slices}
        waiting = max(waiting, 64 * (max(seen) + 1 - len(seen)))
    assert waiting <= 4 * 1024 + 50 * 64  # those of the chief itself are never sent


@given(st.integers(1, 5000), st.integers(1, 300))
def test_a_large_value_goes_in_slices_that_are_the_whole(size: int, most: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched_transfers, "TRANSFER_BYTES", most)
        listing = Listing.of([StoredVariable("v", tf.float32, (size,), held_by((size,), workers=3))], range(3))
    slices = [s for transfer in listing.transfers for s in transfer.slices]
    if 4 * size <= most:
        assert [s.stop for s in slices] == [-1]
        return
    np.testing.assert_array_equal([s.start for s in slices], [0, *(s.stop for s in slices[:-1])])
    assert slices[-1].stop == 4 * size and all(0 < s.stop - s.start <= most for s in slices)


def test_sent_values_are_received_unchanged():
    cut = held_by((4, 5), [None, 1], Partitioning(1, (2, 3)), workers=5, copies=[["/proxy"]])
    listing = Listing.of([StoredVariable("v", tf.bfloat16, (4, 5), cut, on_cpu=True), *MANY[:20]], range(5))
    assert Listing.decode(listing.encode()) == listing
