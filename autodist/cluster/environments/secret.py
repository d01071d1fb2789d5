"""The run's secret: known to its processes and to nobody else, and never sent.

It is AUTODIST_SECRET, or the content of AUTODIST_SECRET_FILE. Without either the chief of a SLURM step, or of processes
that are all on one machine, draws one and leaves it in a file in the user's home directory, which the nodes of a SLURM
cluster share: the number of a job is no secret, since every user can see it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from autodist.cluster.environments.launcher_env import SECRET, SECRET_FILE, Given
from autodist.errors import ResourceSpecError

SHORTEST = 16
"""Characters."""

_FOLDER = Path(".autodist")


@dataclass(frozen=True)
class SecretSource:
    """Where this process has the secret from.

    Attributes:
        text: the secret; None: it stands in the file.
        file: that has it.
        is_drawn: whether the chief draws it for this run, and leaves it in the file.
    """

    text: str | None = None
    file: Path | None = None
    is_drawn: bool = False

    @staticmethod
    def of(given: Given, environment: MutableMapping[str, str]) -> SecretSource:
        """That of a process, which takes it out of the environment: what the script starts is none of it.

        Raises:
            ResourceSpecError: it has none, or a short one.
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
            f"the environment variable {SECRET} is missing: the processes of the cluster know one another by it. Set "
            f"it to the same text of at least {SHORTEST} characters for all (`openssl rand -hex 32` makes one), or "
            f"{SECRET_FILE} to a file that has it."
        )

    def make(self) -> bytes:
        """The secret, on the chief, which leaves it where the others look for it.

        Raises:
            ResourceSpecError: the file cannot be written, or read.
        """
        if self.file is None or not self.is_drawn:
            return self.read()
        text = secrets.token_hex(32)
        try:
            self.file.parent.mkdir(mode=0o700, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.file.parent, delete=False) as made:  # for its user alone
                made.write(text)
            os.replace(made.name, self.file)  # in one piece, over what an earlier run may have left
        except OSError as error:
            raise ResourceSpecError(
                f"the run's secret cannot be left in {self.file}: {error.strerror}; set {SECRET} in its place."
            ) from error
        return text.encode()

    def read(self) -> bytes:
        """The secret.

        Raises:
            FileNotFoundError: the file in which the chief leaves it is not there, yet.
            ResourceSpecError: it cannot be read, others could have written it, or it is short.
        """
        if self.text is not None:
            return self.text.encode()
        assert self.file is not None, "one of the two"
        try:
            with open(self.file) as opened:
                about = os.fstat(opened.fileno())
                text = opened.read().strip()
        except FileNotFoundError:
            if self.is_drawn:
                raise
            raise ResourceSpecError(f"{SECRET_FILE} names {self.file}, which is not there; give a file.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ResourceSpecError(f"the run's secret in {self.file} cannot be read: {error}.") from error
        if self.is_drawn and (about.st_uid != os.geteuid() or about.st_mode & 0o077):
            raise ResourceSpecError(
                f"the run's secret in {self.file} is not this user's alone; remove the file, and set {SECRET} in its "
                "place."
            )
        return _long_enough(text, str(self.file)).encode()

    def forget(self) -> None:
        """Removes what `make` has left: whoever needed it has read it."""
        if self.file is not None and self.is_drawn:
            with contextlib.suppress(OSError):
                self.file.unlink()


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise ResourceSpecError(
            f"there is no home directory in which the chief could leave the run's secret: HOME is not set, and the "
            f"user {os.geteuid()} has no entry in passwd; set {SECRET} in its place."
        ) from error


def _long_enough(text: str, where: str) -> str:
    if len(text) < SHORTEST:
        raise ResourceSpecError(
            f"the secret in {where} has {len(text)} characters; allowed: at least {SHORTEST}, which `openssl rand -hex "
            "32` makes."
        )
    return text
