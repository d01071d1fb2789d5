"""Memory that tensors have freed: TensorFlow's pool, and the heaps of the C library."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Mapping

from tensorflow.python.eager import context  # knows whether there are devices

_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8  # options of the C library's mallopt
_UNMAPPED_BYTES, _UNMAPPED_BYTES_BESIDE_POOL = 1 << 20, 4 << 20
_TRIMMED_BYTES = 16 << 20
_POOL, _POOL_LIMIT = "TF_CPU_ALLOCATOR_USE_BFC", "TF_CPU_BFC_MEM_LIMIT_IN_MB"
"""Environment variables that TensorFlow reads when it creates the devices of this process."""
_ARENA_VARIABLES = frozenset({"MALLOC_ARENA_MAX", "GLIBC_TUNABLES"})
"""Environment variables by which a user may have limited the heaps."""


def pool_tensors() -> None:
    """Makes TensorFlow allocate a CPU's tensors in a pool, as on GPUs and for CPUs next to GPUs.

    By default each tensor is a block of the C library, whose heaps, one for each thread, keep several times the memory
    that the tensors of a step need together; or each large block is mapped again, for which the system has to clear its
    pages. In a pool, a tensor takes the place of one that has been freed.

    Changes nothing once TensorFlow has its devices, and the script's own values of the environment variables stay.
    """
    if context.context()._context_handle is None:
        os.environ.setdefault(_POOL, "true")
        os.environ.setdefault(_POOL_LIMIT, str(1 << 30))  # none: the system's memory is the limit


def has_pool() -> bool:
    """Returns True if the tensors on this process's CPU are in a pool."""
    return os.environ.get(_POOL, "").lower() in ("true", "1")


def collect_and_trim() -> None:
    """Collects garbage, for example graphs in reference cycles, and trims the heaps."""
    gc.collect()
    trim_heaps()


def unmap_freed_blocks() -> None:
    """Makes the C library return each large freed block to the system at once.

    By default it keeps blocks of up to 32 MiB in a heap for each thread. For a step that frees gathered parameters and
    activations, these heaps can take several times the memory of the tensors. Large are blocks of at least 1 MiB; next
    to a pool of the tensors, when only messages are such blocks, of at least 4 MiB. Has an effect only with glibc.
    """
    unmapped = _UNMAPPED_BYTES_BESIDE_POOL if has_pool() else _UNMAPPED_BYTES
    _set_options({_MMAP_THRESHOLD: unmapped, _TRIM_THRESHOLD: 2 * unmapped})


def limit_heaps(cores: int) -> None:
    """Limits the C library to as many heaps as this process has cores, or to those that exist already.

    By default it makes up to eight for each core. The threads of a server allocate messages in all of them, and each
    heap keeps some that were freed. More heaps than cores save no processor time, since no more threads run at once.

    Has an effect only with glibc, and before the process has eight heaps. The user's environment variables stay.
    """
    if not _ARENA_VARIABLES.intersection(os.environ):
        _set_options({_ARENA_MAX: cores})


def _set_options(options: Mapping[int, int]) -> None:
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        for option, value in options.items():
            set_option(option, value)


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
