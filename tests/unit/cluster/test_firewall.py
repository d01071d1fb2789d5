"""The rules of a firewall, and reasons that there is none; tests/cluster/test_encryption.py uses them in a kernel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autodist.cluster import firewall
from autodist.cluster.agent import find_facts
from autodist.cluster.firewall import NOT_PERMITTED, Firewall, FirewallError, drop_rules, table_commands
from autodist.cluster.protocol import Inspect

TO_PORT = 'iifname != "lo" tcp dport 15000'


def test_only_the_admitted_addresses_and_the_machine_itself_pass() -> None:
    both = ["10.0.0.2", "fd00::1", "10.0.0.1", "10.0.0.2"]
    assert drop_rules("15000", both) == [
        f"{TO_PORT} ip saddr != {{ 10.0.0.1, 10.0.0.2 }} drop",
        f"{TO_PORT} ip6 saddr != {{ fd00::1 }} drop",
    ]
    assert drop_rules("15000", ["10.0.0.1"])[1] == f"{TO_PORT} meta nfproto ipv6 drop"
    assert drop_rules("15000", ["fd00::1"])[0] == f"{TO_PORT} meta nfproto ipv4 drop"
    assert drop_rules("15000", []) == [f"{TO_PORT} drop"]


def test_a_table_is_created_whole_and_belongs_to_its_program() -> None:
    assert table_commands("t", 15000, []) == (
        "add table inet t { flags owner; }; "
        "add chain inet t input { type filter hook input priority -10; policy accept; }; "
        f"add rule inet t input {TO_PORT} drop"
    )


def as_nft(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Makes a shell script the `nft` of this machine."""
    program = folder / "nft"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(firewall, "_nft", lambda: str(program))


def test_a_missing_program_is_a_fault_for_root_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firewall, "_nft", lambda: None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    facts, held = find_facts(Inspect(None, "/", None, sets_firewall=True))
    assert held is not None
    held.release()
    (problem,) = facts.problems
    assert problem.startswith("`firewall: auto` needs `nft`, which is not installed there; install it (`apt install")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    facts, held = find_facts(Inspect(None, "/", None, sets_firewall=True))
    assert held is not None
    held.release()
    assert (facts.no_firewall, facts.problems) == (NOT_PERMITTED, ())


def test_without_the_right_to_change_the_firewall_that_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    as_nft(monkeypatch, tmp_path, "echo 'Operation not permitted (you must be root)' >&2; exit 1")
    assert firewall.why_not_permitted() == NOT_PERMITTED


def test_words_of_nft_are_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_nft(monkeypatch, tmp_path, "echo 'Error: syntax error, unexpected owner' >&2; exit 1")
    with pytest.raises(FirewallError, match=r"creates no table there \(Error: syntax error.*use Linux 5.12"):
        firewall.why_not_permitted()


def test_the_program_ends_when_the_table_is_released(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    as_nft(monkeypatch, tmp_path, f'[ "$1" = list ] && [ -s {ran} ] && exit; [ "$1" = -i ] && exec cat > {ran}; exit 1')
    table = Firewall(15000, ())
    assert ran.read_text().startswith("add table inet autodist_15000_")
    table.release()
    assert table.wait_until_removed()


def test_the_run_requests_no_firewall_unless_the_yaml_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firewall, "_nft", lambda: pytest.fail("not requested"))
    facts, held = find_facts(Inspect(None, "/", None))
    assert held is not None
    held.release()
    assert facts.no_firewall is None
