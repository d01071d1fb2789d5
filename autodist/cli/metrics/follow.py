"""Reads the growing files of a run's metrics, on this machine, and on another one as an agent over SSH.

`python -m autodist.cli.metrics.follow [--silence SECONDS]` sends the lines of the folder that a message names, and
those that follow. It ends with its standard input, and over SSH after so many seconds without a message. It does not
import TensorFlow.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from autodist.cluster.agent import Agent, take_streams
from autodist.cluster.protocol import Lost, Message
from autodist.runs.metrics.records import METRICS_FILE, PLANS_FILE
from autodist.waits import start_thread

POLL_SECONDS = 1.0

MOST_BYTES = 1 << 20
"""Bytes at the end of a file that are read at first; `autodist top` shows the latest lines only."""


@dataclass(frozen=True)
class FollowRequest(Message):
    """Request to follow the metrics in a folder. Answered by `NewLines`, again and again.

    Attributes:
        folder: the folder; a leading `~` is the home directory there.
    """

    folder: str


@dataclass(frozen=True)
class NewLines(Message):
    """Lines that were added since the last message.

    Attributes:
        lines: of the metrics.
        plans: of the plans.
    """

    lines: tuple[str, ...] = ()
    plans: tuple[str, ...] = ()


class GrowingFile:
    """Reads the whole lines that a file gains.

    Args:
        path: the file; it may not exist yet.
        most_bytes: at first, the lines in so many bytes at the end are read; None: all.
    """

    def __init__(self, path: Path, most_bytes: int | None = None) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._offset: int | None = None

    def read(self) -> tuple[str, ...]:
        """Returns the new lines.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            with open(self._path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                start = self._offset
                if start is None or start > size:  # it is new, or has been replaced
                    start = 0 if self._most_bytes is None else max(0, size - self._most_bytes)
                    file.seek(start)
                    start += len(file.readline()) if start else 0
                file.seek(start)
                content = file.read()
        except FileNotFoundError:
            return ()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset = start + len(whole)
        return tuple(whole.decode(errors="replace").splitlines())


class FollowedFolder:
    """The files of one folder.

    Args:
        folder: the folder.
        most_bytes: as in `GrowingFile`.
    """

    def __init__(self, folder: Path, most_bytes: int | None = None) -> None:
        self._lines = GrowingFile(folder / METRICS_FILE, most_bytes)
        self._plans = GrowingFile(folder / PLANS_FILE, most_bytes)

    def read(self) -> NewLines:
        """Returns the new lines; raises OSError if a file cannot be read."""
        return NewLines(self._lines.read(), self._plans.read())


class Follower(Agent):
    """The agent on the machine of the files."""

    def _handle(self, message: Message) -> bool:
        if isinstance(message, FollowRequest):
            start_thread("follow", self._follow, message.folder)
        return True

    def _follow(self, name: str) -> None:
        folder = Path(name).expanduser()
        if not folder.is_dir():
            self.send(Lost(f"there is no folder {folder}; name the `folder` of `metrics` in the YAML file."))
            return
        followed = FollowedFolder(folder, MOST_BYTES)
        while True:
            try:
                self.send(followed.read())  # also without new lines: the other side shows that the run is silent
            except OSError as error:
                self.send(Lost(f"{error.filename} cannot be read: {error.strerror}."))
                return
            if self._ended.wait(POLL_SECONDS):
                return


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--silence", type=float)
    limits, _ = options.parse_known_args()  # another version of AutoDist may pass more options
    Follower(*take_streams(), 0.0, limits.silence).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
