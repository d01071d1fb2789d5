from math import sqrt

import pytest

from autodist.placement.group import Group
from autodist.resources import ResourceSpec
from autodist.strategies.subgroups import choose_subgroups, sum_cost
from autodist.synchronizers import Subgroups


def machines(*workers, bandwidth=25):
    """Returns nodes with the given numbers of workers; 0: one without replicas."""
    nodes = [
        {"address": f"10.0.{k // 256}.{k % 256}", "network_bandwidth": bandwidth}
        | ({"cpus": list(range(count)), "workers": count} if count else {"cpus": []})
        for k, count in enumerate(workers)
    ]
    nodes[0]["chief"] = True
    return ResourceSpec.from_dict({"nodes": nodes})


def sizes(numbers):
    return [numbers.count(number) for number in sorted(set(numbers))]


@pytest.mark.parametrize("workers", [4, 5, 6, 7, 9, 16, 17, 60, 64, 256, 1024])
def test_a_step_calls_at_most_twice_the_root_of_the_workers_and_one(workers):
    numbers = choose_subgroups(machines(*[1] * workers), 100 << 20, is_asked=True)
    subgroups = Subgroups.of(numbers, Group.of_workers(range(workers)))
    assert subgroups.most_called <= 2 * (sqrt(workers) + 1)
    assert max(sizes(numbers)) - min(sizes(numbers)) <= 1


def test_workers_of_a_machine_are_in_one_team():
    assert choose_subgroups(machines(4, 4, 4, 4), 100 << 20) == tuple(k // 4 for k in range(16))
    assert sizes(choose_subgroups(machines(*[2] * 32), 400 << 20)) == [4] * 16


def test_many_small_sums_pay_no_earlier_than_the_calls_they_spare():
    assert choose_subgroups(machines(1, 1, 1, 1), 1000) == ()
    assert choose_subgroups(machines(*[1] * 16), 1000) != ()


def test_a_slow_link_pays_for_teams_of_few_workers():
    few, fast = machines(2, 2, bandwidth=1), machines(2, 2, bandwidth=1000)
    assert choose_subgroups(few, 400 << 20) == (0, 0, 1, 1)
    assert choose_subgroups(fast, 1 << 20) == ()


def test_fewer_than_four_workers_have_no_teams():
    assert choose_subgroups(machines(1, 1, 1), 100 << 20, is_asked=True) == ()


def test_workers_without_replicas_are_dealt_out_to_teams():
    numbers = choose_subgroups(machines(1, 1, 0, 1, 1, 0), 100 << 20, is_asked=True)
    assert numbers == (0, 0, 0, 1, 1, 1)


def test_teams_send_over_the_network_what_one_worker_of_each_machine_would():
    at_once = sum_cost(None, machines(4, 4), 100 << 20)
    subgroups = sum_cost(Subgroups.of((0, 0, 0, 0, 1, 1, 1, 1), Group.of_workers(range(8))), machines(4, 4), 100 << 20)
    assert subgroups.transfer == pytest.approx(at_once.transfer / 4)
