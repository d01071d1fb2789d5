"""`autodist check` on test hosts and on this machine: its report, and no leftovers."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import HOST_KINDS, LoopbackHosts
from tests.cluster.runs import MARK, all_gone, survivors, within

pytestmark = pytest.mark.processes

LIMIT = 180.0

# For any working directory of the tests.
HEARS_CTRL_C = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from autodist.cli.app import main
main()
"""


def test_faults_of_some_machines_keep_no_other_from_being_measured(tmp_path: Path) -> None:
    mark, folder = secrets.token_hex(8), tmp_path / "hosts"
    folder.mkdir()
    with HOST_KINDS[0](folder, 3, {MARK: mark}) as hosts:
        spec = hosts.spec(port=15000) if HOST_KINDS[0].__name__ == "NamespaceHosts" else hosts.spec()
        spec["ssh"]["host1"]["key_file"] = str(folder / "host_key")  # a key, but not the user's
        hosts.trust((hosts.hosts[0], hosts.hosts[2]))
        (tmp_path / "cluster.yml").write_text(json.dumps(spec))
        (tmp_path / "train.py").write_text("print('it is not run')\n")
        command = [sys.executable, "-m", "autodist", "check", "--json", "cluster.yml", "train.py"]
        done = subprocess.run(
            hosts.chief_command(command), cwd=tmp_path, env=os.environ | {MARK: mark}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
        assert all_gone(mark)
    assert done.returncode == 1, done.stderr
    reported = json.loads(done.stdout)
    chief, refused, unknown, fine = reported["machines"]
    assert [machine["is_reached"] for machine in reported["machines"]] == [True, False, False, True]
    assert "it accepts none of the keys offered" in refused["faults"][0]
    assert "its host key is not known" in unknown["faults"][0]
    for machine in (chief, fine):
        assert machine["faults"] == []
        assert machine["script"] == "same"
        assert machine["tensorflow"] == chief["tensorflow"]
        assert abs(machine["clock_ahead"]) <= machine["clock_uncertainty"] + 1e-3  # they share one clock
    (link,) = reported["links"]
    assert (link["one"], link["other"]) == (chief["address"], fine["address"])
    assert link["problem"] == ""
    assert 0 <= link["round_trip"] < 1  # 0 if the many turns took no longer than the few
    assert min(link["there"], link["back"]) > 1e6


def test_check_reaches_the_machines_by_the_ssh_program(tmp_path: Path) -> None:
    mark, folder = secrets.token_hex(8), tmp_path / "hosts"
    folder.mkdir()
    with HOST_KINDS[0](folder, 1, {MARK: mark}) as hosts:
        spec = hosts.spec() | {"transport": "openssh"}
        (tmp_path / "cluster.yml").write_text(json.dumps(spec))
        done = subprocess.run(
            hosts.chief_command([sys.executable, "-m", "autodist", "check", "--no-links", "--json", "cluster.yml"]),
            cwd=tmp_path, env=os.environ | {MARK: mark}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        assert all_gone(mark)
    machines = json.loads(done.stdout)["machines"]
    assert [machine["is_reached"] for machine in machines] == [True, True]
    assert [machine["faults"] for machine in machines] == [[], []]
    assert "transport" not in done.stderr


@pytest.mark.parametrize("option", ["DisableForwarding yes", "Banner none"])
def test_the_forwards_of_encrypt_are_checked(tmp_path: Path, option: str) -> None:
    mark, folder = secrets.token_hex(8), tmp_path / "hosts"
    folder.mkdir()
    with LoopbackHosts(folder, 1, {MARK: mark}, options=[option]) as hosts:
        (tmp_path / "cluster.yml").write_text(json.dumps(hosts.spec() | {"encrypt": "ssh"}))
        done = subprocess.run(
            hosts.chief_command([sys.executable, "-m", "autodist", "check", "--no-links", "--json", "cluster.yml"]),
            cwd=tmp_path, env=os.environ | {MARK: mark}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
        assert all_gone(mark)
    chief, machine = json.loads(done.stdout)["machines"]
    assert chief["faults"] == []
    is_refused = option.startswith("DisableForwarding")
    assert [("forwards no ports" in fault) for fault in machine["faults"]] == [True] * is_refused


def test_ctrl_c_while_links_are_measured_leaves_nothing(tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    (tmp_path / "cluster.yml").write_text("nodes: [{address: localhost, cpus: [0, 1], workers: 2}]")
    command = [sys.executable, "-c", HEARS_CTRL_C, "check", "cluster.yml"]
    with open(tmp_path / "said", "wb") as said:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=os.environ | {MARK: mark}, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            start_new_session=True,
        )  # fmt: skip
    try:
        assert within(60, lambda: len(survivors(mark)) >= 4)  # the check, the measuring, an agent, its guard
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(30) != 0
        assert all_gone(mark)
        assert "Traceback" not in (tmp_path / "said").read_text()
    finally:
        for pid in survivors(mark):
            os.kill(pid, signal.SIGKILL)
        process.wait()
