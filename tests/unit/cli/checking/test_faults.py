"""The faults of a machine, and their fixes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autodist.cli.checking.check_machines import CheckedMachine
from autodist.cli.checking.messages import SeenGPUs
from autodist.cli.checking.report import faults_of, notes_of, usable
from autodist.resources import ResourceSpec
from autodist.runtime.clocks import ClockOffset
from tests.unit.cli.checking.fakes import HARDWARE, found, lost

GPUS = ResourceSpec.from_dict({"nodes": [{"address": "10.0.0.1", "gpus": [0, 1, 2]}]})


def faults(one: CheckedMachine, *others: CheckedMachine, script: str | None = None) -> list[str]:
    return faults_of(one, [found(), one, *others], script)


def test_machines_alike_have_no_faults() -> None:
    assert faults(found(1), found(2), script="/train.py") == []
    assert list(notes_of(found(1))) == []


@pytest.mark.parametrize(
    ("differs", "words"),
    [
        ({"tensorflow": "2.20.0"}, ["TensorFlow is 2.20.0, on the chief 2.21.0", "pip install tensorflow==2.21.0"]),
        ({"digest": "ffff"}, ["the script /train.py differs from", "copy that there"]),
        ({"problems": ("port 15000 is taken",)}, ["port 15000 is taken"]),
    ],
)
def test_input_that_a_run_would_refuse_is_a_fault(differs: dict[str, Any], words: list[str]) -> None:
    (fault,) = faults(found(1, **differs), script="/train.py")
    assert all(word in fault for word in words)


def test_every_fault_of_a_machine_is_reported() -> None:
    bad = found(1, tensorflow=None, packages={}, problems=("no script",), unreachable={"10.0.0.1:15000": "no answer"})
    assert len(faults(bad)) == 4


def test_ports_that_cannot_be_reached_are_reported_by_machine_with_who_has_to_admit_whom() -> None:
    others = found(0), found(2)
    closed = found(1, unreachable={"10.0.0.1:15000": "no answer within 5 s", "10.0.0.3:15000": "no answer within 5 s"})
    first, second = faults_of(closed, [others[0], closed, others[1]], None)
    assert first.startswith("it cannot connect to 10.0.0.1:15000: no answer within 5 s; let the firewall of 10.0.0.1")
    assert "admit 10.0.0.2 to these ports" in first
    assert "10.0.0.3:15000" in second


def test_a_machine_that_does_not_have_its_own_address_is_reported_so() -> None:
    own = found(1, unreachable={"10.0.0.2:15000": "Connection refused"})
    (fault,) = faults_of(own, [found(), own], None)
    assert "set the node's address to the one that the machine has on the network, instead of 10.0.0.2" in fault


def test_a_loopback_address_beside_others_is_reported_once_at_its_node() -> None:
    spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "chief": True}, {"address": "10.0.0.2"}]})
    local, other = found(0, spec), found(1, spec, unreachable={"127.0.0.1:15000": "Connection refused"})
    (fault,) = faults_of(local, [local, other], None)
    assert "other machines (10.0.0.2) cannot reach it under this address" in fault
    assert faults_of(other, [local, other], None) == []


def test_gpus_that_tensorflow_does_not_see_are_a_fault_with_its_reason() -> None:
    assert faults(found(0, GPUS, seen_gpus=SeenGPUs(count=3))) == []
    (fault,) = faults(found(0, GPUS, seen_gpus=SeenGPUs(count=1, reason="CUDA_VISIBLE_DEVICES is '0'")))
    assert "there is no GPU 1, 2: TensorFlow sees 1 there: CUDA_VISIBLE_DEVICES is '0'; fix that, or name 0" in fault
    (fault,) = faults(found(0, GPUS, seen_gpus=SeenGPUs(count=0)))
    assert "TensorFlow sees none there; fix that, or name `cpus` instead of `gpus`" in fault


@pytest.mark.parametrize(("offset", "words"), [(3.25, "3.2 s ahead of the chief's"), (-86400, "86400.0 s behind")])
def test_a_clock_that_differs_is_worth_a_word_and_no_fault(offset: float, words: str) -> None:
    skewed = found(1, clock=ClockOffset(offset, 0.01))
    assert faults(skewed) == []
    (note,) = notes_of(skewed)
    assert words in note


def test_an_offset_within_its_uncertainty_is_not_worth_a_word() -> None:
    assert list(notes_of(found(1, clock=ClockOffset(3.0, 2.5)))) == []


def test_little_disk_and_a_host_key_that_is_not_checked_are_worth_a_word() -> None:
    full = found(1, hardware=replace(HARDWARE, disk_free=1 << 20))
    assert [note.split(",")[0] for note in notes_of(full, takes_any_key=True)] == [
        "its host key is not checked (`host_key_checking: false`)",
        "less than 1 GiB is free on the disk where the script runs",
    ]


def test_a_firewall_that_cannot_be_set_is_worth_a_word() -> None:
    assert list(notes_of(found(no_firewall="no root"))) == ["`firewall: auto` sets no firewall there: no root"]


def test_links_are_measured_between_machines_without_a_fault_if_the_chief_is_one() -> None:
    assert [one.name for one in usable([found(0), lost(1, "refused"), found(2)], None)] == ["10.0.0.1", "10.0.0.3"]
    assert usable([found(0, problems=("port 15000 is taken",)), found(1), found(2)], None) == []
