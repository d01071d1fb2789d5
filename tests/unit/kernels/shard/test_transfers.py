"""Transfers between shardings, drawn, against the whole tensor."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autodist.kernels.shard.reshards import Reshard, ReshardKind
from autodist.kernels.shard.transfers import State, after, transfers
from autodist.sharding import Mesh, Sharding
from tests.unit.kernels.parts_of_values import joined, part_of

MESH = Mesh.of({"a": 2, "b": 3, "c": 2})
RANK = 3


@st.composite
def axes_of_tensors(draw, without=()):
    names = draw(st.permutations([name for name in MESH.names if name not in without]))
    ends = sorted(draw(st.lists(st.integers(0, len(names)), min_size=RANK, max_size=RANK)))
    starts = [0, *ends[:-1]]
    return tuple(tuple(names[start:end]) for start, end in zip(starts, ends, strict=True))


def sharding_of(axes):
    return Sharding.parse("[" + ", ".join("·".join(names) or "–" for names in axes) + "]")


def moved(parts, reshard: Reshard):
    """The parts of all places after a transfer, computed from the members of each row."""
    made = []
    for place in range(MESH.size):
        row = MESH.row(place, reshard.axes)
        members, own = [parts[member] for member in row], row.index(place)
        match reshard.kind:
            case ReshardKind.SLICE:
                made.append(np.split(parts[place], len(row), reshard.dimension)[own])
            case ReshardKind.ALL_GATHER:
                made.append(np.concatenate(members, reshard.dimension))
            case ReshardKind.ALL_REDUCE:
                made.append(sum(members))
            case ReshardKind.REDUCE_SCATTER:
                made.append(np.split(sum(members), len(row), reshard.dimension)[own])
            case ReshardKind.ALL_TO_ALL:
                pieces = [np.split(member, len(row), reshard.split)[own] for member in members]
                made.append(np.concatenate(pieces, reshard.dimension))
    return made


@given(st.data())
def test_parts_after_transfers(data):
    partial = tuple(data.draw(st.sets(st.sampled_from(MESH.names), max_size=2)))
    old, new = data.draw(axes_of_tensors(without=partial)), data.draw(axes_of_tensors())
    whole = np.arange(12**RANK, dtype=np.int64).reshape([12] * RANK)
    shares = np.random.default_rng(0).integers(-9, 9, (MESH.count(partial), *whole.shape))
    shares[0] = whole - shares[1:].sum(0)
    parts = [part_of(shares[MESH.index(place, partial)], sharding_of(old), MESH, place) for place in range(MESH.size)]
    state = State(old, partial)
    for reshard in transfers(state, new):
        parts = moved(parts, reshard)
        state = after(state, reshard)
    assert state == State(new)
    np.testing.assert_array_equal(joined(dict(enumerate(parts)), sharding_of(new), MESH), whole)
    for place, part in enumerate(parts):
        np.testing.assert_array_equal(part, part_of(whole, sharding_of(new), MESH, place))


def kinds(old, new, partial=()):
    return [reshard.kind.value for reshard in transfers(State(old, partial), new)]


def test_the_cheapest_transfer_is_taken():
    whole, rows, columns = ((), ()), (("a",), ()), ((), ("a",))
    assert kinds(whole, rows) == ["slice"]
    assert kinds(rows, whole) == ["all_gather"]
    assert kinds(rows, columns) == ["all_to_all"]
    assert kinds(whole, rows, ("a",)) == ["reduce_scatter"]
    assert kinds(whole, whole, ("a",)) == ["all_reduce"]
    assert kinds(rows, (("a", "b"), ()), ("b",)) == ["reduce_scatter"]
    assert all(not transfers(State(axes), axes) for axes in itertools.permutations([("a",), ("b", "c"), ()]))
