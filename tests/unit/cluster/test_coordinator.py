"""The coordinator's checks of the chief's own machine, where it starts no process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autodist.cluster.coordinator import Coordinator
from autodist.cluster.script import Script
from autodist.cluster.start import content_digest
from autodist.errors import ClusterError
from autodist.resources import ResourceSpec

ALONE = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0]}]})


def test_script_that_was_changed_since_its_start_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("print(1)")
    script = Script((str(file),), str(tmp_path), str(file), content_digest(str(file)))
    coordinator = Coordinator(ALONE, pytest.fail, script)
    coordinator.prepare()
    coordinator.reserved_port.release()
    file.write_text("print(2)")
    with pytest.raises(ClusterError, match=f"localhost  the script {file} differs from .*start it again"):
        Coordinator(ALONE, pytest.fail, script).prepare()


def test_ssh_is_loaded_by_those_who_need_it_alone() -> None:
    code = "import sys, autodist.cluster.coordinator; sys.exit('paramiko' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
