"""The sources of metrics for `autodist top`: a folder of this machine, or one of another machine over SSH."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Protocol, Self

from autodist.cli.command_errors import UsageError
from autodist.cli.metrics.follow import MOST_BYTES, POLL_SECONDS, FollowedFolder, FollowRequest, NewLines
from autodist.cluster.agent_connection import RequestConnection
from autodist.cluster.transport import open_channels
from autodist.resources import ResourceSpec, is_own_address
from autodist.runs.metrics.records import METRICS_FILE
from autodist.waits import Event

_REMOTE = re.compile(r"(?:(?P<user>[^@:/\s]+)@)?(?P<host>[^@:/\s]+|\[[0-9a-fA-F:]+\]):(?P<folder>.+)")

_RETRY_LIMIT = 5.0
"""Seconds to wait for a machine that does not answer; the user can simply call the command again."""

_HOW = "`metrics: {folder: FOLDER}` in the YAML file makes a run write them"


class Source(Protocol):
    """A context manager that reads the metrics of a run."""

    @property
    def title(self) -> str: ...

    def read(self) -> NewLines:
        """Returns the lines that were added, after about a second; at first, the latest lines, at once.

        Raises:
            UsageError, ClusterError: they cannot be read.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *about: object) -> None: ...


def source_of(place: str | None, cluster: Path | None) -> Source:
    """Returns the source that the command's arguments name.

    Args:
        place: a folder, or `[user@]host:folder`; None: see `cluster`.
        cluster: the YAML file of a run, whose chief's machine and folder are read; None: with no `place`, the only run
            on this machine that writes metrics.

    Raises:
        UsageError: there is no such folder or run.
    """
    if place is not None and cluster is not None:
        raise UsageError("name the folder, or the YAML file by --cluster, not both.")
    if cluster is not None:
        return _source_of_cluster(cluster)
    if place is None:
        return LocalFolder(_folder_of_running())
    remote = None if Path(place).exists() else _REMOTE.fullmatch(place)
    if remote is None:
        return LocalFolder(Path(place))
    group = {} if remote["user"] is None else {"username": remote["user"]}
    return RemoteFolder(_spec_of(remote["host"].strip("[]"), {"ssh": {"there": group}}), remote["folder"])


def _source_of_cluster(cluster: Path) -> Source:
    spec = ResourceSpec.from_file(cluster)
    if spec.metrics is None:
        raise UsageError(f"{cluster} has no section `metrics`: {_HOW}.")
    address = spec.chief.address
    if spec.is_given or is_own_address(address):
        return LocalFolder(Path(spec.metrics.folder))
    given = spec.to_dict()
    name = spec.chief.ssh_config
    groups = {"there": {} if name is None else given["ssh"][name]}
    kept = {key: given[key] for key in ("connect_timeout", "reach_timeout", "silence_timeout")}
    more = {} if spec.transport is None else {"transport": spec.transport}
    return RemoteFolder(_spec_of(address, {"ssh": groups, **kept, **more}), spec.metrics.folder)


def _spec_of(host: str, more: dict[str, object]) -> ResourceSpec:
    """Returns this machine and another one that is reached over SSH."""
    nodes = [{"address": "localhost", "chief": True}, {"address": host, "ssh_config": "there"}]
    return ResourceSpec.from_dict({"nodes": nodes, **more})


def _folder_of_running(processes: Path = Path("/proc")) -> Path:
    """Returns the folder of the only run of this user on this machine that writes metrics."""
    found = set()
    for process in processes.iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):  # of another user, or it has ended
                targets = {os.readlink(descriptor) for descriptor in (process / "fd").iterdir()}
                found |= {Path(target).parent for target in targets if target.endswith(f"/{METRICS_FILE}")}
    if len(found) == 1:
        return found.pop()
    if not found:
        raise UsageError(f"no run on this machine writes metrics. Name its folder: autodist top FOLDER. {_HOW}.")
    raise UsageError(
        f"several runs write metrics: {', '.join(map(str, sorted(found)))}. Name one: autodist top FOLDER."
    )


class LocalFolder:
    """A folder of this machine; see `Source`."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder. {_HOW}.")
        self.title = str(folder)
        self._followed, self._is_new = FollowedFolder(folder, MOST_BYTES), True

    def read(self) -> NewLines:
        if not self._is_new:
            Event().wait(POLL_SECONDS)
        self._is_new = False
        return self._followed.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *about: object) -> None:
        """Nothing is open."""


class RemoteFolder:
    """A folder of another machine; see `Source`."""

    def __init__(self, spec: ResourceSpec, folder: str) -> None:
        self._spec, self._node, self._folder = spec, spec.nodes[1], folder
        self.title = f"{self._node.address}:{folder}"

    def __enter__(self) -> Self:
        module = "autodist.cli.metrics.follow"
        (channel,) = open_channels(self._spec, self._node, 1, module, retry_limit=_RETRY_LIMIT)
        self._connection = RequestConnection("follow", channel)
        self._connection.send(FollowRequest(self._folder))
        self._limit, self._option = self._spec.reach_timeout + self._spec.connect_timeout, "reach_timeout"
        return self

    def read(self) -> NewLines:
        message = self._connection.next_answer(NewLines, self._limit, self._option)
        self._limit, self._option = self._spec.silence_timeout, "silence_timeout"
        return message

    def __exit__(self, *about: object) -> None:
        self._connection.__exit__(*about)
