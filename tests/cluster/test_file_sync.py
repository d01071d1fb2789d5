"""File sync to another machine over real SFTP, and a run that syncs before it starts."""

from __future__ import annotations

import dataclasses
import secrets
from pathlib import Path

import pytest

from autodist.cluster.file_sync import sync_folder
from autodist.cluster.folder import find_files
from autodist.cluster.sftp_folder import SyncResult
from autodist.cluster.transport import ssh_settings
from autodist.errors import ClusterError
from autodist.resources import ResourceSpec
from tests.cluster.hosts import LoopbackHosts
from tests.cluster.runs import MARK, Run

pytestmark = [pytest.mark.processes, pytest.mark.ssh]

by_each_transport = pytest.mark.parametrize("transport", ["paramiko", "openssh"])


@by_each_transport
def test_a_folder_is_synced_over_sftp_and_a_run_syncs_it_first(tmp_path: Path, transport: str) -> None:
    (tmp_path / "hosts").mkdir()
    environment = {MARK: secrets.token_hex(8)}
    with LoopbackHosts(tmp_path / "hosts", 1, environment, ["Subsystem sftp internal-sftp"]) as hosts:
        here, there = tmp_path / "here", tmp_path / "far" / "there"
        (here / "package").mkdir(parents=True)
        (here / "package" / "model.py").write_text("model")
        (here / "large.bin").write_bytes(secrets.token_bytes(3 << 20))
        spec = ResourceSpec.from_dict(hosts.spec() | {"transport": transport})
        settings = ssh_settings(spec, spec.nodes[1])
        assert settings is not None

        def brought(target: Path) -> SyncResult:
            return sync_folder(settings, find_files(str(here), ()), (str(here), str(target)), 10, lambda: False)

        assert brought(there) == SyncResult(files=2, bytes=5 + (3 << 20))
        assert (there / "large.bin").read_bytes() == (here / "large.bin").read_bytes()
        assert brought(there) == SyncResult(unchanged=2)
        (here / "large.bin").unlink()
        assert brought(there) == SyncResult(unchanged=1, removed=1)
        with pytest.raises(ClusterError, match=r"/proc/nowhere"):
            brought(Path("/proc/nowhere"))
        unknown = dataclasses.replace(settings, port=1, retry_limit=0)
        with pytest.raises(ClusterError, match="connection refused"):
            sync_folder(unknown, {}, (str(here), str(there)), 10, lambda: False)

        # The machines of the test share their files.
        cluster = hosts.spec() | {"sync": {"folder": str(here)}, "transport": transport}
        chief = "coordinator.finish()"
        with Run(tmp_path / "run", chief, "worker_client.wait_for_end()", cluster, mark=environment[MARK]) as run:
            assert run.wait(60) == 0, run.stderr
            run.assert_gone(0)
        cluster["sync"]["folder"] = str(tmp_path / "absent")
        with Run(tmp_path / "refused", chief, "worker_client.wait_for_end()", cluster, mark=environment[MARK]) as run:
            assert run.wait(60) == 1
            run.assert_gone(0)
        assert f"sync: {tmp_path / 'absent'} does not exist" in run.stderr


@by_each_transport
def test_a_server_without_sftp_is_reported_with_the_fix(tmp_path: Path, transport: str) -> None:
    (tmp_path / "hosts").mkdir()
    with LoopbackHosts(tmp_path / "hosts", 1) as hosts:
        spec = ResourceSpec.from_dict(hosts.spec() | {"transport": transport})
        settings = ssh_settings(spec, spec.nodes[1])
        assert settings is not None
        with pytest.raises(ClusterError, match="offers no SFTP, .* `Subsystem sftp internal-sftp`"):
            sync_folder(settings, {}, (str(tmp_path), str(tmp_path / "there")), 10, lambda: False)
