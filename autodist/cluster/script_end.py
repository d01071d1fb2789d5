"""How the script is ending, for those who are called at its end (`atexit`), where Python itself does not say."""

from __future__ import annotations

import sys
from typing import Any, NoReturn


class ScriptEnd:
    """Notes whether this process's script ends well.

    An exception that nobody caught is left by Python in `sys.last_value`; `sys.exit` is wrapped to note its argument.
    Only a bare `raise SystemExit(3)` passes unseen: it is known by the process's exit status alone.

    Use `watch_script_end`, which makes one for the process.
    """

    def __init__(self) -> None:
        self._exit_argument: Any = None
        self._exit = sys.exit
        sys.exit = self._note_exit

    @property
    def is_bad(self) -> bool:
        """Whether the script ends by an exception or by `sys.exit` with a status other than 0."""
        uncaught = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        return uncaught is not None or self._exit_argument not in (None, 0)

    def _note_exit(self, status: Any = None, /) -> NoReturn:
        self._exit_argument = status
        self._exit(status)


_the_one: list[ScriptEnd] = []


def watch_script_end() -> ScriptEnd:
    """The process's `ScriptEnd`; from the first call on it notes how the script ends."""
    if not _the_one:
        _the_one.append(ScriptEnd())
    return _the_one[0]
