"""The default number of shards of variables."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from autodist.strategies import PartitionedPS, ShardedAllReduce, UnevenPartitionedPS, synced_variables
from autodist.strategies.nodes import pieces
from autodist.strategies.partitioning import FEW_WORKERS, PIECES, fair_shards

LAYERS = {f"layer_{k}": (256, 64 + 16 * (k % 5)) for k in range(40)}
MANY = 64


def test_few_workers_have_a_shard_of_each_variable(step):
    variables = synced_variables(step({"small": (9, 1), "large": (9, 100)}))
    assert fair_shards(variables, FEW_WORKERS) == dict.fromkeys(("small", "large"), FEW_WORKERS)


def test_many_workers_have_one_of_a_variable_that_is_nearly_all_there_is(step):
    found = fair_shards(synced_variables(step({"bias": (9,), "table": (9000, 10)})), MANY)
    assert found == {"bias": FEW_WORKERS, "table": MANY}


@given(
    lengths=st.lists(st.integers(0, 10_000), min_size=1, max_size=30),
    workers=st.integers(FEW_WORKERS + 1, 300),
)
def test_shards_are_as_many_as_variables_and_workers_together_ask_for(step, lengths, workers):
    variables = synced_variables(step({f"v{k}": (length,) for k, length in enumerate(lengths)}))
    found = fair_shards(variables, workers)
    assert sum(found.values()) <= (FEW_WORKERS + 1) * len(lengths) + PIECES * workers
    share = Fraction(sum(v.byte_size for v in variables), workers)
    for variable in variables:
        assert found[variable.name] == workers or variable.byte_size * PIECES <= share * found[variable.name]


def test_with_many_workers_each_keeps_nearly_its_share(step, cluster):
    planned = step(LAYERS)
    total = sum(variable.byte_size for variable in synced_variables(planned))
    for builder in (ShardedAllReduce, PartitionedPS, UnevenPartitionedPS):
        strategy = builder(min_partition_bytes=0).build(planned, cluster(MANY))
        nodes = {node.variable: node for node in strategy.nodes}
        held = Counter()
        for variable in synced_variables(planned):
            for piece, part in pieces(variable, nodes[variable.name]):
                held[part.owner] += piece.byte_size
        assert len(held) == MANY
        assert max(held.values()) <= (1 + 1.1 / PIECES) * total / MANY, builder
