"""Numbers in messages and tables, as one reads them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

import tensorflow as tf

_MOST_DIGITS = 999.5


def counted(number: int, thing: str) -> str:
    """A number of things.

    >>> counted(1, "replica"), counted(2, "replica"), counted(2, "micro-batch")
    ('1 replica', '2 replicas', '2 micro-batches')
    """
    many = f"{thing}es" if thing.endswith("ch") else f"{thing}s"
    return f"{number} {thing if number == 1 else many}"


def readable_bytes(count: int) -> str:
    """A number of bytes with three digits that count, in powers of 1000.

    >>> readable_bytes(1536), readable_bytes(40_000_000)
    ('1.54 kB', '40.0 MB')
    """
    return f"{count} B" if count < 1000 else _scaled(count, ("kB", "MB", "GB", "TB"))


def readable_flops(count: int | None) -> str:
    """FLOPs with three digits that count.

    >>> readable_flops(1_234_567), readable_flops(12), readable_flops(None)
    ('1.23 M', '12', 'not known')
    """
    if count is None:
        return "not known"
    return str(count) if count < 1000 else _scaled(count, ("k", "M", "G", "T", "P"))


def _scaled(count: int, units: tuple[str, ...]) -> str:
    size, unit = count / 1000, units[0]
    for larger in units[1:]:
        if size < _MOST_DIGITS:
            break
        size, unit = size / 1000, larger
    decimals = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{decimals}f} {unit}"


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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The question whether a known name was meant, with a blank before it, or nothing when none is near.

    >>> did_you_mean("AllReduc", ["AllReduce", "PS"])
    ' Did you mean AllReduce?'
    >>> did_you_mean("xyz", ["AllReduce", "PS"])
    ''
    """
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f" Did you mean {by_lower[near[0]]}?" if near else ""


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The three names most like a word, best first, however unlike."""
    return difflib.get_close_matches(word, list(known), n=3, cutoff=0.0)


def listed(names: Iterable[str]) -> str:
    """Names with commas between, or "none".

    >>> listed(["a", "b"])
    'a, b'
    """
    return ", ".join(names) or "none"
