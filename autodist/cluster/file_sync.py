"""Brings a folder of the chief's machine to the others, all at once, before a run starts."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import paramiko

from autodist.cluster.folder import LocalFile, find_files
from autodist.cluster.preflight import table
from autodist.cluster.sftp_folder import Bringing, Brought, StoppedError
from autodist.cluster.ssh_errors import UnreachableError
from autodist.cluster.ssh_reach import Machine, reach
from autodist.cluster.ssh_settings import SSHSettings
from autodist.cluster.transport import ssh_settings
from autodist.errors import ClusterError, MachinesAwayError
from autodist.resources import Node, ResourceSpec

_log = logging.getLogger("autodist.cluster")

_LOOK_INTERVAL = 0.1


def bring_to_all(spec: ResourceSpec, is_stopped: Callable[[], bool]) -> None:
    """Brings the folder that the spec names to all machines that are reached over SSH, all at once, and tells of it.

    Args:
        spec: the machines.
        is_stopped: asked now and then whether to end.

    Raises:
        MachinesAwayError: all that is wrong is that machines do not answer.
        ClusterError: with the fault of every machine that has one.
    """
    if spec.sync is None:
        return
    if spec.is_given:
        _log.warning("sync is left out: a scheduler has started the processes, and nothing is reached over SSH")
        return
    nodes = [node for node in spec.nodes if spec.ssh_group(node) is not None]
    if not nodes:
        return
    folder, files = spec.sync.folder, find_files(spec.sync.folder, spec.sync.exclude)
    interrupted = False

    def bring_to(node: Node) -> Brought | ClusterError:
        settings = ssh_settings(spec, node)
        assert settings is not None, "it is reached over SSH"
        try:
            return bring(settings, files, (folder, folder), spec.silence_timeout, lambda: interrupted or is_stopped())
        except ClusterError as error:
            return error

    with ThreadPoolExecutor(len(nodes)) as pool:
        try:
            brought = list(pool.map(bring_to, nodes))
        except BaseException:
            interrupted = True  # before the pool waits for its threads
            raise
    came = {node.address: one for node, one in zip(nodes, brought, strict=True)}
    for address, one in came.items():
        if isinstance(one, Brought):
            _tell(address, folder, one)
    faults = {address: one for address, one in came.items() if isinstance(one, ClusterError)}
    if faults:
        raise _not_brought(spec, folder, faults)


def _not_brought(spec: ResourceSpec, folder: str, faults: Mapping[str, ClusterError]) -> ClusterError:
    told = table([(address, str(error)) for address, error in faults.items()])
    problem = f"The folder {folder} cannot be brought to all machines:\n{told}"
    if all(isinstance(error, UnreachableError) for error in faults.values()):
        away = tuple(worker.name for worker in spec.workers if worker.node.address in faults)
        return MachinesAwayError(problem, away)
    return ClusterError(problem)


def bring(
    settings: SSHSettings,
    files: Mapping[str, LocalFile],
    folders: tuple[str, str],
    silence_timeout: float,
    is_stopped: Callable[[], bool],
) -> Brought:
    """Brings files to one machine.

    Args:
        settings: how it is reached.
        files: by path below the folder.
        folders: the one here, and the one there.
        silence_timeout: seconds without a word after which the machine counts as lost.
        is_stopped: asked now and then whether to end.

    Raises:
        ClusterError: with the machine, the file, the cause and the mend.
    """

    def stays_for(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not is_stopped() and time.monotonic() < until:
            time.sleep(_LOOK_INTERVAL)
        return not is_stopped()

    with reach(settings, silence_timeout, stays_for) as machine:
        try:
            sftp = machine.open_sftp()
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise ClusterError(
                "its SSH server offers no SFTP, by which the folder under `sync` is brought: let its sshd_config have "
                "`Subsystem sftp internal-sftp`, or bring the code yourself and leave out `sync`"
            ) from error
        channel = sftp.get_channel()
        assert channel is not None, "it is open"
        channel.settimeout(silence_timeout)
        try:
            return Bringing(sftp, *folders, files, is_stopped, lambda: _free(machine, folders[1])).run()
        except StoppedError as error:
            raise ClusterError("the run was ended before all files were there") from error
        except (TimeoutError, EOFError, paramiko.SSHException) as error:
            raise ClusterError(
                f"the connection was lost on the way ({type(error).__name__}: {error}); see whether the network is up, "
                "and start again: what is there by now is not brought again"
            ) from error


def _tell(address: str, folder: str, brought: Brought) -> None:
    """Says what was done on one machine."""
    told = f"brought {brought.files} of {brought.files + brought.alike} files ({brought.bytes} bytes) to {folder}"
    if brought.removed:
        told += f", removed {brought.removed} that are gone here"
    _log.info("%s: %s", address, told)
    if brought.kept:
        _log.warning(
            "%s: %s had been brought there and is gone here, but was changed there since, and stays; remove it there "
            "if it is not wanted.", address, ", ".join(brought.kept[:5]),
        )  # fmt: skip


def _free(machine: Machine, target: str) -> int | None:
    """Free bytes of the file system of a path there; None where that cannot be known."""
    with contextlib.suppress(ClusterError, paramiko.SSHException, OSError, EOFError, ValueError, IndexError):
        return int(machine.ask(["df", "-Pk", target], 5).decode().splitlines()[-1].split()[3]) * 1024
    return None
