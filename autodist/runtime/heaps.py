"""Memory that tensors have freed: TensorFlow's pool, and the heaps of the C library."""

from __future__ import annotations

import ctypes
import gc
import os

import tensorflow as tf

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # options of the C library's mallopt
_UNMAPPED_BYTES, _UNMAPPED_BYTES_BESIDE_POOL = 1 << 20, 4 << 20
_TRIMMED_BYTES = 16 << 20
_POOL = {"TF_CPU_ALLOCATOR_USE_BFC": "true", "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(1 << 30)}
"""Environment variables of TensorFlow: the pool is used, and its size is limited by the system alone."""


def pool_tensors() -> None:
    """Makes TensorFlow allocate a CPU's tensors in a pool, as on GPUs and for CPUs next to GPUs.

    By default each tensor is a block of the C library, whose heaps, one for each thread, keep several times the memory
    that the tensors of a step need together; or each large block is mapped anew, for which the system has to clear its
    pages. In a pool, a tensor takes the place of one that has been freed.

    Has an effect only before the first operation in this process, and the script's own values of these environment
    variables stay.
    """
    for name, value in _POOL.items():
        os.environ.setdefault(name, value)


def collect_and_trim() -> None:
    """Collects garbage, for example graphs in reference cycles, and trims the heaps."""
    gc.collect()
    trim_heaps()


def has_pool() -> bool:
    """Returns True if tensors on the CPU are in a pool; creates TensorFlow's devices."""
    try:
        tf.config.experimental.get_memory_info("CPU:0")
    except ValueError:  # the C library counts nothing
        return False
    return True


def unmap_freed_blocks() -> None:
    """Makes the C library return each large freed block to the system at once.

    By default it keeps blocks of up to 32 MiB in a heap for each thread. For a step that frees gathered parameters and
    activations, these heaps can take several times the memory of the tensors. Large are blocks of at least 1 MiB; next
    to a pool of the tensors, when only messages are such blocks, of at least 4 MiB. Has an effect only with glibc.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        unmapped = _UNMAPPED_BYTES_BESIDE_POOL if has_pool() else _UNMAPPED_BYTES
        set_option(_MMAP_THRESHOLD, unmapped)
        set_option(_TRIM_THRESHOLD, 2 * unmapped)


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
