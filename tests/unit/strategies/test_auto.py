"""Auto chooses as the measurements demand, and never worse than a builder by its own prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autodist.errors import StrategyError
from autodist.resources import MeasuredPair, Measurements, NetworkMeasurement, Recomputation, StepMeasurement
from autodist.strategies import (
    Auto,
    Override,
    OverrideVariables,
    StrategyBuilder,
    UseParameterServer,
    check_strategy,
    find_auto,
    make_strategy,
    synced_variables,
)
from autodist.strategies.auto_search import LISTED
from autodist.strategies.choice_table import ChoiceFigures
from autodist.strategies.nodes import pieces
from autodist.synchronizers import AllReduce, layers_of, synchronizers_of

MIB = 1 << 20
SLOW, FAST = 1.25e6, 1.25e9


def measured(*rates: float, seconds: float = 0.1, **fields) -> Measurements:
    """Measurements with these bytes per second between the first worker and each other one."""
    pairs = tuple(MeasuredPair(0, other, 1e-3, rate, rate) for other, rate in enumerate(rates, 1))
    of_step = {name: fields.pop(name) for name in ("updates", "ready", "rows") if name in fields}
    network = NetworkMeasurement(pairs, 1e-5, 0.0, 0.0, 1e-4, "2026-11-27T10:00:00")
    return Measurements(network, StepMeasurement(seconds, 0.0, **of_step), **fields)


def kinds(strategy) -> dict[str, str]:
    """Returns "all-reduce", "PS" or "shards" for each variable."""
    return {
        node.variable: "shards" if node.shards else "all-reduce" if node.HasField("all_reduce") else "PS"
        for node in strategy.nodes
    }


def test_a_dense_model_with_early_gradients_is_all_reduced_over_a_slow_link(step, cluster):
    planned = step({f"w{k}": (256, 256) for k in range(6)})
    ready = {f"w{k}": 0.1 * (k + 1) for k in range(6)}  # sums hide behind the backward pass, values do not
    machines = cluster(2).with_measurements(measured(20e6, seconds=1.0, ready=ready))
    assert set(kinds(Auto().build(planned, machines)).values()) == {"all-reduce"}


def test_large_updates_are_divided(step, cluster):
    planned = step({f"w{k}": (1024, 1024) for k in range(4)})
    updates = {f"w{k}": 0.02 for k in range(4)}
    strategy = Auto().build(planned, cluster(4).with_measurements(measured(FAST, FAST, FAST, updates=updates)))
    assert "all-reduce" not in kinds(strategy).values()
    owned = [one.owner for node in strategy.nodes for one in synchronizers_of(node)]
    assert set(owned) == {0, 1, 2, 3}


def test_a_table_is_served_if_gathered_rows_would_cost_more(step, cluster):
    planned = step({"table": (100_000, 64), "head": (64, 10)}, sparse=["table"])
    machines = cluster(8).with_measurements(measured(*[12.5e6] * 7, rows={"table": 2000}))
    assert kinds(Auto().build(planned, machines))["table"] in ("PS", "shards")


def test_a_worker_behind_a_slow_link_owns_less(step, cluster):
    planned = step({"table": (100_000, 64), "other": (100_000, 64)}, sparse=["table", "other"])
    rates = [FAST, FAST, FAST / 10]
    strategy = Auto().build(
        planned, cluster(4).with_measurements(measured(*rates, rows={"table": 5000, "other": 5000}))
    )
    variables, owned = {v.name: v for v in synced_variables(planned)}, [0] * 4
    for node in strategy.nodes:
        for piece, one in pieces(variables[node.variable], node):
            if one.owner is not None:
                owned[one.owner] += piece.byte_size
    assert owned[3] == 0 or owned[3] < min(owned[:3])


def test_a_worker_without_replicas_may_own(step, cluster):
    planned = step({"w": (512, 512)})
    machines = cluster(3, servers=1).with_measurements(measured(FAST, FAST, updates={"w": 0.2}))
    strategy = Auto().build(planned, machines)
    check_strategy(strategy, planned, machines)


def test_one_worker_has_no_choice(step, cluster):
    strategy = Auto().build(step({"w": (8, 8)}), cluster(1, devices=2))
    assert set(kinds(strategy).values()) == {"all-reduce"}
    assert not strategy.HasField("choice")


def test_too_little_memory_shards_the_parameters(step, cluster):
    planned = step({f"w{k}": (512, 512) for k in range(8)})  # 8 MiB
    slots = {f"w{k}": 2 * MIB for k in range(8)}
    enough = Auto().build(planned, cluster(4).with_measurements(measured(FAST, FAST, FAST, slots=slots)))
    assert not layers_of(enough)
    little = measured(FAST, FAST, FAST, slots=slots, memory=(10 * MIB,) * 4)
    strategy = Auto().build(planned, cluster(4).with_measurements(little))
    assert layers_of(strategy)
    assert strategy.choice.alternatives[0].name == "FSDP"
    assert all(one.exceeds_memory for one in strategy.choice.alternatives[1:])


def test_no_memory_for_any_plan_says_what_is_missing(step, cluster):
    little = measured(FAST, activations=MIB, memory=(2 * MIB, MIB))
    with pytest.raises(StrategyError) as raised:
        Auto().build(step({"w": (1024, 1024)}), cluster(2).with_measurements(little))
    assert "No plan fits into the memory of 10.0.0.2: FSDP, which needs least" in str(raised.value)
    assert "recompute" in str(raised.value)


@pytest.mark.parametrize("again, name", [(0.1, "recomputed"), (50.0, "FSDP")])
def test_activations_are_computed_again_if_memory_is_short_and_that_is_the_fastest_way(step, cluster, again, name):
    planned = step({f"w{k}": (512, 512) for k in range(8)})  # 8 MiB
    held = {
        "slots": {f"w{k}": 2 * MIB for k in range(8)},
        "activations": 40 * MIB,
        "recomputation": Recomputation(38 * MIB, again),
    }
    ready = {f"w{k}": 0.01 * (8 - k) for k in range(8)}
    enough = Auto().build(planned, cluster(4).with_measurements(measured(*[FAST] * 3, ready=ready, **held)))
    assert not enough.choice.recomputes
    for_all = measured(*[50e6] * 3, ready=ready, **held, memory=(58 * MIB,) * 4)
    choice = Auto().build(planned, cluster(4).with_measurements(for_all)).choice
    assert name in choice.alternatives[0].name and choice.recomputes == (name == "recomputed")
    assert any(one.exceeds_memory for one in choice.alternatives)


@pytest.mark.parametrize(
    "allow, inexact",
    [
        ((), set()),
        (("INT8",), {"INT8"}),
        (("FLOAT8",), {"FLOAT8"}),
        (("local_steps",), {"averaged"}),
        (("INT8", "local_steps", "staleness"), {"averaged"}),
    ],
)
def test_what_saves_most_bytes_is_chosen_over_a_slow_link_if_it_is_allowed(step, cluster, allow, inexact):
    planned, machines = step({f"w{k}": (512, 512) for k in range(4)}), cluster(2).with_measurements(measured(SLOW))
    strategy = Auto(allow=allow).build(planned, machines)
    check_strategy(strategy, planned, machines)
    used = [one for node in strategy.nodes for one in synchronizers_of(node)]
    assert {word for word in ("INT8", "FLOAT8", "averaged") if any(word in one.text for one in used)} == inexact
    assert all(one.inexact is not None for one in used) == bool(allow)


def test_local_steps_are_not_chosen_where_nothing_waits(step, cluster):
    planned, machines = step({"w": (8, 8)}), cluster(2).with_measurements(measured(FAST, seconds=10.0))
    strategy = Auto(allow=("INT8", "FLOAT8", "local_steps")).build(planned, machines)
    assert all(one.inexact is None for node in strategy.nodes for one in synchronizers_of(node))


def test_local_steps_predict_an_outer_step_divided_by_their_number(step, cluster):
    planned, machines = step({f"w{k}": (512, 512) for k in range(4)}), cluster(2).with_measurements(measured(SLOW))
    strategy = Auto(allow=("local_steps",), builders=("AllReduce",)).build(planned, machines)
    by_name = {one.name: one for one in strategy.choice.alternatives}
    assert by_name["DiLoCo"].sent == pytest.approx(by_name["AllReduce"].sent / 64)
    assert by_name["DiLoCo"].held == by_name["AllReduce"].held + 2 * 4 * MIB  # a copy and the momentum
    assert by_name["DiLoCo"].seconds < by_name["AllReduce"].seconds - 3.0  # 4 MiB at 1.25 MB/s take 3.4 s


def test_lossy_plans_only_if_they_are_allowed(step, cluster):
    planned = step({"w": (1024, 1024)})
    machines = cluster(2).with_measurements(measured(SLOW))
    exact, lossy = (Auto(allow=allow).build(planned, machines) for allow in ((), ("compressor",)))
    assert all(one.inexact is None for node in exact.nodes for one in synchronizers_of(node))
    assert any(isinstance(one, AllReduce) and one.inexact for node in lossy.nodes for one in synchronizers_of(node))
    fast = Auto(allow=("compressor",)).build(step({"w": (8, 8)}), cluster(2).with_measurements(measured(FAST)))
    assert all(one.inexact is None for node in fast.nodes for one in synchronizers_of(node))  # it would save nothing
    stale = Auto(allow=("staleness",)).build(planned, cluster(2).with_measurements(measured(SLOW, seconds=10.0)))
    assert any(one.inexact for node in stale.nodes for one in synchronizers_of(node))


def test_a_later_step_knows_what_earlier_ones_own(step, cluster):
    """A GAN's second table goes to the other worker."""
    planned = step({"second": (1000, 64)}, sparse=["second"])
    machines = cluster(2).with_measurements(measured(FAST, rows={"second": 900}))
    after = Auto().build(planned, machines.with_owned_bytes([1000 * 256, 0]))
    owners = {one.owner for node in after.nodes for one in synchronizers_of(node)}
    assert owners in ({None}, {1}, {0, 1})


