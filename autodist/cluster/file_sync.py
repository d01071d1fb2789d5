"""Copies a folder of the chief's machine to all other machines in parallel before a run starts."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import paramiko

from autodist.cluster.folder import LocalFile, find_files
from autodist.cluster.preflight import table
from autodist.cluster.sftp_folder import FolderCopy, StoppedError, SyncResult
from autodist.cluster.ssh_errors import UnreachableError
from autodist.cluster.ssh_machine import SSHMachine
from autodist.cluster.ssh_settings import SSHSettings
from autodist.cluster.ssh_transports import reach
from autodist.cluster.transport import ssh_settings
from autodist.errors import ClusterError, MachinesAwayError
from autodist.resources import Node, ResourceSpec

_log = logging.getLogger("autodist.cluster")

_POLL_INTERVAL = 0.1


def sync_to_all(spec: ResourceSpec, is_stopped: Callable[[], bool]) -> None:
    """Copies the folder under `sync` to all machines reached over SSH; see `sync_to`."""
    if spec.sync is None:
        return
    if spec.is_given:
        _log.warning("sync is skipped: a scheduler has started the processes, and no machine is reached over SSH")
        return
    sync_to(spec, [node for node in spec.nodes if spec.ssh_group(node) is not None], is_stopped)


def sync_to(
    spec: ResourceSpec, nodes: Sequence[Node], is_stopped: Callable[[], bool], logs_unchanged: bool = True
) -> None:
    """Copies the folder under `sync` to machines reached over SSH, in parallel, and logs the result for each.

    Args:
        spec: the machines; `sync` is set.
        nodes: the machines to copy to.
        is_stopped: called periodically; returns True to cancel.
        logs_unchanged: False to log nothing for a machine that already had all files.

    Raises:
        MachinesAwayError: the only faults are machines that do not answer.
        ClusterError: lists the fault of every machine that has one.
    """
    assert spec.sync is not None, "there is a folder to copy"
    if not nodes:
        return
    folder, files = spec.sync.folder, find_files(spec.sync.folder, spec.sync.exclude)
    interrupted = False

    def sync_one(node: Node) -> SyncResult | ClusterError:
        settings = ssh_settings(spec, node)
        assert settings is not None, "the machine is reached over SSH"
        try:
            return sync_folder(
                settings, files, (folder, folder), spec.silence_timeout, lambda: interrupted or is_stopped()
            )
        except ClusterError as error:
            return error

    if len(nodes) == 1:  # without a pool, for whose threads Python waits at the end of the script
        results = [sync_one(nodes[0])]
    else:
        with ThreadPoolExecutor(len(nodes)) as pool:
            try:
                results = list(pool.map(sync_one, nodes))
            except BaseException:
                interrupted = True  # before the pool waits for its threads
                raise
    by_address = {node.address: result for node, result in zip(nodes, results, strict=True)}
    for address, result in by_address.items():
        if isinstance(result, SyncResult) and (logs_unchanged or result.files or result.removed):
            _log_result(address, folder, result)
    faults = {address: result for address, result in by_address.items() if isinstance(result, ClusterError)}
    if faults:
        raise _sync_error(spec, folder, faults)


def _sync_error(spec: ResourceSpec, folder: str, faults: Mapping[str, ClusterError]) -> ClusterError:
    lines = table([(address, str(error)) for address, error in faults.items()])
    problem = f"The folder {folder} cannot be copied to all machines:\n{lines}"
    if all(isinstance(error, UnreachableError) for error in faults.values()):
        away = tuple(worker.name for worker in spec.workers if worker.node.address in faults)
        return MachinesAwayError(problem, away)
    return ClusterError(problem)


def sync_folder(
    settings: SSHSettings,
    files: Mapping[str, LocalFile],
    folders: tuple[str, str],
    silence_timeout: float,
    is_stopped: Callable[[], bool],
) -> SyncResult:
    """Copies files to one machine.

    Args:
        settings: SSH settings of the machine.
        files: files to copy, by path below the folder.
        folders: the local folder, and the remote one.
        silence_timeout: seconds without a response after which the machine counts as lost.
        is_stopped: called periodically; returns True to cancel.

    Raises:
        ClusterError: names the file, the cause and the fix.
    """

    def wait_while_needed(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not is_stopped() and time.monotonic() < until:
            time.sleep(_POLL_INTERVAL)
        return not is_stopped()

    with reach(settings, silence_timeout, wait_while_needed) as machine:
        try:
            sftp = machine.open_sftp()
        except (paramiko.SSHException, OSError, EOFError) as error:
            raise ClusterError(
                "its SSH server offers no SFTP, which copies the folder under `sync`: add `Subsystem sftp "
                "internal-sftp` to its sshd_config, or copy the code yourself and leave out `sync`"
            ) from error
        channel = sftp.get_channel()
        assert channel is not None, "the SFTP session is open"
        channel.settimeout(silence_timeout)
        try:
            return FolderCopy(sftp, *folders, files, is_stopped, lambda: _free(machine, folders[1])).run()
        except StoppedError as error:
            raise ClusterError("the run was ended before all files were copied") from error
        except (TimeoutError, EOFError, paramiko.SSHException) as error:
            raise ClusterError(
                f"the connection was lost while copying ({type(error).__name__}: {error}); check that the network is "
                "up, and start again: complete files are not copied again"
            ) from error


def _log_result(address: str, folder: str, result: SyncResult) -> None:
    text = f"copied {result.files} of {result.files + result.unchanged} files ({result.bytes} bytes) to {folder}"
    if result.removed:
        text += f", removed {result.removed} that no longer exist here"
    _log.info("%s: %s", address, text)
    if result.kept:
        _log.warning(
            "%s: %s was copied there earlier and no longer exists here, but was changed there since and is kept; "
            "remove it there if it is not needed.", address, ", ".join(result.kept[:5]),
        )  # fmt: skip


def _free(machine: SSHMachine[Any], target: str) -> int | None:
    """Returns the free bytes of the remote file system that holds a path; None if they cannot be determined."""
    with contextlib.suppress(ClusterError, paramiko.SSHException, OSError, EOFError, ValueError, IndexError):
        return int(machine.run(["df", "-Pk", target], 5).decode().splitlines()[-1].split()[3]) * 1024
    return None
