"""The state of this process at the import of AutoDist, recorded since the script may change it later."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from autodist.cluster.command_line import Main


@dataclass(frozen=True)
class ScriptStart:
    """The state of this process when AutoDist was imported.

    Attributes:
        directory: working directory; None if it no longer existed.
        main: the `__main__` module; it may be a tool that has not started the script yet.
        digest: digest of the content of its file.
    """

    directory: str | None
    main: Main
    digest: str | None

    @staticmethod
    def of_now() -> ScriptStart:
        main = Main.of_this_process()
        try:
            directory = os.getcwd()
        except FileNotFoundError:
            return ScriptStart(None, main, None)
        return ScriptStart(directory, main, content_digest(os.path.join(directory, main.file)) if main.file else None)

    def digest_of(self, file: str | None) -> str | None:
        """Returns the digest of a file's content; if it is the file of `main`, the digest at the start."""
        if file is None:
            return None
        is_main = self.main.file and self.digest and os.path.join(self.directory or "", self.main.file) == file
        return self.digest if is_main else content_digest(file)


@functools.cache
def noted_start() -> ScriptStart:
    """Returns the state at the first call, which `import autodist` makes."""
    return ScriptStart.of_now()


def content_digest(path: str) -> str | None:
    """Returns the SHA-256 digest of a file's content; None if it cannot be read or is not a file."""
    if not os.path.isfile(path):
        return None
    import hashlib  # takes longer than all other imports of the guard

    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def fill_standard_descriptors() -> None:
    """Opens the null device in place of a closed standard input, output or error (`nohup python train.py >&- 2>&- &`).

    Otherwise the next file that this process opens, such as the pipe to an agent, would get that descriptor. TensorFlow
    would then log into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the lowest free number is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
