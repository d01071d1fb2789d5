"""A Slurm cluster on this machine: its real daemons, on three machines that are namespaces. Needs root."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.namespaces import Namespaces
from tests.cluster.runs import within

CONTROL, NODES = "control", ("n1", "n2")
_MACHINES = (CONTROL, *NODES)
_START_LIMIT, _CLIENT_LIMIT = 30, 30
_SBIN = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
_NEEDED = ("munged", "slurmctld", "slurmd", "srun", "ip", "ss", "setpriv", "unshare")

# No cgroups, which a container may lack: a job is the processes below its step. Nodes count as having four cores each.
# A requeued job starts again once its credential has expired, by default after two minutes.
_CONFIG = """
ClusterName=autodist
SlurmctldHost={control}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
ReturnToService=2
KillWait=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

# In namespaces of mounts and host names of its own, so nothing of this machine changes.
_ON_MACHINE = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


def missing() -> list[str]:
    """Returns the daemons and commands that this machine lacks."""
    return [name for name in _NEEDED if shutil.which(name, path=_SBIN) is None]


class Slurm(contextlib.ExitStack):
    """slurmctld on `control`, where jobs are submitted, and slurmd on the nodes, from `__enter__` to the end.

    A node is a namespace of processes, too: `kill_node` ends it as if its power failed.
    """

    def __enter__(self) -> Slurm:
        try:
            self._folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="autodist-slurm-")))
            self._machines = self.enter_context(Namespaces(len(_MACHINES), "10.201.0"))
            self._configure()
            self._start("munged", self._munged())
            assert within(_START_LIMIT, (self._folder / "munge.socket").exists), self._read("munged.out")
            self._start(CONTROL, self._on(CONTROL, ["slurmctld", "-D"], "--pid"))
            self._nodes = {
                node: self._start(node, self._on(node, ["slurmd", "-D", "-N", node], "--pid")) for node in NODES
            }
            self.wait_for_nodes()
        except BaseException:
            self.close()
            raise
        return self

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the commands of Slurm need."""
        return {"SLURM_CONF": str(self._folder / "slurm.conf")}

    def address(self, machine: str) -> str:
        """Returns the address of a machine."""
        return self._machines.address(_MACHINES.index(machine))

    def command(self, command: Sequence[str], machine: str = CONTROL) -> list[str]:
        """Returns the command that runs `command` on a machine; the process keeps its id."""
        return self._on(machine, command)

    def ask(self, *command: str, machine: str = CONTROL) -> str:
        """Runs a command on a machine and returns its output."""
        done = subprocess.run(
            self.command(command, machine), check=False, env=os.environ | self.environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=_CLIENT_LIMIT,
        )  # fmt: skip
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def about(self, job: str) -> dict[str, str]:
        """Returns the fields of a job, as `scontrol show job` prints them."""
        fields = self.ask("scontrol", "-o", "show", "job", job).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def wait_for_state(self, job: str, states: Sequence[str], limit: float) -> dict[str, str]:
        """Waits until a job is in one of the states, and returns its fields."""
        assert within(limit, lambda: self.about(job)["JobState"] in states), (self.about(job), self.log())
        return self.about(job)

    def wait_for_nodes(self, limit: float = _START_LIMIT) -> None:
        """Waits until all nodes are free, without a job that still ends."""
        free = ["idle"] * len(NODES)
        assert within(limit, lambda: self._states() == free), (self._states(), self.log())

    def listening(self, node: str) -> set[str]:
        """Returns the programs that listen at ports of a node's network."""
        lines = self.ask("ss", "-Hltnp", machine=node).splitlines()
        return {line.partition('(("')[2].partition('"')[0] for line in lines}

    def kill_node(self, node: str) -> None:
        """Ends all processes of a node at once."""
        _kill_namespace(self._nodes[node])

    def log(self) -> str:
        """Returns the last lines of all daemons."""
        return "\n".join(self._read(file.name) for file in sorted(self._folder.glob("*.log")))

    def _read(self, name: str) -> str:
        return f"{name}:\n" + "\n".join((self._folder / name).read_text().splitlines()[-15:])

    def _states(self) -> list[str]:
        with contextlib.suppress(AssertionError):  # slurmctld is not there yet
            return self.ask("sinfo", "-h", "-N", "-o", "%T").split()
        return []

    def _configure(self) -> None:
        self._folder.chmod(0o711)  # munged requires that all may reach its socket
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self._folder / name).mkdir()
        addresses = {machine: self.address(machine) for machine in _MACHINES}
        nodes = "\n".join(f"NodeName={node} NodeAddr={addresses[node]} CPUs=4 State=UNKNOWN" for node in NODES)
        config = _CONFIG.format(folder=self._folder, control=CONTROL, address=addresses[CONTROL], nodes=nodes)
        (self._folder / "slurm.conf").write_text(config)
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        hosts = {"localhost": "127.0.0.1", **addresses}
        (self._folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in hosts.items()))
        key = self._folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))

    def _munged(self) -> list[str]:
        files = [f"--{what}-file={self._folder / f'munge.{what}'}" for what in ("key", "pid", "log", "seed")]
        return ["munged", "--foreground", f"--socket={self._folder / 'munge.socket'}", *files]

    def _on(self, machine: str, command: Sequence[str], *kinds: str) -> list[str]:
        kinds = (*kinds, "--fork", "--kill-child", "--mount-proc") if kinds else ()
        words = ["unshare", "--uts", *kinds, "sh", "-c", _ON_MACHINE, "sh", machine, str(self._folder / "hosts")]
        return self._machines.command_on(_MACHINES.index(machine), [*words, *command])

    def _start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with open(self._folder / f"{name}.out", "wb") as out:
            daemon = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],  # ends if the tests are killed
                env=os.environ | self.environment | {"PATH": _SBIN}, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
        self.callback(_kill_namespace, daemon)
        return daemon


def _kill_namespace(daemon: subprocess.Popen[bytes]) -> None:
    """Kills a daemon; if it runs under `unshare`, the first process of its namespace, with which all others end."""
    for first in _children(daemon.pid) or [daemon.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL)
    daemon.wait(_CLIENT_LIMIT)


def _children(process: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return []
