from collections import Counter
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from autodist.resources import ResourceSpec
from autodist.strategies import GreedyLoads, PSLoadBalancing, check_strategy, worker_bandwidths

SIZES = st.lists(st.integers(0, 10_000), max_size=20)
BANDWIDTHS = st.lists(st.sampled_from([1.0, 2.5, 10.0, 25.0, 100.0]), min_size=1, max_size=5)


def loads_by_worker(strategy, planned, workers):
    sizes = {variable.name: variable.byte_size for variable in planned.variables}
    loads = [0] * workers
    for node in strategy.nodes:
        loads[node.parameter_server.owner] += sizes[node.variable]
    return loads


def owners(strategy):
    return {node.variable: node.parameter_server.owner for node in strategy.nodes}


@given(sizes=SIZES, bandwidths=BANDWIDTHS)
def test_every_variable_has_one_owner_and_no_link_more_than_the_greedy_bound(step, cluster, sizes, bandwidths):
    planned = step({f"v{index}": (size,) for index, size in enumerate(sizes)})
    machines = cluster(workers=len(bandwidths), bandwidths=bandwidths)
    strategy = PSLoadBalancing().build(planned, machines)
    check_strategy(strategy, planned, machines)

    assert Counter(node.variable for node in strategy.nodes) == {f"v{index}": 1 for index in range(len(sizes))}
    loads = loads_by_worker(strategy, planned, len(bandwidths))
    total, largest = 4 * sum(sizes), 4 * max(sizes, default=0)
    bound = Fraction(total + (len(bandwidths) - 1) * largest) / sum(map(Fraction, bandwidths))
    assert max(load / Fraction(bandwidth) for load, bandwidth in zip(loads, bandwidths, strict=True)) <= bound


@given(sizes=SIZES, workers=st.integers(1, 5))
def test_equal_links_differ_by_one_variable_at_most(step, cluster, sizes, workers):
    planned = step({f"v{index}": (size,) for index, size in enumerate(sizes)})
    loads = loads_by_worker(PSLoadBalancing().build(planned, cluster(workers=workers)), planned, workers)
    assert max(loads) - min(loads) <= 4 * max(sizes, default=0)


@given(order=st.permutations(["a", "b", "c", "d", "e"]))
def test_owners_depend_on_sizes_and_names_not_on_order(step, cluster, order):
    lengths = {"a": 7, "b": 7, "c": 5, "d": 1, "e": 0}
    shuffled = PSLoadBalancing().build(step({name: (lengths[name],) for name in order}), cluster(workers=3))
    assert [node.variable for node in shuffled.nodes] == order
    sorted_by_name = PSLoadBalancing().build(step({name: (lengths[name],) for name in "abcde"}), cluster(workers=3))
    assert owners(shuffled) == owners(sorted_by_name)


def test_largest_first_and_the_lower_index_wins_a_tie(step, cluster):
    planned = step({"small": (10,), "large": (30,), "middle": (20,)})
    # large goes to 0 (both are empty), middle to 1, and small to 1, the less loaded one.
    assert owners(PSLoadBalancing().build(planned, cluster(workers=2))) == {"large": 0, "middle": 1, "small": 1}


def test_a_faster_link_owns_more(step, cluster):
    planned = step({f"v{index}": (100,) for index in range(11)})
    strategy = PSLoadBalancing().build(planned, cluster(workers=2, bandwidths=[10, 100]))
    assert Counter(owners(strategy).values()) == {0: 1, 1: 10}


def test_nodes_without_replicas_own_all_variables(step, cluster):
    planned = step({f"v{index}": (100,) for index in range(6)})
    strategy = PSLoadBalancing(staleness=2).build(planned, cluster(workers=4, servers=2))
    assert Counter(owners(strategy).values()) == {2: 3, 3: 3}
    assert {node.parameter_server.staleness for node in strategy.nodes} == {2}


def test_loads_can_be_told_who_may_own(cluster):
    loads = GreedyLoads(cluster(workers=4), owners=[1, 3])
    assert [loads.place(10) for _ in range(3)] == [1, 3, 1]
    assert loads.least_loaded(2) == (3, 1)


def test_workers_of_one_node_share_its_link():
    nodes = [
        {"address": "10.0.0.1", "cpus": [0, 1], "workers": 2, "network_bandwidth": 25, "chief": True},
        {"address": "10.0.0.2", "network_bandwidth": 25},
    ]
    assert worker_bandwidths(ResourceSpec.from_dict({"nodes": nodes})) == (Fraction(25, 2), Fraction(25, 2), 25)


@given(sizes=SIZES, bandwidths=BANDWIDTHS, others=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 500))))
def test_the_owner_is_the_one_whose_link_is_done_first(cluster, sizes, bandwidths, others):
    machines = cluster(workers=len(bandwidths), bandwidths=bandwidths)
    loads = GreedyLoads(machines)
    owned = [0] * len(bandwidths)
    for number, size in enumerate(sizes):
        best = min(
            range(len(owned)), key=lambda worker: ((owned[worker] + size) / Fraction(bandwidths[worker]), worker)
        )
        assert loads.least_loaded(1, size) == (best,)
        assert loads.place(size) == best
        owned[best] += size
        if number < len(others) and others[number][0] < len(owned):
            worker, more = others[number]
            loads.add(worker, more)
            owned[worker] += more
