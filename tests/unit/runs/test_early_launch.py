"""The other workers of a restart start at the import of AutoDist, and join when the script creates its AutoDist."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autodist.cluster.script import Script
from autodist.resources import ResourceSpec
from autodist.runs.early_launch import VARIABLE, environment_of, launch_early
from autodist.runs.worker_launch import WorkerLaunch

SPEC = ResourceSpec.from_dict(
    {
        "nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}],
        "strategy": {"builder": "PS", "owner": 1},
        "checkpoint": {"folder": "checkpoints", "every_steps": 3},
        "max_restarts": 3,
    }
)
SCRIPT = Script(("-B", "train.py", "\udcff"), "/tmp", "/tmp/train.py", "digest", (("AUTODIST_X", "y"),))


def test_machines_and_script_reach_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[ResourceSpec, Script]] = []
    monkeypatch.setattr(WorkerLaunch, "begin_early", staticmethod(lambda *start: begun.append(start)))
    for name, value in environment_of(SPEC, SCRIPT).items():
        monkeypatch.setenv(name, value)
    launch_early()
    assert begun == [(SPEC, SCRIPT)]
    assert VARIABLE not in os.environ
    launch_early()
    assert len(begun) == 1


def test_code_that_is_in_no_file_or_in_a_copied_folder_is_not_started_early() -> None:
    copied = ResourceSpec.from_dict(SPEC.to_dict() | {"sync": {"folder": "."}})
    for spec, script in ((SPEC, replace(SCRIPT, pickled_code=b"code")), (SPEC, None), (copied, SCRIPT)):
        assert environment_of(spec, script) == {VARIABLE: ""}


# The chief waits for its worker where a script would import TensorFlow.
CHIEF = """
import os, sys, time
import autodist
from autodist.cluster.script import Script
from autodist.cluster.script_client import CONTROL_VARIABLE, ScriptClient
from autodist.resources import ResourceSpec
from autodist.runs import worker_launch
from autodist.runs.early_launch import environment_of
from autodist.runs.startup_progress import StartupProgress

if CONTROL_VARIABLE in os.environ:
    open("worker", "w").close()
    client = ScriptClient.from_environment()
    print("joined", client.payload, flush=True)
    client.wait_for_end()
    sys.exit()
spec = ResourceSpec.from_dict({"nodes": [{"address": "localhost", "cpus": [0, 1], "workers": 2}]})
if not worker_launch._early:
    variable = environment_of(spec, Script.of_this_process())
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | variable)
while not os.path.exists("worker"):
    time.sleep(0.01)
"""

TAKES = """
launch = worker_launch.WorkerLaunch.take_early(spec, 7, b"payload", StartupProgress(is_chief=True))
launch.wait()
launch.coordinator.finish()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("end", "said"), [(TAKES, "[localhost:1] joined b'payload'\n"), ("", "")], ids=["taken", "left"]
)
def test_a_worker_runs_before_the_chief_needs_it_and_ends_with_it(tmp_path: Path, end: str, said: str) -> None:
    (tmp_path / "train.py").write_text(CHIEF + end)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
