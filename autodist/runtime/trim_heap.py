"""Memory that nothing uses any more goes back to the system."""

from __future__ import annotations

import ctypes
import gc


def collect_and_trim() -> None:
    """Collects garbage, such as graphs whose objects refer to one another, and trims the heaps."""
    gc.collect()
    trim_heaps()


def trim_heaps() -> None:
    """Returns to the system what is free in all heaps; the C library keeps it for the thread that had it.

    Elsewhere than under glibc, nothing is done.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
