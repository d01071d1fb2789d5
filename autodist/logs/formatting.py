"""Formatting of numbers, names and errors in messages and tables."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from types import TracebackType

_MOST_DIGITS = 999.5


def counted(number: int, thing: str) -> str:
    """Returns a number with a noun in singular or plural.

    >>> counted(1, "replica"), counted(2, "replica"), counted(2, "micro-batch")
    ('1 replica', '2 replicas', '2 micro-batches')
    """
    many = f"{thing}es" if thing.endswith("ch") else f"{thing}s"
    return f"{number} {thing if number == 1 else many}"


def readable_bytes(count: int) -> str:
    """Returns a number of bytes with three significant digits, in powers of 1000.

    >>> readable_bytes(1536), readable_bytes(40_000_000)
    ('1.54 kB', '40.0 MB')
    """
    return f"{count} B" if count < 1000 else _scaled(count, ("kB", "MB", "GB", "TB"))


def readable_flops(count: int | None) -> str:
    """Returns FLOPs with three significant digits.

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


def readable_seconds(seconds: float) -> str:
    """Returns a time with up to three significant digits.

    >>> readable_seconds(0.00012), readable_seconds(0.0009999), readable_seconds(3.25), readable_seconds(86400.2)
    ('120 µs', '1 ms', '3.25 s', '86400 s')
    """
    if seconds < 1000:
        seconds = float(f"{seconds:.3g}")  # now: the unit follows from the rounded value
    if seconds >= 1000:
        return f"{seconds:.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def readable_shape(shape: Sequence[int]) -> str:
    """Returns the lengths of the axes of a tensor.

    >>> readable_shape((300, 64)), readable_shape(())
    ('300 × 64', 'scalar')
    """
    return " × ".join(map(str, shape)) or "scalar"


# TensorFlow surrounds an error with lines on the operation: its device and, with our code in it, its traceback.
_OPERATION_LINE = re.compile(
    r'\W*$|Graph execution error:|Detected at node |File "|Node: \'|<stack traces unavailable>|\[\[|Hint: '
    r"|(?:[A-Z_]+: )?From /job:|Additional GRPC error |:UNKNOWN:|:\{.created|\d+ (?:root|successful|derived) "
)
_OP_DETAILS = re.compile(r"^\{\{function_node .*?\}\} | \[Op:\w+\].*$")


def words_of(error: BaseException) -> str:
    """Returns the message of an error; of TensorFlow's errors without tracebacks, on one line.

    An exception of the script may have no text, since its `__str__` raises; Python prints the same words for it.
    """
    import tensorflow as tf

    if not isinstance(error, tf.errors.OpError):
        try:
            return str(error)
        except Exception:  # noqa: BLE001 - code of the script
            return "<exception str() failed>"
    lines = [line.strip() for line in str(error.message).splitlines()]
    kept = [_OP_DETAILS.sub("", line) for line in lines if not _OPERATION_LINE.match(line)]
    return "; ".join(dict.fromkeys(kept)) or str(error.message)


def summary_of(error: BaseException) -> str:
    """Returns the type and the text of an exception, for a sentence.

    >>> summary_of(ValueError("too large")), summary_of(KeyboardInterrupt())
    ('ValueError: too large', 'KeyboardInterrupt')
    """
    text = words_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def without_callers(trace: TracebackType | None, files: Collection[str]) -> TracebackType | None:
    """Returns a traceback without its outermost frames as far as they are in these files; keeps the last frame."""
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in files:
        trace = trace.tb_next
    return trace


def capitalised(text: str) -> str:
    """Returns a text for the start of a sentence.

    >>> capitalised("the key 'aB'")
    "The key 'aB'"
    """
    return text[:1].upper() + text[1:]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns the question "Did you mean …?" with a leading space, or "" if no known name is similar.

    >>> did_you_mean("AllReduc", ["AllReduce", "PS"])
    ' Did you mean AllReduce?'
    >>> did_you_mean("xyz", ["AllReduce", "PS"])
    ''
    """
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f" Did you mean {by_lower[near[0]]}?" if near else ""


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Returns the three names most similar to a word, best first, even if they are dissimilar."""
    return difflib.get_close_matches(word, list(known), n=3, cutoff=0.0)


def listed(names: Iterable[str]) -> str:
    """Returns names separated by commas, or "none".

    >>> listed(["a", "b"])
    'a, b'
    """
    return ", ".join(names) or "none"


def some_of(names: Sequence[str], most: int = 5) -> str:
    """Returns the first names of a list, and the number of the others.

    >>> some_of(["a", "b"]), some_of(["a", "b", "c", "d"], most=2)
    ('a, b', 'a, b and 2 more')
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
