import pytest
from hypothesis import given
from hypothesis import strategies as st

from autodist.strategies import (
    SyncedVariable,
    Traffic,
    all_reduce_node,
    dense_bytes_sent,
    parameter_server_node,
    traffic,
)

DENSE = SyncedVariable("dense", (60,), 240, False)
SPARSE = SyncedVariable("table", (1000, 8), 32_000, True)


@pytest.mark.parametrize("variable", [DENSE, SPARSE])
@pytest.mark.parametrize("node", [all_reduce_node("dense"), parameter_server_node("dense", 0)])
def test_one_worker_sends_nothing(variable, node):
    assert traffic(variable, node, 1) == Traffic(0, 0, variable.is_sparse)


@given(workers=st.integers(2, 12), piece=st.integers(0, 1000))
def test_dense_all_reduce_is_what_a_shuffle_sends(workers, piece):
    """Each worker brings a piece to each other worker, and its own summed piece back to each."""
    sent = [0] * workers
    for source in range(workers):
        for owner in range(workers):
            if source != owner:
                sent[source] += piece
                sent[owner] += piece
    variable = SyncedVariable("v", (piece * workers,), piece * workers, False)
    cost = traffic(variable, all_reduce_node("v"), workers)
    assert {cost.by_owner, cost.by_worker} == set(sent)


@given(workers=st.integers(2, 12), size=st.integers(0, 1000), owner=st.integers(0, 11))
def test_a_dense_parameter_server_takes_a_gradient_from_each_and_gives_each_the_value(workers, size, owner):
    owner %= workers
    sent = [0] * workers
    for worker in range(workers):
        if worker != owner:
            sent[worker] += size
            sent[owner] += size
    variable = SyncedVariable("v", (size,), size, False)
    assert dense_bytes_sent([variable], [parameter_server_node("v", owner)], workers) == tuple(sent)


def test_sparse_costs_are_for_one_row():
    # A row of 8 float32 is 32 bytes, its index 8.
    assert traffic(SPARSE, all_reduce_node("table"), 4) == Traffic(3 * 40, 3 * 40, per_row=True)
    assert traffic(SPARSE, parameter_server_node("table", 0), 4) == Traffic(3 * 32, 48, per_row=True)


def test_bytes_of_all_dense_variables_add_up_and_sparse_ones_are_left_out():
    other = SyncedVariable("other", (10,), 40, False)
    nodes = [all_reduce_node("dense"), parameter_server_node("other", 1), parameter_server_node("table", 0)]
    assert dense_bytes_sent([DENSE, other, SPARSE], nodes, 3) == (320 + 40, 320 + 80, 320 + 40)
