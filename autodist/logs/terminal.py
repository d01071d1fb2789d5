"""What AutoDist tells the user while it runs: its log, shown on the terminal where the script sets up no logging."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

from autodist.errors import AutoDistError

LEVEL_VARIABLE = "AUTODIST_LOG_LEVEL"
"""Environment variable: DEBUG, INFO (what the chief shows by default), WARNING (what other workers show) or ERROR."""

ALIKE_EVERYWHERE = {"alike_everywhere": True}
"""`extra` of a message that every worker has to tell of the step that all have captured alike; the chief shows it."""


def log_to_the_terminal(is_chief: bool) -> None:
    """Shows the log on standard error, unless the script has set up logging itself.

    Raises:
        AutoDistError: the environment asks for a level that there is not.
    """
    logger = logging.getLogger("autodist")
    if logger.handlers or logging.getLogger().handlers:
        return
    level = os.environ.get(LEVEL_VARIABLE, "").upper() or ("INFO" if is_chief else "WARNING")
    if level not in logging.getLevelNamesMapping():
        raise AutoDistError(
            f"the environment variable {LEVEL_VARIABLE} is {level}, which is no level; allowed: DEBUG, INFO, WARNING, "
            "ERROR"
        )
    handler = _Terminal()
    handler.setFormatter(logging.Formatter("autodist: %(message)s"))
    if not is_chief:
        handler.addFilter(_is_of_this_worker)
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(level)


def is_shown_on_the_terminal(level: int) -> bool:
    """Whether a message of this level goes to the terminal, and not to where the script sends its log."""
    logger = logging.getLogger("autodist")
    return logger.isEnabledFor(level) and any(isinstance(handler, _Terminal) for handler in logger.handlers)


class _Terminal(logging.StreamHandler[TextIO]):
    """Writes to what is standard error when something is said: a notebook or a progress display may have changed it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def _is_of_this_worker(record: logging.LogRecord) -> bool:
    return not any(hasattr(record, key) for key in ALIKE_EVERYWHERE)
