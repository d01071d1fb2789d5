"""Two machines for `mpirun`, which are namespaces; a command replaces SSH between them. Needs root."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.namespaces import Namespaces

PORT = 15_000


@dataclass(frozen=True)
class Launcher:
    """The `mpirun` of an implementation of MPI.

    Attributes:
        name: its name in AutoDist's messages.
        command: the command.
        options: its options for two processes on two hosts; {hosts} and {shell} stand for these and for the command
            that replaces SSH.
        variable: its option that sets AUTODIST_CHIEF in the processes, to {chief}.
        interrupt: the signal that it sends its processes at Ctrl-C.
        killed: its message about a process that was killed.
    """

    name: str
    command: str
    options: str
    variable: str
    interrupt: str
    killed: str

    @property
    def is_missing(self) -> bool:
        return shutil.which(self.command) is None


OPEN_MPI = Launcher(
    "Open MPI",
    "mpirun.openmpi",
    # Few cores and no other interface are assumed.
    "--allow-run-as-root --oversubscribe --bind-to none --host {hosts} --mca plm_rsh_agent {shell} "
    "--mca oob_tcp_if_include net0",
    "-x AUTODIST_CHIEF={chief}",
    "SIGTERM",
    "exited on signal 9 (Killed)",
)
HYDRA = Launcher(
    "PMI",
    "mpiexec.hydra",
    "-launcher rsh -launcher-exec {shell} -hosts {hosts} -iface net0",
    "-genv AUTODIST_CHIEF {chief}",
    "SIGINT",
    "=   EXIT CODE: 9",
)


class Machines(contextlib.ExitStack):
    """Two machines, from `__enter__` to the end.

    Args:
        folder: for the command that replaces SSH.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __enter__(self) -> Machines:
        self._namespaces = self.enter_context(Namespaces(2, "10.202.0"))
        shells = {n: shlex.join(self._namespaces.command_on(n, ["sh"])) for n in range(2)}
        cases = "".join(f'{self._namespaces.address(n)}) shift; exec {on} -c "$*" ;;\n' for n, on in shells.items())
        shell = self._folder / "shell"
        shell.write_text(f'#!/bin/sh\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\ncase "$1" in\n{cases}esac\n')
        shell.chmod(0o700)
        return self

    def command(self, launcher: Launcher, command: list[str]) -> list[str]:
        """Returns the command that runs `command` once on each machine; started on the first one."""
        hosts = [self._namespaces.address(number) for number in range(2)]
        options = f"{launcher.options} {launcher.variable}".format(
            hosts=",".join(hosts), shell=self._folder / "shell", chief=f"{hosts[0]}:{PORT}"
        )
        return self._namespaces.command_on(0, [launcher.command, *options.split(), "-np", "2", *command])

    def listening(self) -> str:
        """Returns the ports of the machines at which a process listens, as `ss` prints them."""
        commands = [self._namespaces.command_on(number, ["ss", "-Hltnp"]) for number in range(2)]
        return "".join(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout for command in commands
        )
