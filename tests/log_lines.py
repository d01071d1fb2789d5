"""Lines that TensorFlow's own log writes."""

from __future__ import annotations

from autodist.logs.tensorflow_log import _LINE, is_routine_line


def is_log_line(line: str) -> bool:
    """Returns True if TensorFlow's own log wrote this line, or the line that announces the log."""
    return _LINE.fullmatch(line) is not None or is_routine_line(line)
