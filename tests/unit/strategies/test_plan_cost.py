"""Predicted times follow from the measurements, term by term."""

from __future__ import annotations

import pytest

from autodist.resources import MeasuredPair, Measurements, NetworkMeasurement, StepMeasurement
from autodist.strategies import PS, AllReduce, PSLoadBalancing, ShardedAllReduce, synced_variables
from autodist.strategies.network_model import CALL, HOP, MESSAGE, NetworkModel
from autodist.strategies.plan_cost import HANDLING, CostModel, Prediction
from autodist.strategies.subgroups import choose_subgroups, group_of, sum_cost
from autodist.synchronizers import Subgroups

MEGABYTE = 1 << 20
RATE, LOCAL_RATE, ROUND_TRIP = 12.5e6, 1e9, 4e-3


def network(*rates: float, message: float = 1e-5, call: float = 2e-4, local: float | None = None) -> NetworkMeasurement:
    """Measurements as they would be with these bytes per second between the first worker and each other one."""
    pairs = [MeasuredPair(0, other, ROUND_TRIP, rate, rate) for other, rate in enumerate(rates, 1)]
    if local is not None:
        pairs.append(MeasuredPair(0, 1, 1e-4, local, local))
    return NetworkMeasurement(tuple(pairs), message, 0.0, 0.0, call, "2026-11-27T10:00:00")


def computing(seconds: float = 0.1, **fields) -> StepMeasurement:
    return StepMeasurement(seconds, fields.pop("fixed", 0.0), **fields)


def predict(builder, planned, machines, measured: Measurements) -> Prediction:
    spec, variables = machines.with_measurements(measured), synced_variables(planned)
    model = CostModel.of(spec, variables)
    load = model.loads.empty()
    by_name = {variable.name: variable for variable in variables}
    for node in builder.build(planned, spec).nodes:
        for row, column, amount in model.loads.entries(by_name[node.variable], node):
            load[row, column] += amount
    return model.predict(load)


def test_the_constants_of_synthetic_measurements_come_back(cluster):
    machines = cluster(3).with_measurements(Measurements(network(RATE, 2 * RATE)))
    model = NetworkModel.of(machines)
    assert model.rates == pytest.approx((2 * RATE, RATE, 2 * RATE), rel=0.05)
    assert (model.hop, model.message, model.call) == pytest.approx((ROUND_TRIP / 2, 1e-5, 2e-4), rel=0.05)
    assert model.measured_at.startswith("2026-11-27")


def test_without_measurements_times_are_assumed(cluster):
    model = NetworkModel.of(cluster(2, bandwidths=[1, 10]))
    assert model.rates == pytest.approx((1e9 / 8, 10e9 / 8))
    assert (model.hop, model.message, model.call, model.measured_at) == (HOP, MESSAGE, CALL, "")


def test_a_bandwidth_of_the_file_replaces_the_measured_one(cluster):
    machines = cluster(2, bandwidths=[1, 1]).with_measurements(Measurements(network(RATE)))
    assert NetworkModel.of(machines).rates == pytest.approx((1e9 / 8, 1e9 / 8))


def test_workers_of_one_machine_cost_processor_time_and_no_network(cluster):
    machines = type(cluster()).from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]})
    measured = Measurements(network(local=LOCAL_RATE), computing())
    assert NetworkModel.of(machines.with_measurements(measured)).byte == pytest.approx(1 / (2 * LOCAL_RATE))


def test_workers_that_share_a_core_take_the_time_of_all_together(cluster, step):
    machines = type(cluster()).from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1, 2, 3], "workers": 4}]})
    planned = step({"kernel": (256, 1024)})

    def found(builder, cores):
        return predict(builder, planned, machines, Measurements(network(), computing(0.1), cores=cores))

    apart, together = found(AllReduce(), (2.0,) * 4), found(AllReduce(), (0.5,) * 4)
    assert apart.cores == 0
    busy = together.computation + together.updates + together.processor
    assert together.cores == pytest.approx(busy)  # four workers on two cores
    owned = found(PS(), (0.5,) * 4)
    assert owned.cores < owned.computation + owned.updates + owned.processor  # only the owner updates


def test_a_step_that_was_measured_on_a_part_of_a_core_counts_as_on_a_whole_one():
    measured = StepMeasurement(0.4, 0.2, updates={"w": 0.1}, ready={"w": 0.3}, rows={"w": 5})
    assert measured.with_own_cores(0.5) == StepMeasurement(0.2, 0.1, {"w": 0.05}, {"w": 0.15}, {"w": 5})
    assert measured.with_own_cores(4.0) == measured


def test_a_sum_over_a_slow_link_takes_its_bytes(cluster, step):
    planned = step({"kernel": (256, 1024)})  # 1 MiB
    found = predict(AllReduce(), planned, cluster(2), Measurements(network(RATE), computing(0.1)))
    assert found.computation == pytest.approx(0.1)
    assert found.network == pytest.approx(MEGABYTE / RATE, rel=0.05)
    assert found.waits == pytest.approx(ROUND_TRIP / 2 + HANDLING)
    assert found.sent == MEGABYTE