@dataclass(frozen=True)
class Failing(StrategyBuilder):
    def build(self, graph_item, resource_spec):
        raise ValueError("no such table")


@dataclass(frozen=True)
class AtTheLast(StrategyBuilder):
    def build(self, graph_item, resource_spec):
        from autodist.strategies import PS

        nodes = PS(owner=len(resource_spec.workers) - 1).build(graph_item, resource_spec).nodes
        return make_strategy("AtTheLast", resource_spec, synced_variables(graph_item), nodes)


def test_a_builder_of_the_script_is_compared(step, cluster):
    name = f"{__name__}.AtTheLast"
    strategy = Auto(builders=(name,)).build(step({"w": (8, 8)}), cluster(2))
    assert name in [one.name for one in strategy.choice.alternatives]


def test_a_builder_of_the_script_that_fails_is_named(step, cluster):
    with pytest.raises(StrategyError, match="The builder Failing failed: ValueError: no such table"):
        Auto(builders=(f"{__name__}.Failing",)).build(step({"w": (8, 8)}), cluster(2))
    with pytest.raises(StrategyError, match="Nowhere"):
        Auto(builders=("Nowhere",)).build(step({"w": (8, 8)}), cluster(2))


def test_a_builder_that_divides_the_model_is_refused(step, cluster):
    with pytest.raises(StrategyError, match="Auto cannot compare Mesh, which divides the model"):
        Auto(builders=("Mesh",)).build(step({"w": (8, 8)}), cluster(2))


