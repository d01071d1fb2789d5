"""Filter of the C library's stream `stderr`, to which TensorFlow's C++ code logs, for the time of a run."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from autodist.logs.quiet import END_LIMIT, await_later, is_debugging, open_filter

_UNBUFFERED = 2
"""`_IONBF` of the GNU C library."""


@contextmanager
def quiet_stream(when: bool = True) -> Iterator[None]:
    """Removes lines that TensorFlow logs in every run from the C library's `stderr`, within the context.

    File descriptor 2 stays as it is, so the context may last for a whole run: `sys.stderr` and the processes that the
    script starts keep their terminal. Only C and C++ code writes to the stream. The filter is a separate process, so
    that TensorFlow's last lines before it aborts this process are shown.

    Args:
        when: True to filter.
    """
    # Other C libraries keep the pointer in memory that cannot be written.
    opened = open_filter() if when and not is_debugging() and platform.libc_ver()[0] == "glibc" else None
    if opened is None:
        yield
        return
    child, plain = opened
    try:
        with _stream_to(child, plain):
            yield
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_LIMIT)
        os.close(plain)
        await_later(child)


@contextmanager
def _stream_to(child: subprocess.Popen[bytes], plain: int) -> Iterator[None]:
    """Lets the stream lead to a process; afterwards, to the descriptor `plain` again."""
    assert child.stdin is not None, "open_filter requests it"
    library = ctypes.CDLL(None)
    library.fdopen.restype = ctypes.c_void_p
    sink = os.dup(child.stdin.fileno())
    child.stdin.close()
    stream = ctypes.c_void_p(library.fdopen(sink, b"w"))
    library.setvbuf(stream, None, _UNBUFFERED, ctypes.c_size_t(0))
    pointer = ctypes.c_void_p.in_dll(library, "stderr")
    before = pointer.value
    pointer.value = stream.value
    try:
        yield
    finally:
        pointer.value = before
        # The stream stays open, since another thread may be writing to it.
        os.dup2(plain, sink, inheritable=False)
