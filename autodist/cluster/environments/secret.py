"""The run's secret, with which its processes authenticate each other; it is never sent.

It is AUTODIST_SECRET, or the content of AUTODIST_SECRET_FILE. Without either, the chief of a SLURM step, or of
processes on one machine, generates one and writes it to a file in the user's home directory, which the nodes of a SLURM
cluster share. The number of the job would not do, since every user can see it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from autodist.cluster.environments.launcher_env import SECRET, SECRET_FILE, GivenCluster
from autodist.errors import ResourceSpecError

MIN_LENGTH = 16
"""Minimum length of a secret in characters."""

_FOLDER = Path(".autodist")


@dataclass(frozen=True)
class SecretSource:
    """The source of this process's secret.

    Attributes:
        text: the secret; None if it is in the file.
        file: file that contains the secret.
        is_drawn: True if the chief generates it for this run and writes it to the file.
    """

    text: str | None = None
    file: Path | None = None
    is_drawn: bool = False

    @staticmethod
    def find(given: GivenCluster, environment: MutableMapping[str, str]) -> SecretSource:
        """Returns the source of the secret for this process, and removes AUTODIST_SECRET from the environment.

        The script's child processes must not inherit the secret.

        Raises:
            ResourceSpecError: there is no secret, or it is too short.
        """
        text, file = environment.pop(SECRET, None), environment.get(SECRET_FILE)
        if text is not None:
            return SecretSource(_long_enough(text, SECRET))
        if file is not None:
            return SecretSource(file=Path(file))
        job = given.job or (f"port-{given.port}" if given.is_on_one_machine else None)
        if job is not None:
            return SecretSource(file=_home() / _FOLDER / job, is_drawn=True)
        raise ResourceSpecError(
            f"the environment variable {SECRET} is missing: the processes of the cluster authenticate by it. Set it to "
            f"the same text of at least {MIN_LENGTH} characters for all (`openssl rand -hex 32` generates one), or "
            f"{SECRET_FILE} to a file that contains it."
        )

    def make(self) -> bytes:
        """Returns the secret, on the chief; generates it and writes its file if necessary.

        Raises:
            ResourceSpecError: the file cannot be written, or read.
        """
        if self.file is None or not self.is_drawn:
            return self.read()
        text = secrets.token_hex(32)
        try:
            self.file.parent.mkdir(mode=0o700, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self.file.parent, delete=False
            ) as file:  # readable by its user only
                file.write(text)
            os.replace(file.name, self.file)  # atomically replaces the file of an earlier run
        except OSError as error:
            raise ResourceSpecError(
                f"the run's secret cannot be written to {self.file}: {error.strerror}; set {SECRET} instead."
            ) from error
        return text.encode()

    def read(self) -> bytes:
        """Reads the secret.

        Raises:
            FileNotFoundError: the chief's file does not exist (yet).
            ResourceSpecError: the secret cannot be read, is too short, or other users could have written it.
        """
        if self.text is not None:
            return self.text.encode()
        assert self.file is not None, "either `text` or `file` is set"
        try:
            with open(self.file) as opened:
                about = os.fstat(opened.fileno())
                text = opened.read().strip()
        except FileNotFoundError:
            if self.is_drawn:
                raise
            raise ResourceSpecError(f"{SECRET_FILE} is {self.file}, which does not exist; set it to a file.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ResourceSpecError(f"the run's secret in {self.file} cannot be read: {error}.") from error
        if self.is_drawn and (about.st_uid != os.geteuid() or about.st_mode & 0o077):
            raise ResourceSpecError(
                f"the run's secret in {self.file} is accessible to other users; remove the file, and set {SECRET} "
                "instead."
            )
        return _long_enough(text, str(self.file)).encode()

    def forget(self) -> None:
        """Removes the file that `make` has written; all processes have read it."""
        if self.file is not None and self.is_drawn:
            with contextlib.suppress(OSError):
                self.file.unlink()


def remove_drawn(file: str, secret: str) -> None:
    """Removes the file with a secret that the chief has drawn, unless it has another run's secret by now."""
    path = Path(file)
    with contextlib.suppress(OSError):
        if path.read_text() == secret:
            path.unlink()


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise ResourceSpecError(
            f"there is no home directory for the file with the run's secret: HOME is not set, and the user "
            f"{os.geteuid()} has no entry in passwd; set {SECRET} instead."
        ) from error


def _long_enough(text: str, where: str) -> str:
    if len(text) < MIN_LENGTH:
        raise ResourceSpecError(
            f"the secret in {where} has {len(text)} characters; allowed: at least {MIN_LENGTH}, as from `openssl rand "
            "-hex 32`."
        )
    return text
