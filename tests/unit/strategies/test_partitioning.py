from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autodist.placement.partitioning import Partitioning
from autodist.strategies import SyncedVariable, even_sizes, proportional_sizes, shards_of
from autodist.strategies.partitioning import partitionable_axes

WEIGHTS = st.lists(st.sampled_from([Fraction(1), Fraction(5, 2), Fraction(10), Fraction(100)]), min_size=1, max_size=8)


@given(length=st.integers(1, 200), shards=st.integers(1, 30))
def test_even_sizes_add_up_and_differ_by_one_at_most(length, shards):
    sizes = even_sizes(length, shards)
    assert sum(sizes) == length
    assert len(sizes) == min(length, shards)
    assert 1 <= max(sizes) <= min(sizes) + 1


@given(weights=WEIGHTS, more=st.integers(0, 300))
def test_proportional_sizes_add_up_and_none_is_empty(weights, more):
    length = len(weights) + more
    sizes = proportional_sizes(length, weights)
    assert sum(sizes) == length
    assert len(sizes) == len(weights)
    assert min(sizes) >= 1


@given(weights=WEIGHTS, more=st.integers(0, 300))
def test_proportional_sizes_are_off_by_less_than_one_where_no_share_is_below_one(weights, more):
    length = len(weights) + more
    shares = [length * weight / sum(weights) for weight in weights]
    if min(shares) >= 1:
        sizes = proportional_sizes(length, weights)
        assert all(abs(size - share) < 1 for size, share in zip(sizes, shares, strict=True))


@given(length=st.integers(1, 100), count=st.integers(1, 12))
def test_equal_weights_cut_evenly(length, count):
    count = min(length, count)
    assert proportional_sizes(length, [Fraction(7)] * count) == even_sizes(length, count)


@pytest.mark.parametrize("weights", [[], [Fraction(1)] * 4])
def test_more_weights_than_indices_are_refused(weights):
    with pytest.raises(ValueError, match="3 indices cannot make"):
        proportional_sizes(3, weights)


def test_shards_share_the_bytes_and_keep_the_rest():
    table = SyncedVariable("table", (7, 5), 7 * 5 * 4, True)
    first, second = shards_of(table, Partitioning(1, (2, 3)))
    assert first == SyncedVariable("table/shard_0", (7, 2), 56, True)
    assert second == SyncedVariable("table/shard_1", (7, 3), 84, True)
    assert shards_of(table, None) == (table,)


@pytest.mark.parametrize(
    ("shape", "axes"), [((), ()), ((1,), ()), ((2,), (0,)), ((1, 3, 2), (1, 2)), ((0, 3), ()), ((3, 0), ())]
)
def test_axes_of_two_indices_can_be_cut(shape, axes):
    byte_size = 4 * SyncedVariable("v", shape, 0, False).elements
    assert partitionable_axes(SyncedVariable("v", shape, byte_size, False)) == axes