def test_the_option_recompute_saves_memory_and_takes_time_under_all_plans(step, cluster):
    costs = {"activations": 100 * MIB, "recomputation": Recomputation(100 * MIB, 0.25)}
    enough = Auto().build(step({"w": (8, 8)}), cluster(2).with_measurements(measured(FAST, **costs)))
    little = cluster(2).with_measurements(measured(FAST, **costs, memory=(MIB, MIB)))
    strategy = Auto(recompute=True).build(step({"w": (8, 8)}), little)
    times = [choice.terms[0].seconds for choice in (enough.choice, strategy.choice)]
    assert times[1] == pytest.approx(1.25 * times[0]) and not strategy.choice.recomputes
    with pytest.raises(StrategyError, match="No plan fits"):
        Auto(recompute=True).build(step({"w": (1024, 1024)}), little)


def test_reasons_and_alternatives_are_in_the_strategy(step, cluster):
    planned = step({"w": (512, 512), "table": (1000, 8)}, sparse=["table"])
    choice = Auto().build(planned, cluster(2).with_measurements(measured(FAST))).choice
    assert [reason.variable for reason in choice.reasons] == ["w", "table"]
    assert "dense, 1.05 MB; " in choice.reasons[0].text
    assert choice.reasons[0].text.endswith("a step")
    times = [one.seconds for one in choice.alternatives]
    assert times[1:] == sorted(times[1:]) and times[0] <= times[1] and len(times) <= LISTED
    assert sum(term.seconds for term in choice.terms) == pytest.approx(choice.alternatives[0].seconds)
    assert choice.basis == "links measured 2026-11-27T10:00:00, a step of 100 ms measured"
    figures = ChoiceFigures.of(choice)
    assert figures.table().row_count == len(times)
    assert {name for _, names in figures.reason_rows for name in names.split(", ")} == {"w", "table"}