def test_the_backward_pass_hides_what_is_ready_early(cluster, step):
    planned = step({"early": (256, 1024), "late": (8, 8)})
    hidden = computing(0.5, ready={"early": 0.1, "late": 0.5})
    found = predict(AllReduce(), planned, cluster(2), Measurements(network(RATE), hidden))
    assert found.network < 0.1 * MEGABYTE / RATE
    exposed = computing(0.5, ready={"early": 0.5, "late": 0.5})
    assert predict(AllReduce(), planned, cluster(2), Measurements(network(RATE), exposed)).network == pytest.approx(
        MEGABYTE / RATE, rel=0.05
    )


def test_values_of_an_owner_are_sent_after_the_update(cluster, step):
    planned = step({"a": (256, 1024), "b": (256, 1024)})
    hidden = computing(1.0, ready={"a": 0.1, "b": 0.1})
    found = predict(PSLoadBalancing(), planned, cluster(2), Measurements(network(RATE), hidden))
    assert found.network == pytest.approx(MEGABYTE / RATE, rel=0.05)  # each worker sends the values of one variable


def test_each_worker_updates_its_shards_alone(cluster, step):
    planned = step({"kernel": (1024, 1024)})
    measured = Measurements(network(1e9), computing(1.0, updates={"kernel": 0.4}))
    whole, sharded = (predict(b, planned, cluster(4), measured) for b in (AllReduce(), ShardedAllReduce()))
    assert whole.computation == sharded.computation == pytest.approx(0.6)
    assert whole.updates == pytest.approx(0.4, abs=0.01)
    assert sharded.updates == pytest.approx(0.1, abs=0.01)


def test_gathered_rows_grow_with_the_workers_and_served_rows_do_not(cluster, step):
    planned = step({"table": (100_000, 64)}, sparse=["table"])
    measured = Measurements(network(*[1e9] * 7), computing(0.1, rows={"table": 1000}))
    gathered, served = (predict(b, planned, cluster(8), measured) for b in (AllReduce(), ShardedAllReduce()))
    row = 64 * 4 + 8
    assert gathered.sent == pytest.approx(7 * 1000 * row, rel=0.01)
    assert served.sent < 3 * 1000 * row


def test_slots_and_gradients_count_for_memory(cluster, step):
    planned = step({"kernel": (256, 1024)})
    measured = Measurements(network(1e9), computing(), slots={"kernel": 2 * MEGABYTE}, activations=MEGABYTE)
    whole, sharded = (predict(b, planned, cluster(2), measured) for b in (AllReduce(), ShardedAllReduce()))
    assert whole.held == (5 * MEGABYTE,) * 2  # value, slots, gradient, activations
    assert sharded.held == (4 * MEGABYTE,) * 2  # half of the slots


def test_updates_between_gradients_do_not_move_the_end_of_the_backward_pass(cluster, step):
    planned = step({"first": (256, 1024), "last": (8, 8)})
    # 0.1 s, then an update of 0.2 s, 0.1 s, then an update of 0.1 s: the backward pass takes 0.2 s.
    interleaved = computing(0.5, updates={"first": 0.2, "last": 0.1}, ready={"first": 0.1, "last": 0.4})
    at_the_end = computing(0.5, updates={"first": 0.2, "last": 0.1}, ready={"first": 0.1, "last": 0.2})
    measured = [Measurements(network(RATE / 10), one) for one in (interleaved, at_the_end)]
    found = [predict(AllReduce(), planned, cluster(2), one) for one in measured]
    assert found[0].computation == pytest.approx(0.2)
    assert [one.network for one in found] == pytest.approx([10 * MEGABYTE / RATE - 0.1] * 2, rel=0.05)


def test_subgroups_send_less_between_machines(cluster, step):
    """Machines of eight workers: what `choose_subgroups` counts on is what the prediction has."""
    nodes = [{"address": f"10.0.0.{k}", "cpus": list(range(8)), "workers": 8, "chief": not k} for k in range(2)]
    machines = type(cluster()).from_dict({"nodes": nodes})
    planned = step({"kernel": (5000, 5000)})
    pairs = (MeasuredPair(0, 8, 1e-4, RATE, RATE), MeasuredPair(0, 1, 1e-4, 1e9, 1e9))
    measured = Measurements(NetworkMeasurement(pairs, 1e-5, 0.0, 0.0, 1e-4, "2026-11-27T10:00:00"), computing(0.0))
    found = predict(AllReduce(), planned, machines, measured)
    spec = machines.with_measurements(measured)
    numbers = choose_subgroups(spec, 10**8)
    cost = sum_cost(Subgroups.of(numbers, group_of(spec)), spec, 10**8)
    assert numbers
    assert found.network == pytest.approx(cost.transfer, rel=0.1)


def test_a_slow_link_does_not_slow_the_others(cluster):
    pairs = (
        MeasuredPair(0, 1, 1e-3, 1e9, 1e9), MeasuredPair(0, 2, 1e-3, 1e8, 1e8), MeasuredPair(1, 2, 1e-3, 1e8, 1e8),
    )  # fmt: skip
    measured = Measurements(NetworkMeasurement(pairs, 1e-5, 1e8, 1e8, 1e-4, "2026-11-27T10:00:00"))
    assert NetworkModel.of(cluster(3).with_measurements(measured)).rates == pytest.approx((1e9, 1e9, 1e8))
