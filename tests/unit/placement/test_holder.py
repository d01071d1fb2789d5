"""Holder: the slices of a value, the groups that hold them, and the partitioning that follows from the slices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autodist.placement.group import Group
from autodist.placement.holder import Copy, Holder
from autodist.placement.partitioning import Partitioning
from tests.unit.placement.holders import held_by


def test_a_whole_value_is_one_slice_and_has_no_partitioning():
    holder = held_by((4, 6), [1])
    (one,) = holder.slices
    assert (one.name, one.begin, one.shape, one.owner) == ("", (0, 0), (4, 6), 1)
    assert holder.partitioning is None and not holder.is_everywhere


def test_every_worker_holds_a_value_of_all_workers_and_nobody_owns_it():
    holder = held_by((4, 6))
    assert holder.is_everywhere and holder.slices[0].owner is None
    assert not holder.with_copies("v", {"v": [Copy("/proxy")]}).is_everywhere


@given(st.integers(0, 2), st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_the_partitioning_and_the_shape_follow_from_the_slices(axis: int, sizes: list[int]):
    shape = tuple(sum(sizes) if a == axis else 7 for a in range(3))
    holder = held_by(shape, range(len(sizes)), Partitioning(axis, tuple(sizes)))
    assert holder.partitioning == Partitioning(axis, tuple(sizes))
    assert holder.shape == shape
    assert [one.owner for one in holder.slices] == list(range(len(sizes)))
    assert [one.begin[axis] for one in holder.slices] == list(holder.partitioning.starts)


def test_copies_and_groups_are_set_by_the_full_name_of_a_slice():
    holder = held_by((4, 6), [0, 1], Partitioning(0, (1, 3)))
    copied = holder.with_copies("v", {"v/shard_1": [Copy("/proxy")]})
    assert [one.copies for one in copied.slices] == [(), (Copy("/proxy"),)]
    assert copied.without_copies() == holder
    assert holder.with_copies_of(copied) == copied
    assert held_by((4, 6)).with_copies_of(copied) == held_by((4, 6))
    moved = holder.with_groups("v", {"v/shard_0": Group.all_workers(2)})
    assert [one.owner for one in moved.slices] == [None, 1]


@pytest.mark.parametrize("workers", [1, 3])
def test_holders_of_equal_slices_are_equal_and_can_be_keys(workers: int):
    holders = [held_by((4,), workers=workers), Holder.whole((4,), Group.all_workers(workers))]
    assert len(set(holders)) == 1
    assert holders[0] != held_by((4,), [0])


def test_a_worker_reads_alone_what_every_worker_holds_or_it_owns_wholly():
    assert held_by((4,), workers=2).is_held_by(1)
    assert held_by((4,), [1], workers=2).is_held_by(1)
    assert not held_by((4,), [1], workers=2).is_held_by(0)
    assert not held_by((4,), (0, 1), Partitioning(0, (2, 2)), workers=2).is_held_by(1)


def test_parts_of_a_mesh_in_row_major_order():
    groups = [Group.of_workers([k]) for k in range(4)]
    holder = Holder.divided((4, 6), (2, 2), groups)
    assert [one.begin for one in holder.slices] == [(0, 0), (0, 3), (2, 0), (2, 3)]
    assert {one.shape for one in holder.slices} == {(2, 3)}
    assert holder.shape == (4, 6)
    assert holder.partitioning is None
    assert Holder.divided((4, 6), (1, 2), groups[:2]).partitioning == Partitioning(1, (3, 3))
