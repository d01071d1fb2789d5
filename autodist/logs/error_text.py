"""What an error says, as a part of a sentence of ours."""

from __future__ import annotations

import re

import tensorflow as tf

# Around what has failed, TensorFlow tells of the operation: where it runs and, with our own code, where it was made.
_ABOUT_THE_OPERATION = re.compile(
    r'\W*$|Graph execution error:|Detected at node |File "|Node: \'|<stack traces unavailable>|\[\[|Hint: '
    r"|(?:[A-Z_]+: )?From /job:|Additional GRPC error |:UNKNOWN:|\d+ (?:root|successful|derived) "
)
_BESIDE = re.compile(r"^\{\{function_node .*?\}\} | \[Op:\w+\].*$")


def words_of(error: BaseException) -> str:
    """What an error says; one of TensorFlow's without its tracebacks, in a line."""
    if not isinstance(error, tf.errors.OpError):
        return str(error)
    lines = [line.strip() for line in str(error.message).splitlines()]
    told = [_BESIDE.sub("", line) for line in lines if not _ABOUT_THE_OPERATION.match(line)]
    return "; ".join(dict.fromkeys(told)) or str(error.message)
