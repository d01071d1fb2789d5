import pytest
from hypothesis import given
from hypothesis import strategies as st

from autodist.compressors import BFloat16, Float16, PowerSGD, TopK, Uncompressed
from autodist.proto import strategy_pb2
from autodist.strategies import (
    Partitioning,
    ServerOptions,
    SyncedVariable,
    Traffic,
    all_reduce_node,
    all_reduce_synchronizer,
    bytes_sent,
    parameter_server_node,
    partitioned_node,
    traffic,
    worker_count,
)

DENSE = SyncedVariable("dense", (60,), 240, False)
MATRIX = SyncedVariable("kernel", (3, 3, 8, 16), 4 * 9 * 8 * 16, False)
SPARSE = SyncedVariable("table", (1000, 8), 32_000, True)
WITH_PROXY = ServerOptions(local_proxy_variable=True)


def machines(computing, servers=0):
    """Returns `computing` workers of two replicas, and `servers` workers without."""
    replicas = [strategy_pb2.Replica(worker=index // 2, device=f"cpu:{index % 2}") for index in range(2 * computing)]
    return strategy_pb2.GraphConfig(replicas=replicas, workers=computing + servers if servers else 0)


def served(*owners, options=None):
    return [(options or ServerOptions()).parameter_server(owner) for owner in owners]


@pytest.mark.parametrize("variable", [DENSE, SPARSE])
@pytest.mark.parametrize(
    "node", [all_reduce_node("dense"), parameter_server_node("dense", 0), parameter_server_node("dense", 0, WITH_PROXY)]
)
def test_one_worker_sends_nothing(variable, node):
    assert traffic(variable, node, machines(1)) == Traffic((0,), (0,))


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
    assert traffic(variable, all_reduce_node("v"), machines(workers)) == Traffic(tuple(sent), (0,) * workers)


@given(workers=st.integers(2, 12), size=st.integers(0, 1000), owner=st.integers(0, 11))
def test_a_dense_parameter_server_takes_a_gradient_from_each_and_gives_each_the_value(workers, size, owner):
    owner %= workers
    sent = [0] * workers
    for worker in range(workers):
        if worker != owner:
            sent[worker] += size
            sent[owner] += size
    variable = SyncedVariable("v", (size,), size, False)
    assert bytes_sent([variable], [parameter_server_node("v", owner)], machines(workers)) == tuple(sent)


@given(workers=st.integers(2, 6), owner=st.integers(0, 5))
def test_a_proxy_of_a_dense_variable_costs_nothing_more(workers, owner):
    owner %= workers
    plain, proxy = (parameter_server_node("dense", owner, options) for options in (ServerOptions(), WITH_PROXY))
    assert traffic(DENSE, plain, machines(workers)) == traffic(DENSE, proxy, machines(workers))


def test_sparse_costs_are_for_one_row():
    # A row of 8 float32 is 32 bytes, its index 8.
    config = machines(4)
    assert traffic(SPARSE, all_reduce_node("table"), config) == Traffic((0,) * 4, (3 * 40,) * 4)
    assert traffic(SPARSE, parameter_server_node("table", 1), config) == Traffic((0,) * 4, (48, 3 * 32, 48, 48))


def test_a_proxy_of_a_sparse_variable_fetches_all_of_it_every_step():
    cost = traffic(SPARSE, parameter_server_node("table", 0, WITH_PROXY), machines(3))
    assert cost == Traffic((64_000, 0, 0), (0, 40, 40))


def test_an_owner_without_replicas_serves_every_other_worker():
    config = machines(2, servers=1)
    assert worker_count(config) == 3
    assert traffic(DENSE, parameter_server_node("dense", 2), config).step == (240, 240, 480)
    assert traffic(DENSE, all_reduce_node("dense"), config).step == (240, 240, 0)
    assert traffic(SPARSE, parameter_server_node("table", 2), config).row == (48, 48, 64)


def test_shards_at_all_workers_cost_what_all_reduce_costs():
    cut = partitioned_node("dense", Partitioning(0, (20, 20, 20)), served(0, 1, 2))
    assert traffic(DENSE, cut, machines(3)) == traffic(DENSE, all_reduce_node("dense"), machines(3))


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6), workers=st.integers(1, 5), data=st.data())
def test_shards_cost_what_they_would_as_variables(sizes, workers, data):
    whole = SyncedVariable("v", (sum(sizes), 3), 12 * sum(sizes), False)
    owners = [data.draw(st.integers(0, workers - 1)) for _ in sizes]
    node = partitioned_node("v", Partitioning(0, tuple(sizes)), served(*owners))
    alone = [SyncedVariable(str(index), (size, 3), 12 * size, False) for index, size in enumerate(sizes)]
    nodes = [parameter_server_node(str(index), owner) for index, owner in enumerate(owners)]
    config = machines(workers)
    assert traffic(whole, node, config).step == bytes_sent(alone, nodes, config)


