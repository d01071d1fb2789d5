"""The training on one device, with which scenarios compare, and a table of the scenarios, at the end."""

from __future__ import annotations

import pytest
from rich.console import Console
from rich.table import Table

from tests.schedulers.training import Training

_EXPECTED = "expected"


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A training on one device; its weights are named "model"."""
    training = Training(tmp_path_factory.mktemp("alone"))
    assert training.start(["autodist", "run", "--workers", "1", "train.py"], {}).wait(200) == 0, training.output()
    return training


@pytest.fixture(autouse=True)
def _scenario(request: pytest.FixtureRequest) -> None:
    request.node.user_properties.append((_EXPECTED, request.function.__doc__))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [
        (report, dict(report.user_properties)[_EXPECTED])
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call" and _EXPECTED in dict(report.user_properties)
    ]
    if not reports:
        return
    table = Table("scenario", "expected", "result", "seconds")
    for report, expected in reports:
        name = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        table.add_row(name.replace("[", " (").replace("]", ")"), expected, report.outcome, f"{report.duration:.0f}")
    Console(width=118).print(table)
