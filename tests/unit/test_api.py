from __future__ import annotations

import sys

import pytest

from autodist import AutoDist, ResourceSpec
from autodist.errors import ClusterError

KERNEL = ["python", "-m", "ipykernel_launcher", "-f", "kernel.json"]


def spec_of(workers: int) -> ResourceSpec:
    return ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": workers}]})


def test_several_workers_are_refused_in_a_notebook_and_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", KERNEL)
    with pytest.raises(ClusterError, match="ipykernel_launcher runs here.*Put the code into a file.*or use one worker"):
        AutoDist(resource_spec=spec_of(2))
    assert AutoDist(resource_spec=spec_of(1)).num_replicas == 2
