"""AutoDist's log, shown on the terminal if the script does not configure logging."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import TextIO

from autodist.errors import AutoDistError

LEVEL_VARIABLE = "AUTODIST_LOG_LEVEL"
"""Environment variable: DEBUG, INFO (default on the chief), WARNING (default on other workers) or ERROR."""

ALIKE_EVERYWHERE = {"alike_everywhere": True}
"""`extra` of a message that is equal on all workers, because they captured the same step; only the chief shows it."""

EXPLAINS_DIFFERENCES = {"explains_differences": True}
"""`extra` of a message below WARNING that gives a reason why results may differ from those of one device."""


def log_to_the_terminal(is_chief: bool) -> None:
    """Shows the log on standard error, unless the script has configured logging.

    Raises:
        AutoDistError: the environment variable is not a level.
    """
    logger = logging.getLogger("autodist")
    if logger.handlers or logging.getLogger().handlers:
        return
    level = os.environ.get(LEVEL_VARIABLE, "").upper() or ("INFO" if is_chief else "WARNING")
    if level not in logging.getLevelNamesMapping():
        raise AutoDistError(
            f"the environment variable {LEVEL_VARIABLE} is {level}, which is not a level; allowed: DEBUG, INFO, "
            "WARNING, ERROR"
        )
    handler = _Terminal()
    handler.setFormatter(logging.Formatter("autodist: %(message)s"))
    if not is_chief:
        handler.addFilter(_is_of_this_worker)
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(level)


def print_message(text: str) -> None:
    """Writes a message to standard error, also before the log is set up."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # no reader is left, or it was closed
            sys.stderr.write(f"autodist: {text}\n")
            sys.stderr.flush()


def is_shown_on_the_terminal(level: int) -> bool:
    """Returns True if messages of this level go to the terminal, not to the script's own log."""
    logger = logging.getLogger("autodist")
    return logger.isEnabledFor(level) and any(isinstance(handler, _Terminal) for handler in logger.handlers)


class _Terminal(logging.StreamHandler[TextIO]):
    """Writes to the current standard error: a notebook or a progress display may have replaced it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def _is_of_this_worker(record: logging.LogRecord) -> bool:
    return not any(hasattr(record, key) for key in ALIKE_EVERYWHERE)
