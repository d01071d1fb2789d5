"""Options of a command that override the script."""

from __future__ import annotations

from pathlib import Path

import pytest

from autodist.errors import ResourceSpecError, StrategyError
from autodist.resources import ResourceSpec
from autodist.runs.cli_overrides import VARIABLE, CliOverrides, local_workers, named_builder
from autodist.strategies import PS, AllReduce, chosen_builder

SAID = ResourceSpec.from_dict(
    {"nodes": [{"address": "10.0.0.1", "cpus": [0, 1, 2]}], "strategy": "PS", "batch": "per_worker", "end_timeout": 7}
)


def test_nothing_asked_leaves_what_the_script_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    asked = CliOverrides.of_this_process()
    assert asked == CliOverrides()
    assert asked.spec(lambda: SAID) is SAID
    assert asked.builder(lambda: PS(owner=0)) == PS(owner=0)


def test_the_display_of_errors_needs_no_machines() -> None:
    assert not CliOverrides(traceback=True).is_set
    assert CliOverrides(workers=2, traceback=True).is_set


def test_the_options_that_set_the_machines_are_named_for_messages() -> None:
    assert CliOverrides(strategy="PS", traceback=True).machines is None
    assert CliOverrides(workers=2, replicas=3).machines == "--workers 2 --replicas 3"
    assert CliOverrides(cluster="two.yml").machines == "--cluster two.yml"


def test_a_process_finds_what_was_asked_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = CliOverrides(workers=2, replicas=3, strategy="Parallax")
    for name, value in asked.environment().items():
        monkeypatch.setenv(name, value)
    assert CliOverrides.of_this_process() == asked


def test_local_workers_keep_what_the_script_s_yaml_says_beside_its_machines() -> None:
    spec = CliOverrides(workers=2, replicas=2).spec(lambda: SAID)
    assert [(w.name, w.devices) for w in spec.workers] == [
        ("localhost:0", ("cpu:0", "cpu:1")),
        ("localhost:1", ("cpu:0", "cpu:1")),
    ]
    assert (spec.batch, spec.end_timeout) == ("per_worker", 7)
    assert chosen_builder(None, spec.strategy) == PS()


def test_workers_alone_have_a_replica_each_and_replicas_alone_one_worker() -> None:
    assert [w.devices for w in CliOverrides(workers=2).spec(lambda: SAID).workers] == [("cpu:0",), ("cpu:0",)]
    assert [w.devices for w in CliOverrides(replicas=2).spec(lambda: SAID).workers] == [("cpu:0", "cpu:1")]


def test_a_file_s_machines_come_with_its_strategy(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yml"
    path.write_text("nodes: [{address: localhost}]\nstrategy: Parallax\n")
    spec = CliOverrides(cluster=str(path)).spec(lambda: SAID)
    assert spec.strategy is not None and spec.strategy.builder == "Parallax"


def test_gpus_are_dealt_out_where_there_are_enough() -> None:
    assert [w.devices for w in local_workers(2, None, 4).workers] == [("gpu:0", "gpu:1"), ("gpu:2", "gpu:3")]
    with pytest.raises(ResourceSpecError, match="2 workers need 6 GPUs, one for each replica, and TensorFlow sees 4"):
        local_workers(2, 3, 4)


def test_a_strategy_is_a_builder_s_name_or_the_section_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "strategy.yml"
    path.write_text("strategy: {builder: PS, ownr: 1}\n")
    assert isinstance(named_builder("AllReduce"), AllReduce)
    with pytest.raises(StrategyError, match=rf"{path}:1: .*no option ownr"):
        named_builder(str(path))
    with pytest.raises(StrategyError, match="There is no builder named Paralax. Did you mean Parallax"):
        named_builder("Paralax")
    with pytest.raises(ResourceSpecError, match="cannot be read"):
        named_builder(str(tmp_path / "missing.yml"))


@pytest.mark.parametrize("workers, replicas", [(0, None), (None, 0), (-1, 1)])
def test_no_workers_are_refused(workers: int | None, replicas: int | None) -> None:
    with pytest.raises(ResourceSpecError, match="give 1 or more"):
        CliOverrides(workers=workers, replicas=replicas)
