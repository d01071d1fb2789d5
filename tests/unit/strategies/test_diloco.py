"""DiLoCo, and local steps of single variables."""

from __future__ import annotations

from fractions import Fraction

import pytest

from autodist.compressors import Int8
from autodist.errors import Place, StrategyError
from autodist.strategies import (
    PS,
    AllReduce,
    DiLoCo,
    Override,
    OverrideVariables,
    Pipeline,
    UseAllReduce,
    UseParameterServer,
    bytes_sent,
    check_strategy,
    synced_variables,
)
from autodist.strategies.strategy_file import strategy_yaml
from autodist.synchronizers import LocalSteps, synchronizers_of

SHAPES = {"table": (100, 8), "kernel": (8, 8), "bias": (8,)}


def locals_of(strategy) -> dict[str, LocalSteps | None]:
    return {node.variable: getattr(synchronizers_of(node)[0], "local", None) for node in strategy.nodes}


def built(step, machines, builder, *overrides):
    planned = step(SHAPES, sparse=["table"])
    strategy = (OverrideVariables(builder, overrides) if overrides else builder).build(planned, machines)
    check_strategy(strategy, planned, machines)
    return strategy


def test_every_variable_makes_local_steps(step, cluster):
    strategy = built(step, cluster(workers=2), DiLoCo(local_steps=8))
    assert locals_of(strategy) == dict.fromkeys(SHAPES, LocalSteps(8, 0.7, 0.9))


@pytest.mark.parametrize("compressor, size", [({}, 1), ({"compressor": Int8()}, Fraction(1, 4))])
def test_an_outer_step_sends_what_a_step_of_all_reduce_sends_and_tables_whole(step, cluster, compressor, size):
    machines = cluster(workers=4)
    planned = step({"kernel": (64, 64), "table": (100, 64)}, sparse=["table"])
    strategy = DiLoCo(local_steps=8, **compressor).build(planned, machines)
    dense = step({"kernel": (64, 64), "table": (100, 64)})
    each, sent = (
        bytes_sent(synced_variables(planned), one.nodes, one.graph_config)
        for planned, one in ((dense, AllReduce().build(dense, machines)), (planned, strategy))
    )
    assert sent == pytest.approx([float(count * size / 8) for count in each], rel=0.05)
    assert "averaged every 8 steps" in synchronizers_of(strategy.nodes[0])[0].text


def test_settings_of_variables_add_and_remove_local_steps(step, cluster):
    machines = cluster(workers=2)
    without = built(
        step, machines, DiLoCo(),
        Override("table", UseParameterServer()), Override("bias", UseAllReduce(local_steps=0)),
        Override("kernel", UseAllReduce(outer_momentum=0.5)),
    )  # fmt: skip
    assert locals_of(without) == {"table": None, "kernel": LocalSteps(64, 0.7, 0.5), "bias": None}
    added = built(step, machines, AllReduce(), Override("kernel", UseAllReduce(local_steps=4)))
    assert locals_of(added) == {"table": None, "kernel": LocalSteps(4), "bias": None}


@pytest.mark.parametrize("options", [{"outer_momentum": 0.5}, {"outer_learning_rate": 0.5}])
def test_options_of_an_outer_step_without_local_steps_are_refused(options):
    with pytest.raises(StrategyError, match="local_steps is 0"):
        UseAllReduce(local_steps=0, **options)


@pytest.mark.parametrize("options", [{"outer_momentum": 0.5}, {"outer_learning_rate": 0.5}])
def test_options_of_an_outer_step_where_no_builder_makes_local_steps_are_refused_at_their_place(step, cluster, options):
    place = Place("cluster.yml", 7, 'strategy.variables["kernel"]')
    with pytest.raises(StrategyError, match="local_steps is 0") as caught:
        built(step, cluster(workers=2), AllReduce(), Override("kernel", UseAllReduce(**options), place))
    assert caught.value.place == place


@pytest.mark.parametrize("options", [
    {"local_steps": 0}, {"outer_learning_rate": 0.0}, {"outer_learning_rate": float("inf")}, {"outer_momentum": 1.0},
])  # fmt: skip
def test_values_out_of_range_are_refused(options):
    with pytest.raises(StrategyError, match=next(iter(options))):
        DiLoCo(**options)


@pytest.mark.parametrize("builder, overrides, match", [
    (DiLoCo(all_reduce_spec="RING"), (), "collectives need all workers in each step"),
    (PS(staleness=2), (Override("kernel", UseAllReduce(local_steps=4)),), "has sync: false or a staleness"),
    (PS(sync=False), (Override("kernel", UseAllReduce(local_steps=4)),), "has sync: false or a staleness"),
    (Pipeline(), (Override("kernel", UseAllReduce(local_steps=4)),), "divides the model|pipeline"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(step, cluster, builder, overrides, match):
    with pytest.raises(StrategyError, match=match):
        built(step, cluster(workers=2), builder, *overrides)


def test_the_strategy_file_has_the_local_steps(step, cluster):
    text = strategy_yaml(built(step, cluster(workers=2), DiLoCo(local_steps=5)))
    assert text.count("local_steps: 5, outer_learning_rate: 0.7, outer_momentum: 0.9") == len(SHAPES)


def test_variables_are_those_of_the_step(step, cluster):
    planned = step(SHAPES, without_gradient=["bias"])
    names = [v.name for v in synced_variables(planned)]
    assert [n.variable for n in DiLoCo().build(planned, cluster()).nodes] == names == ["table", "kernel"]
