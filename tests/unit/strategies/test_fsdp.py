from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autodist.errors import StrategyError
from autodist.strategies import FSDP, AllReduce, Override, OverrideVariables, UseAllReduce, bytes_sent, synced_variables
from autodist.strategies.gather_summary import bytes_of_layers_at_once, gather_summary
from autodist.strategies.nodes import pieces
from autodist.synchronizers import synchronizers_of


def build(planned, machines, **options):
    strategy = FSDP(**{"min_partition_bytes": 0, **options}).build(planned, machines)
    return strategy, {node.variable: node for node in strategy.nodes}


def test_every_worker_has_a_shard_of_every_variable_even_with_many_workers(step, cluster):
    _, nodes = build(step({"kernel": (70, 4), "bias": (10,)}), cluster(8))
    for name, sizes in (("kernel", [9] * 6 + [8] * 2), ("bias", [2, 2, 1, 1, 1, 1, 1, 1])):
        assert list(nodes[name].partition.sizes) == sizes
        assert [shard.parameter_server.owner for shard in nodes[name].shards] == list(range(8))


def test_no_worker_keeps_a_copy(step, cluster):
    strategy, nodes = build(step({"kernel": (8, 4), "scalar": ()}), cluster(2), prefetch=0)
    assert not any(one.has_cached_copy for node in nodes.values() for one in synchronizers_of(node))
    assert strategy.prefetch == 0


def test_variables_of_one_layer_have_one_number(step, cluster):
    shapes = {f"block_{k}/{part}": shape for k in range(12) for part, shape in (("up", (4, 8)), ("bias", (8,)))}
    _, nodes = build(step(shapes), cluster(2))
    numbers = {name: {one.gathered_with for one in synchronizers_of(node)} for name, node in nodes.items()}
    assert numbers == {name: {1 + k // 2} for k, name in enumerate(shapes)}


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8), workers=st.integers(2, 5))
def test_each_worker_keeps_its_share(step, cluster, lengths, workers):
    planned = step({f"v{index}": (length, 3) for index, length in enumerate(lengths)})
    _, nodes = build(planned, cluster(workers))
    kept, rounding = Counter(), 0
    for variable in synced_variables(planned):
        parts = [(piece.byte_size, part.owner) for piece, part in pieces(variable, nodes[variable.name])]
        kept.update({owner: size for size, owner in parts})
        rounding += max(size for size, _ in parts) - variable.byte_size // workers
    assert max(kept.values()) <= sum(kept.values()) / workers + rounding + workers


def test_a_step_sends_half_as_much_again_as_all_reduce(step, cluster):
    planned, machines = step({"kernel": (8, 4), "other": (12, 2)}), cluster(4)
    variables = synced_variables(planned)
    sharded, reduced = (
        bytes_sent(variables, strategy.nodes, strategy.graph_config)
        for strategy in (build(planned, machines)[0], AllReduce().build(planned, machines))
    )
    assert [2 * count for count in sharded] == [3 * count for count in reduced]


def test_the_summary_has_the_layers_and_the_bytes_of_the_collectives(step, cluster):
    planned = step({f"block_{k}/kernel": (25, 1000) for k in range(10)})
    assert gather_summary(build(planned, cluster(2), prefetch=0)[0], planned) == (
        "10 layers of up to 100 kB, none ahead: a step all-gathers 1.00 MB forward and 900 kB backward, and "
        "reduce-scatters 1.00 MB"
    )
    assert gather_summary(AllReduce().build(planned, cluster(2)), planned) == ""


@pytest.mark.parametrize(("layers", "prefetch", "at_once"), [(10, 0, 6), (10, 1, 8), (2, 1, 4)])
def test_a_step_needs_the_memory_of_a_few_layers_and_at_most_of_all_with_their_gradients(
    step, cluster, layers, prefetch, at_once
):
    planned = step({f"block_{k}/kernel": (25, 1000) for k in range(layers)})
    strategy = build(planned, cluster(2), prefetch=prefetch)[0]
    assert bytes_of_layers_at_once(strategy, planned) == at_once * 100_000
    assert bytes_of_layers_at_once(AllReduce().build(planned, cluster(2)), planned) == 0


def test_an_override_keeps_the_prefetch_of_the_others(step, cluster):
    builder = OverrideVariables(FSDP(prefetch=1, min_partition_bytes=0), (Override("a", UseAllReduce()),))
    strategy = builder.build(step({"a": (8, 4), "b": (8, 4)}), cluster(2))
    assert strategy.prefetch == 1
    found = {node.variable: {one.gathered_with > 0 for one in synchronizers_of(node)} for node in strategy.nodes}
    assert found == {"a": {False}, "b": {True}}


def test_more_than_one_layer_is_not_prefetched():
    with pytest.raises(StrategyError, match="prefetch"):
        FSDP(prefetch=2)