def test_without_measurements_it_says_so(step, cluster):
    choice = Auto().build(step({"w": (512, 512)}), cluster(2)).choice
    assert choice.basis == "assumed links, no step measured"
    estimated = Measurements(step=StepMeasurement(0.1, 0.0), why_not="it prints")
    choice = Auto().build(step({"w": (512, 512)}), cluster(2).with_measurements(estimated)).choice
    assert choice.basis == "assumed links, a step estimated by its FLOPs (it prints)"


def test_auto_is_found_below_overrides():
    auto = Auto()
    assert find_auto(OverrideVariables(auto, (Override("w", UseParameterServer(owner=1)),))) is auto
    assert find_auto(None) is None


@settings(max_examples=30)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 300)), min_size=1, max_size=6),
    sparse=st.sets(st.integers(0, 5)),
    rates=st.lists(st.sampled_from([1e6, 1e8, 1e9]), min_size=1, max_size=6),
    seconds=st.sampled_from([1e-3, 0.1, 2.0]),
)
def test_the_choice_is_never_slower_than_a_whole_plan(step, cluster, shapes, sparse, rates, seconds):
    planned = step({f"v{k}": shape for k, shape in enumerate(shapes)}, [f"v{k}" for k in sparse if k < len(shapes)])
    machines = cluster(len(rates) + 1).with_measurements(measured(*rates, seconds=seconds))
    strategy = Auto().build(planned, machines)
    check_strategy(strategy, planned, machines)
    assert strategy.choice.alternatives[0].seconds == min(one.seconds for one in strategy.choice.alternatives)


def test_workers_that_share_few_cores_leave_a_table_to_one_of_them(cluster, step):
    planned = step({"table": (200_000, 64), "kernel": (64, 1)}, sparse=["table"])
    machines = type(cluster()).from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1, 2, 3], "workers": 4}]})
    found = measured(seconds=1e-3, rows={"table": 1280})
    chosen = {
        cores: Auto().build(planned, machines.with_measurements(replace(found, cores=(cores,) * 4)))
        for cores in (0.5, 4.0)
    }
    owners = {cores: {one.owner for n in s.nodes for one in synchronizers_of(n)} for cores, s in chosen.items()}
    assert owners[0.5] == {0}  # fewer messages in all, though one worker updates alone
    assert owners[4.0] != {0}
    assert "shared cores" in {term.name for term in chosen[0.5].choice.terms}
