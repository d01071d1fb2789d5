"""The measurements that `Auto` takes of a step."""

from __future__ import annotations

from math import inf

from autodist.resources import ResourceSpec
from autodist.runs.measuring.auto_measurements import cores_while_measured


def test_workers_that_measure_at_the_same_time_share_the_cores_of_their_machine() -> None:
    spec = ResourceSpec.from_dict(
        {
            "nodes": [
                {"address": "10.0.0.1", "cpus": [0, 1, 2, 3], "workers": 4, "chief": True},
                {"address": "10.0.0.2", "cpus": [0]},
                {"address": "10.0.0.3", "gpus": [0, 1], "workers": 2},
            ]
        }
    )
    cores = (0.5, 0.5, 0.5, 0.5, 8.0, 0.5, 0.5)
    all_measured = cores_while_measured(spec, (0.1,) * 7, cores)
    assert all_measured == (0.5, 0.5, 0.5, 0.5, 8.0, inf, inf)
    one_measured = cores_while_measured(spec, (0.1, 0.0, 0.0, 0.0, 0.1, 0.1, 0.1), cores)
    assert one_measured[0] == 2.0  # the others of its machine were idle
