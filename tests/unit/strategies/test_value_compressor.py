"""value_compressor: the variables that it applies to, their bytes, and those that it cannot apply to."""

from __future__ import annotations

import re

import pytest
import yaml

from autodist.compressors import NO_COMPRESSOR, Int8
from autodist.errors import StrategyError
from autodist.resources import StrategySection
from autodist.strategies import (
    PS,
    ShardedAllReduce,
    builder_from_section,
    bytes_sent,
    check_strategy,
    synced_variables,
)
from autodist.strategies.strategy_file import strategy_yaml
from autodist.synchronizers import all_synchronizers

SHAPES = {"kernel": (512, 64), "bias": (64,), "small table": (10, 64), "table": (5000, 64)}


@pytest.fixture
def planned(step):
    return step(SHAPES, sparse=["small table", "table"])


def built(builder, planned, machines):
    strategy = builder.build(planned, machines)
    check_strategy(strategy, planned, machines)
    return strategy


def test_values_that_are_sent_whole_are_encoded(planned, cluster):
    strategy = built(ShardedAllReduce(value_compressor="INT8"), planned, cluster(2))
    used = {name.partition("/")[0]: one.value_compressor for name, one in all_synchronizers(strategy)}
    assert used == {"kernel": Int8(), "bias": Int8(), "small table": Int8(), "table": NO_COMPRESSOR}


def test_a_worker_sends_gradients_and_encoded_values(step, cluster):
    planned, machines = step({"kernel": (2048, 64)}), cluster(2)
    strategy = built(ShardedAllReduce(value_compressor={"kind": "INT8", "block": 128}), planned, machines)
    shard = 2048 * 64 // 2
    sent = bytes_sent(synced_variables(planned), strategy.nodes, strategy.graph_config)
    assert sent == (4 * shard + shard + 4 * shard // 128,) * 2


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"value_compressor": {"kind": "POWER_SGD", "rank": 2}}, "compresses gradients alone; use INT8"),
        ({"value_compressor": {"kind": "TOP_K", "fraction": 0.1}}, "compresses gradients alone; use INT8"),
        ({"value_compressor": {"kind": "INT8", "error_feedback": True}}, "no error is lost; remove error_feedback."),
        ({"value_compressor": "INT8", "sync": False}, "use sync: true or NONE."),
        ({"value_compressor": "INT8", "local_proxy_variable": False}, "for cached copies, and it has none. Use"),
    ],
)
def test_what_cannot_be_encoded_is_refused(planned, cluster, options, problem):
    with pytest.raises(StrategyError, match=f"^kernel has the value_compressor .*{re.escape(problem)}"):
        built(PS(**options), planned, cluster(2))


def test_integers_are_refused(step, cluster):
    planned = step({"count": (4,)}, integers=["count"])
    with pytest.raises(StrategyError, match="count has the value_compressor INT8 .* int32 is not floating-point"):
        built(ShardedAllReduce(value_compressor="INT8"), planned, cluster(2))


def section(text):
    return StrategySection.from_script(yaml.safe_load(text))


def test_patterns_set_and_remove_it(planned, cluster):
    text = """
      builder: ShardedAllReduce
      value_compressor: INT8
      variables:
        bias: {synchronizer: PS, value_compressor: NONE}
        kernel: {synchronizer: PS, value_compressor: {kind: INT8, block: 64}}
    """
    machines = cluster(2)
    strategy = built(builder_from_section(section(text)), planned, machines)
    used = {name.partition("/")[0]: one.value_compressor for name, one in all_synchronizers(strategy)}
    assert used == {"kernel": Int8(block=64), "bias": NO_COMPRESSOR, "small table": Int8(), "table": NO_COMPRESSOR}
    saved = StrategySection.from_script(yaml.safe_load(strategy_yaml(strategy))["strategy"])
    assert built(builder_from_section(saved), planned, machines).nodes == strategy.nodes


def test_a_table_that_is_read_by_rows_is_refused_with_the_place(planned, cluster):
    text = "{builder: ShardedAllReduce, variables: {table: {synchronizer: PS, value_compressor: INT8}}}"
    with pytest.raises(StrategyError, match="table has the value_compressor .* of which a step reads the rows. Use"):
        built(builder_from_section(section(text)), planned, cluster(2))
