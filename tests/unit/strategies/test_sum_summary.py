"""The logged cost of a step's reductions is the cost that AUTO compared."""

import pytest

from autodist.compressors import Float16
from autodist.strategies import PS, AllReduce, Parallax, Pipeline, resolve_specs, strategy_table
from autodist.strategies.specs import summed_bytes
from autodist.strategies.subgroups import sum_cost
from autodist.strategies.sum_summary import milliseconds, sum_summary


@pytest.fixture
def planned(step):
    return step({"kernel": (3000, 1000), "table": (100, 8)}, sparse=["table"])


def told(planned, machines, builder):
    return sum_summary(resolve_specs(builder.build(planned, machines), planned, machines), planned, machines)


def test_teams_are_told_with_what_they_take_and_what_the_other_way_would(planned, cluster):
    machines = cluster(workers=16)
    at_once = milliseconds(sum_cost(None, machines, 12_000_000).seconds)
    text = told(planned, machines, Parallax())
    assert text.startswith(
        "sums are computed in 4 subgroups of 4 first, then between them: a worker's step calls at most 6 "
    )
    assert text.endswith(f" ms, {at_once} without")
    without = told(planned, machines, Parallax(all_reduce_spec="SHUFFLE"))
    subgroups = text.partition("on paper they take ")[2].partition(",")[0]
    assert without == f"on paper a step's sums take {at_once}, {subgroups} in subgroups"


def test_few_workers_have_one_way(planned, cluster):
    took = milliseconds(sum_cost(None, cluster(workers=2), 12_000_000).seconds)
    assert told(planned, cluster(workers=2), AllReduce()) == f"on paper a step's sums take {took}"


@pytest.mark.parametrize("builder", [PS(), AllReduce(all_reduce_spec="RING"), Pipeline(stages=2)])
def test_strategies_outside_the_cost_model_have_no_time(builder, step, cluster):
    planned = step({"stage_0/kernel": (3000, 1000), "stage_1/kernel": (3000, 1000)})
    assert told(planned, cluster(workers=2), builder) == ""


def test_one_worker_adds_nothing_up(planned, cluster):
    assert told(planned, cluster(workers=1), AllReduce()) == ""


def test_compressed_values_count_with_their_compressed_size(step, cluster):
    dense = step({"kernel": (3000, 1000)})
    compressed = AllReduce(compressor=Float16()).build(dense, cluster(workers=2))
    assert summed_bytes(compressed, dense) == 6_000_000


def test_the_table_says_it_below(planned, cluster):
    machines = cluster(workers=16)
    strategy = resolve_specs(Parallax().build(planned, machines), planned, machines)
    caption = str(strategy_table(strategy, planned, resource_spec=machines).caption)
    assert caption.endswith(sum_summary(strategy, planned, machines))
