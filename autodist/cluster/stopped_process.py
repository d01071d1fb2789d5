"""Whether a process is stopped, as its machine sees it from outside."""

from __future__ import annotations

from pathlib import Path

# As Linux calls what a signal or a tracer has stopped.
_STOPPED = ("T", "t")


class Standing:
    """Looks at one process from time to time.

    Args:
        process: its number.
    """

    def __init__(self, process: int) -> None:
        self._process = process
        self._seen: tuple[str, int] | None = None

    def is_stopped(self) -> bool:
        """Whether it is stopped (SIGSTOP, a debugger) and has not run since this was asked last.

        What limits a process's time of a processor stops it many times a second.
        """
        before, self._seen = self._seen, _state_of(self._process)
        return self._seen is not None and self._seen == before and self._seen[0] in _STOPPED


def _state_of(process: int) -> tuple[str, int] | None:
    """The letter by which Linux says what a process does, "S" where it sleeps, and for how many ticks it has run.

    None: there is no such process.
    """
    try:
        about = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return about[0], int(about[11]) + int(about[12])