def test_a_row_lies_in_one_shard_of_rows_and_in_every_shard_of_columns():
    config = machines(2)
    rows = partitioned_node("table", Partitioning(0, (750, 250)), served(0, 1))
    assert traffic(SPARSE, rows, config).row == (36, 44)  # three rows in four are the first worker's: 32, else 48
    columns = partitioned_node("table", Partitioning(1, (6, 2)), served(0, 1))
    assert traffic(SPARSE, columns, config).row == (24 + (8 + 16), (24 + 16) + 8)


@pytest.mark.parametrize(
    ("variable", "compressor", "sent"),
    [
        (DENSE, Uncompressed(), 240),
        (DENSE, Float16(), 120),
        (DENSE, BFloat16(error_feedback=True), 120),
        # 3·3·8 × 16 elements of 4 bytes, in two matrices of two columns.
        (MATRIX, PowerSGD(rank=2), 4 * 2 * (72 + 16)),
        # Tensors that would not be smaller are sent uncompressed, and so are those that are not matrices.
        (MATRIX, PowerSGD(rank=99), 4 * 72 * 16),
        (DENSE, PowerSGD(), 240),
        (SyncedVariable("half", (60,), 120, False, "float16"), BFloat16(), 120),
        (SyncedVariable("half", (72, 16), 2 * 72 * 16, False, "float16"), PowerSGD(rank=2), 4 * 2 * 88),
        # 6 elements of 60, each with its index, to the one other worker.
        (DENSE, TopK(fraction=0.1), 6 * 8),
        (DENSE, TopK(fraction=0.0001), 8),
        (DENSE, TopK(fraction=0.5), 240),
    ],
)
def test_a_compressor_counts_with_its_bytes_on_the_wire(variable, compressor, sent):
    # Between two workers, all-reduce sends as many bytes as there are.
    node = all_reduce_node(variable.name, compressor=compressor)
    assert traffic(variable, node, machines(2)).step == (sent, sent)


def test_top_k_is_gathered_by_all_others():
    node = all_reduce_node("dense", compressor=TopK(fraction=0.1))
    assert traffic(DENSE, node, machines(5)).step == (4 * 48,) * 5


def test_a_shards_compressor_sees_the_shard():
    synchronizers = [all_reduce_synchronizer(compressor=Float16()), all_reduce_synchronizer()]
    node = partitioned_node("dense", Partitioning(0, (40, 20)), synchronizers)
    assert traffic(DENSE, node, machines(2)).step == (80 + 80,) * 2


def test_bytes_of_all_variables_add_up_and_touched_rows_are_left_out():
    other = SyncedVariable("other", (10,), 40, False)
    nodes = [all_reduce_node("dense"), parameter_server_node("other", 1), parameter_server_node("table", 0)]
    assert bytes_sent([DENSE, other, SPARSE], nodes, machines(3)) == (320 + 40, 320 + 80, 320 + 40)
