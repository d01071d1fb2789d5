"""The models of one node and of one SSH group."""

from __future__ import annotations

import ipaddress
import os
import pathlib
import re
import socket
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from autodist.resources._limits import shown
from autodist.resources._model import EMPTY_IF_NULL, Fault, Line, Model, as_yaml

VENV = "the path of a virtual environment on the node, absolute or starting with ~/, without = and control characters"

_COMMAND = re.compile(r"\s*(source|\.|conda|mamba|micromamba|module|export|eval|workon|pyenv|bash|sh)\s")
_SIGN = re.compile(r"[;|`$]|&&")
_FILE = r"/bin/(activate|python)[\w.]*"
_FILE_ALONE = re.compile(rf"(?P<venv>~?/.*){_FILE}")
_FILE_IN_LINE = re.compile(rf"(?P<venv>~?/[^\s;&|]*){_FILE}(?=[\s;&|]|\Z)")


def venv_fault(path: str) -> str | None:
    """Returns the fault of a `python_venv` that is a shell line or a file in an environment; None for other paths.

    >>> venv_fault("~/venv/bin/python3")
    '"~/venv/bin/python3" is a file in a virtual environment; allowed: the environment itself, ~/venv'
    """
    is_line = _COMMAND.match(path) or _SIGN.search(path)
    file = (_FILE_IN_LINE.search if is_line else _FILE_ALONE.fullmatch)(path)
    if is_line:
        venv = f": {file['venv']}" if file else ""
        return f"{as_yaml(path)} is a shell command, and no shell runs it; allowed: {VENV}{venv}"
    if file:
        return f"{as_yaml(path)} is a file in a virtual environment; allowed: the environment itself, {file['venv']}"
    return None


DEFAULT_NETWORK_BANDWIDTH = 10.0
"""Gbit/s between a node and the others if the YAML has no value: the usual Ethernet speed of servers."""

HIGHEST_PORT = 65535

_TEXT_HINT = "text (in quotes, if YAML would read it as another type)"
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]+(?<!-)(\.(?!-)[A-Za-z0-9_-]+(?<!-))*\.?\Z")
_ONLY_NUMBERS = re.compile(r"[0-9.]+\Z")

Transport = Literal["paramiko", "openssh"]
TRANSPORT = "paramiko, or openssh: the `ssh` program of the chief's machine"
"""The SSH implementations, for messages."""

Text = Annotated[str, Field(min_length=1)]
# Names that OpenSSH refuses on a command line: a leading - marks an option, the others are special to a shell.
_NOT_IN_NAMES = r"\s\x00-\x1f\x7f'`\";&<>|(){}"
_UserName = Annotated[str, Field(pattern=rf"^[^-{_NOT_IN_NAMES}][^{_NOT_IN_NAMES}]*$")]
# `env PATH …` starts the interpreter there: a path with = would be a variable, one with a leading - an option.
_RemotePath = Annotated[str, Field(pattern=r"^(~|~?/[^=\x00-\x1f\x7f]*)$")]
# A list in YAML, a tuple in the model: only the container is converted; its items are strict.
Indices = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)]
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Node(Model):
    """One machine.

    A node has one replica on each of its `gpus` or, without GPUs, on each of its `cpus`. One node with both is refused,
    since a step would wait for the slower kind. A node that names no device has one replica, on its CPU. A node with
    `cpus: []` and no GPUs has no replica: its one worker only owns variables.

    Attributes:
        address: name or IP address under which the other nodes reach it.
        gpus: numbers of its GPUs, as TensorFlow counts them.
        cpus: one entry for each replica on its CPU; only their number matters. An explicit empty list: no replica.
        chief: True if the user starts the script here.
        workers: number of processes; they get equal, consecutive shares of the devices.
        network_bandwidth: Gbit/s to the other nodes.
        ssh_config: name of an SSH group.
        port: the port of the first worker's server; the other workers use the next ports. None: any free ports.
    """

    address: Text = Field(description=f"a host name or an IP address, as {_TEXT_HINT}")
    gpus: Indices = Field(default=(), description="a list of different whole numbers from 0, such as [0, 1]")
    cpus: Indices = Field(default=(), description="a list of different whole numbers from 0, such as [0, 1]")
    chief: bool = Field(default=False, description="true or false")
    workers: int = Field(default=1, ge=1, description="a whole number from 1")
    network_bandwidth: float = Field(
        default=DEFAULT_NETWORK_BANDWIDTH, gt=0, allow_inf_nan=False, description="a number above 0, in Gbit/s"
    )
    ssh_config: Text | None = Field(default=None, description="the name of a group under `ssh`")
    port: Annotated[int, Field(ge=1024, le=HIGHEST_PORT)] | None = Field(
        default=None, description=f"a whole number from 1024 to {HIGHEST_PORT}"
    )

    @property
    def devices(self) -> tuple[int, ...]:
        """Numbers of the devices that hold its replicas: its GPUs, or else its CPU devices."""
        return self.gpus or self.cpus

    @property
    def is_local(self) -> bool:
        """True if its workers are started without SSH; valid in the process that the user started.

        The chief's node is local. Any other node with an `ssh_config` is not, even if its address belongs to this
        machine (127.0.0.2). Any other node without one is local if its address belongs to this machine. Each access
        looks the address up, a host name possibly in DNS.
        """
        return self.chief or (self.ssh_config is None and is_own_address(self.address))

    @model_validator(mode="before")
    @classmethod
    def _default_device(cls, data: Any) -> Any:
        """Adds one replica on the CPU to a node that names no device. `cpus: []` names none on purpose."""
        if isinstance(data, dict) and not data.get("gpus") and "cpus" not in data:
            return {**data, "cpus": [0]}
        return data

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            if _HOST_NAME.match(address) and not _ONLY_NUMBERS.match(address):
                return address
            hint = "; a port belongs under `port`" if ":" in address else ""
            raise Fault(f"{shown(address)} is not an address; allowed: a host name or an IP address{hint}") from None
        if parsed.is_unspecified or parsed.is_multicast:
            raise Fault(f"{address} is not the address of one machine; allowed: a host name or an IP address")
        return address

    @field_validator("gpus", "cpus")
    @classmethod
    def _check_indices(cls, indices: tuple[int, ...]) -> tuple[int, ...]:
        seen = set()
        for position, index in enumerate(indices):
            if index in seen:
                raise Fault(f"{index} is listed twice; allowed: each device once", position)
            seen.add(index)
        return indices

    @model_validator(mode="after")
    def _check_workers(self) -> Node:
        if self.gpus and self.cpus:
            raise Fault("the node also has gpus; allowed: only one of the two, since each entry is a replica", "cpus")
        count = len(self.devices)
        if count == 0 and self.workers > 1:
            raise Fault(
                f"{self.workers} workers are too many for a node without replicas; allowed: 1, which owns all "
                "variables kept there, or name devices",
                "workers",
            )
        if count % self.workers:
            even = ", ".join(str(number) for number in range(1, count + 1) if count % number == 0)
            raise Fault(
                f"{self.workers} workers cannot share {count} devices evenly; allowed: {even}, or name more devices",
                "workers",
            )
        if self.port is not None and self.port + self.workers - 1 > HIGHEST_PORT:
            last, highest = self.port + self.workers - 1, HIGHEST_PORT - self.workers + 1
            raise Fault(
                f"{self.workers} workers need the ports {self.port} to {last}; allowed: 1024 to {highest}", "port"
            )
        return self


