"""Open ports and files by audience, and the configuration lines that close them."""

from __future__ import annotations

from dataclasses import replace

from autodist.cli.checking.exposure import exposure_of
from autodist.cli.checking.messages import Interface
from autodist.resources import ResourceSpec
from tests.unit.cli.checking.fakes import HARDWARE, THREE, found, lost

BASE = 'nft add rule inet filter input iifname != "lo" tcp dport '


def test_the_line_admits_the_other_machines_alone() -> None:
    exposure = exposure_of(found(0), [found(1), lost(2, "refused")])
    assert exposure is not None
    assert exposure.commands == (
        BASE + "15000 ip saddr != { 10.0.0.2, 10.0.0.3 } drop",
        BASE + "15000 meta nfproto ipv6 drop",
    )
    assert exposure.text() == "port 15000: open on 10.0.0.1/24 (eth0) to anyone."


def test_of_machines_with_ipv6_the_other_family_is_closed() -> None:
    spec = ResourceSpec.from_dict(
        {"nodes": [{"address": "fd00::1", "chief": True, "port": 15000}, {"address": "fd00::2"}]}
    )
    exposure = exposure_of(found(0, spec), [found(1, spec)])
    assert exposure is not None
    assert exposure.commands == (BASE + "15000 meta nfproto ipv4 drop", BASE + "15000 ip6 saddr != { fd00::2 } drop")


def test_of_a_machine_alone_with_several_workers_all_is_closed() -> None:
    spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2, "port": 15000}]})
    exposure = exposure_of(found(0, spec), [])
    assert exposure is not None
    assert exposure.commands == (BASE + "15000-15001 drop",)
    free = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]})
    exposure = exposure_of(found(0, free), [])
    assert exposure is not None
    assert exposure.commands == (BASE + "20000-31999 drop",)


def test_what_the_run_closes_by_itself_is_not_exposed() -> None:
    keys = {"firewall": "auto", "encrypt": "ssh"}
    spec = THREE.model_copy(update=keys)
    assert exposure_of(found(0), [found(1)], spec) is None
    without_root = exposure_of(found(0, no_firewall="no root"), [found(1)], spec)
    assert without_root is not None
    assert without_root.commands == (BASE + "15000 drop",)


def test_a_worker_alone_opens_nothing() -> None:
    assert exposure_of(found(0, ResourceSpec.local()), []) is None


def test_of_a_machine_that_was_not_reached_nothing_is_reported() -> None:
    assert exposure_of(lost(1, "refused"), [found(0)]) is None


def test_an_address_of_the_internet_is_reported() -> None:
    public = replace(HARDWARE, interfaces=(Interface(name="eth1", address="8.8.8.8/24"),))
    exposure = exposure_of(found(0, hardware=public), [found(1)])
    assert exposure is not None
    assert exposure.is_public
    assert "At least one is an address of the internet." in exposure.text()
