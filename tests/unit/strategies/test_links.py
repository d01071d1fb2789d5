"""The bytes on each link, against those that each worker sends."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autodist.placement.group import Group
from autodist.placement.partitioning import Partitioning, even_sizes
from autodist.proto import strategy_pb2
from autodist.strategies import SyncedVariable, link_bytes, sums_by_worker, traffic
from autodist.strategies.nodes import partitioned_node, pieces, whole_node

AllReduce, ParameterServer = strategy_pb2.AllReduce, strategy_pb2.ParameterServer
CONFIG = strategy_pb2.GraphConfig(replicas=[strategy_pb2.Replica(worker=w) for w in (0, 1, 2)], workers=4)
DENSE = SyncedVariable("dense", (12, 4), 192, False)
SPARSE = SyncedVariable("sparse", (12, 4), 192, True)

NODES = {
    "shuffle": lambda v: whole_node(v.name, AllReduce(spec=AllReduce.SHUFFLE)),
    "ring": lambda v: whole_node(v.name, AllReduce(spec=AllReduce.RING)),
    "server": lambda v: whole_node(v.name, ParameterServer(owner=1)),
    "server without replicas": lambda v: whole_node(v.name, ParameterServer(owner=3)),
    "proxies": lambda v: whole_node(v.name, ParameterServer(owner=1, local_proxy=True)),
    "shards": lambda v: partitioned_node(v.name, Partitioning(0, (4, 8)), [ParameterServer(owner=w) for w in (0, 3)]),
}


@pytest.mark.parametrize("name", NODES)
@pytest.mark.parametrize("variable, rows", [(DENSE, 0), (SPARSE, 6)], ids=["dense", "sparse"])
def test_a_worker_s_links_add_up_to_what_it_sends(name: str, variable: SyncedVariable, rows: int) -> None:
    node = NODES[name](variable)
    links = link_bytes(variable, node, CONFIG, rows)
    cost = traffic(variable, node, CONFIG)
    expected = tuple(step + row * rows for step, row in zip(cost.step, cost.row, strict=True))
    assert sums_by_worker(links, 4)[0] == expected
    assert all(source != target and count > 0 for (source, target), count in links.items())


def test_a_ring_sends_to_the_next_worker_alone() -> None:
    assert link_bytes(DENSE, NODES["ring"](DENSE), CONFIG) == {(0, 1): 256, (1, 2): 256, (2, 0): 256}


def test_a_shuffle_sends_to_all_others_alike() -> None:
    links = link_bytes(DENSE, NODES["shuffle"](DENSE), CONFIG)
    assert links == {(a, b): 128 for a in range(3) for b in range(3) if a != b}


def test_a_server_hears_from_all_and_tells_all() -> None:
    links = link_bytes(DENSE, NODES["server"](DENSE), CONFIG)
    assert links == {(0, 1): 192, (2, 1): 192, (1, 0): 192, (1, 2): 192}


@given(
    length=st.integers(1, 40),
    row=st.integers(1, 9),
    is_sparse=st.booleans(),
    rows=st.integers(0, 50),
    owners=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    kind=st.sampled_from(("server", "proxies", "shuffle", "ring", "halves")),
    axis=st.integers(0, 1),
)
def test_links_are_those_of_each_piece_by_itself(length, row, is_sparse, rows, owners, kind, axis):
    """Pieces that are alike are counted once, in whole parts of a byte; that is the same as fractions of each."""
    variable = SyncedVariable("v", (length, row), 4 * length * row, is_sparse)
    config = strategy_pb2.GraphConfig(replicas=[strategy_pb2.Replica(worker=w) for w in (0, 1, 2, 4, 5)], workers=7)
    said = {
        "server": lambda owner: ParameterServer(owner=owner),
        "proxies": lambda owner: ParameterServer(owner=owner, local_proxy=True),
        "shuffle": lambda owner: AllReduce(spec=AllReduce.SHUFFLE, group=owner),
        "ring": lambda owner: AllReduce(spec=AllReduce.RING),
        "halves": lambda owner: ParameterServer(owner=owner) if owner % 2 else AllReduce(spec=AllReduce.SHUFFLE),
    }[kind]
    sizes = even_sizes(variable.shape[axis], len(owners))
    node = partitioned_node("v", Partitioning(axis, sizes), [said(owner) for owner in owners[: len(sizes)]])
    group, expected = Group.of_run(config), {}
    assert group.workers == (0, 1, 2, 4, 5)
    for piece, synchronizer in pieces(variable, node):
        share = Fraction(piece.shape[0], length) if axis == 0 else Fraction(1)
        cost = traffic(piece, whole_node(piece.name, synchronizer), config)
        for worker in range(7):
            targets = synchronizer.targets(worker, group)
            for target in targets:
                sent = Fraction(cost.step[worker] + cost.row[worker] * share * rows) / len(targets)
                expected[worker, target] = expected.get((worker, target), 0) + sent
    assert link_bytes(variable, node, config, rows) == {link: round(n) for link, n in expected.items() if n}


def test_one_worker_sends_nothing() -> None:
    alone = strategy_pb2.GraphConfig(replicas=[strategy_pb2.Replica(worker=0)])
    for name in ("shuffle", "ring"):
        assert link_bytes(DENSE, NODES[name](DENSE), alone) == {}
