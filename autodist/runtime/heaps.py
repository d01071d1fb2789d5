"""The heaps of the C library, which keep freed memory for the thread that used it."""

from __future__ import annotations

import ctypes
import gc

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # options of the C library's mallopt
_UNMAPPED_BYTES = 1 << 20
_TRIMMED_BYTES = 16 << 20


def collect_and_trim() -> None:
    """Collects garbage, for example graphs in reference cycles, and trims the heaps."""
    gc.collect()
    trim_heaps()


def unmap_freed_blocks() -> None:
    """Makes the C library return each freed block of at least 1 MiB to the system at once.

    By default it keeps blocks of up to 32 MiB in a heap for each thread. For a step that frees gathered parameters and
    activations, these heaps can take several times the memory of the tensors. Has an effect only with glibc.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, _UNMAPPED_BYTES)
        set_option(_TRIM_THRESHOLD, 2 * _UNMAPPED_BYTES)


def trim_heaps() -> None:
    """Returns free memory of all heaps to the system; the C library keeps it for the thread that used it.

    Has an effect only with glibc.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class FreedBytes:
    """Trims the heaps each time that about 16 MiB have been freed.

    A transfer of many values allocates one after the other, in several threads. Their blocks are smaller than those
    that the C library returns to the system at once, so the heaps could grow to the size of all values.
    """

    def __init__(self) -> None:
        self._freed = 0

    def add(self, freed: int) -> None:
        """Notes that some bytes have been freed."""
        self._freed += freed
        if self._freed >= _TRIMMED_BYTES:
            self._freed = 0
            trim_heaps()
