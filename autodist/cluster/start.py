"""How this process was started, noted when AutoDist is imported: the script may change all of it later."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from autodist.cluster.tools import Main


@dataclass(frozen=True)
class ScriptStart:
    """What was so when AutoDist was imported.

    Attributes:
        directory: the working directory; None if it was gone.
        main: what ran as `__main__`; a tool that has not come to the script by then, maybe.
        digest: of the content of the file that ran.
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
        """Of a file's content: as it was at the start, if that file ran then."""
        if file is None:
            return None
        ran = self.main.file and self.digest and os.path.join(self.directory or "", self.main.file) == file
        return self.digest if ran else content_digest(file)


@functools.cache
def noted_start() -> ScriptStart:
    """The same from the first call on, which `import autodist` makes."""
    return ScriptStart.of_now()


def content_digest(path: str) -> str | None:
    """SHA-256 of a file's content; None if it cannot be read, or is no file."""
    if not os.path.isfile(path):
        return None
    import hashlib  # which takes longer than all else that the guard imports

    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def fill_standard_descriptors() -> None:
    """Opens the null device in place of a closed standard input, output or error (`nohup python train.py >&- 2>&- &`).

    What this process opens next would get that number: the pipe to an agent, say, into which TensorFlow would log then.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the lowest free number is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
