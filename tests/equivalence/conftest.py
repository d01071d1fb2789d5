"""One set of training runs for all tests of a session."""

from __future__ import annotations

import os

import pytest

from tests.equivalence.harness import Trainings


def pytest_configure(config: pytest.Config) -> None:
    told = "trains(cluster, *programs): what a test wants trained; without a cluster: on one device"
    config.addinivalue_line("markers", told)


@pytest.fixture(scope="session")
def trainings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """Collects the trainings of the selected tests beforehand, from their markers `trains(cluster, program, …)`."""
    wanted = [
        (mark.args[0], program)
        for item in request.session.items
        for mark in item.iter_markers("trains")
        for program in mark.args[1:]
    ]
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    directory = shared / "trainings"
    directory.mkdir(exist_ok=True)
    return Trainings(directory, wanted)
