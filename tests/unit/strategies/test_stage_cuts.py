"""Partitions of a sequence into contiguous runs that minimise the largest work, and then the largest size."""

from __future__ import annotations

import itertools
import random
import time

from hypothesis import given
from hypothesis import strategies as st

from autodist.strategies.pipeline_stages import balanced_cuts

LAYERS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8)


def largest(of_layers, cuts):
    return max(sum(of_layers[start:end]) for start, end in itertools.pairwise(cuts))


@given(layers=LAYERS, count=st.integers(1, 5))
def test_no_other_cuts_have_less_work_or_as_little_and_a_smaller_size(layers, count):
    count, (work, sizes) = min(count, len(layers)), zip(*layers, strict=True)
    found = balanced_cuts(work, sizes, count)
    assert len(found) == count + 1
    assert all(start < end for start, end in itertools.pairwise(found))
    others = ([0, *inner, len(work)] for inner in itertools.combinations(range(1, len(work)), count - 1))
    best = min((largest(work, cuts), largest(sizes, cuts)) for cuts in others)
    assert (largest(work, found), largest(sizes, found)) == best


def test_work_counts_before_bytes():
    assert balanced_cuts([0, 1, 1, 4, 4, 4], [90, 1, 1, 1, 1, 1], 2) == [0, 4, 6]
    assert balanced_cuts([0, 0, 8, 0, 0], [5, 5, 5, 5, 9], 2) == [0, 3, 5]


def test_ten_thousand_layers_are_cut_into_a_thousand_stages_at_once():
    draw = random.Random(3)
    work, sizes = ([draw.randrange(10**12) for _ in range(10_000)] for _ in range(2))
    began = time.process_time()
    assert len(balanced_cuts(work, sizes, 1000)) == 1001
    assert time.process_time() - began < 5