class SSHGroup(Model):
    """The SSH login of a group of nodes, and the environment of their workers.

    Missing values come from the user's own SSH configuration, agent and keys, as with the `ssh` command.

    Attributes:
        username: login name.
        key_file: private key, on the chief's machine; see `key_path`.
        port: the port of the SSH server.
        python_venv: virtual environment on the node that runs the script; a leading `~` is the home directory there.
        shared_envs: environment variables of the workers.
        host_key_checking: True to refuse a host with an unknown key.
        known_hosts: file of known host keys, on the chief's machine; see `known_hosts_path`.
        transport: the SSH implementation; None: that of the whole cluster.
    """

    username: _UserName | None = Field(
        default=None,
        description=f"a user's name, as {_TEXT_HINT}, without blanks, control characters, quotes, any of ;&<>|(){{}}, "
        "or a leading -",
    )
    key_file: Line | None = Field(default=None, description="the path of a private key")
    port: Annotated[int, Field(ge=1, le=HIGHEST_PORT)] = Field(
        default=22, description=f"a whole number from 1 to {HIGHEST_PORT}"
    )
    python_venv: _RemotePath | None = Field(default=None, description=VENV)
    shared_envs: Annotated[dict[EnvName, str], EMPTY_IF_NULL] = Field(
        default_factory=dict,
        repr=False,  # they may be secret
        description="a mapping of environment variables (letters, digits and _) to text; "
        'put numbers and true or false in quotes, such as "4"',
    )
    host_key_checking: bool = Field(default=True, description="true or false")
    known_hosts: Line | None = Field(default=None, description="the path of a known_hosts file")
    transport: Transport | None = Field(default=None, description=TRANSPORT)

    @field_validator("key_file", "known_hosts")
    @classmethod
    def _make_absolute(cls, path: str | None) -> str | None:
        """Makes the path absolute now: the script may change its directory before the other workers are started."""
        return path if path is None or path.startswith("~") else os.path.abspath(path)

    @field_validator("python_venv", mode="before")
    @classmethod
    def _check_venv(cls, path: Any) -> Any:
        fault = venv_fault(path) if isinstance(path, str) else None
        if fault is not None:
            raise Fault(fault)
        return path

    @property
    def key_path(self) -> pathlib.Path | None:
        """`key_file` with `~` expanded for the current user."""
        return None if self.key_file is None else _expanded(self.key_file)

    @property
    def known_hosts_path(self) -> pathlib.Path | None:
        """`known_hosts` with `~` expanded for the current user."""
        return None if self.known_hosts is None else _expanded(self.known_hosts)


def _expanded(path: str) -> pathlib.Path:
    """Expands `~`. `~name` of an unknown user stays as it is, and the file will not be found."""
    return pathlib.Path(os.path.expanduser(path))


def is_own_address(address: str) -> bool:
    """Returns True if `address` (a name or an IP address) belongs to this machine.

    The test binds a socket, which is only possible for the machine's own addresses. It needs no list of interfaces, and
    inside a network namespace the result is that of the namespace. A name is resolved first, possibly by DNS; a name
    that cannot be resolved is not this machine's. If the kernel allows binding to foreign addresses
    (net.ipv4.ip_nonlocal_bind=1), every address passes: there, set an `ssh_config` for the other nodes.
    """
    if address in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # UnicodeError: a label is too long for a host name
        return False
    return any(_can_bind(family, sockaddr) for family, _, _, _, sockaddr in found)


def _can_bind(family: int, sockaddr: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(sockaddr)
    except OSError:
        return False
    return True
