import pytest

from autodist.compressors import Float16
from autodist.errors import StrategyError
from autodist.proto import strategy_pb2
from autodist.strategies import AllReduce, Parallax, PSLoadBalancing, check_strategy


def test_without_sparse_gradients_it_is_all_reduce(step, cluster):
    planned = step({"a": (3,), "b": (4,)})
    assert Parallax().build(planned, cluster()).nodes == AllReduce().build(planned, cluster()).nodes


def test_without_dense_gradients_it_is_load_balancing(step, cluster):
    planned = step({"a": (3, 2), "b": (4, 2)}, sparse=["a", "b"])
    assert Parallax().build(planned, cluster()).nodes == PSLoadBalancing().build(planned, cluster()).nodes


def test_dense_by_all_reduce_and_sparse_by_parameter_server(language_model, cluster):
    machines = cluster()
    strategy = Parallax(chunk_size=1).build(language_model, machines)
    check_strategy(strategy, language_model, machines)
    assert [(node.variable, node.WhichOneof("synchronizer")) for node in strategy.nodes] == [
        ("embedding", "parameter_server"),
        ("dense/kernel", "all_reduce"),
        ("dense/bias", "all_reduce"),
    ]
    assert [node.all_reduce.group for node in strategy.nodes[1:]] == [0, 1]


def test_the_compressor_is_for_dense_variables_and_staleness_for_sparse_ones(language_model, cluster):
    machines = cluster()
    builder = Parallax(compressor=Float16(), staleness=2, local_proxy_variable=True)
    strategy = builder.build(language_model, machines)
    check_strategy(strategy, language_model, machines)
    embedding, *dense = strategy.nodes
    assert (embedding.parameter_server.staleness, embedding.parameter_server.local_proxy) == (2, True)
    assert {node.all_reduce.compressor.kind for node in dense} == {strategy_pb2.Compressor.FLOAT16}


def test_only_sparse_variables_count_as_load(step, cluster):
    shapes = {"dense": (1000, 1000), "table0": (50, 8), "table1": (50, 8)}
    strategy = Parallax().build(step(shapes, sparse=["table0", "table1"]), cluster(workers=2))
    assert [node.parameter_server.owner for node in strategy.nodes[1:]] == [0, 1]


def test_ring_beside_its_parameter_servers_is_refused_by_the_check(language_model, cluster):
    machines = cluster()
    strategy = Parallax(all_reduce_spec="RING").build(language_model, machines)
    with pytest.raises(StrategyError, match="dense/kernel is reduced by RING and embedding by PS"):
        check_strategy(strategy, language_model, machines)
