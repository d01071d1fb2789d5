"""Memory used to create a step is returned to the system."""

from __future__ import annotations

import gc
import pathlib
import subprocess
import sys
import weakref

import pytest

from autodist.runtime import heaps
from autodist.runtime.heaps import FreedBytes, collect_and_trim, trim_heaps

BLOCKS, BLOCK = 4000, 16 << 10


class Node:
    def __init__(self) -> None:
        self.me = self


def resident() -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")) << 10


def test_objects_that_refer_to_one_another_only_end():
    gc.disable()
    try:
        seen = weakref.ref(Node())
        assert seen() is not None
        collect_and_trim()
        assert seen() is None
    finally:
        gc.enable()


def test_freed_blocks_between_used_ones_go_back_to_the_system():
    blocks = [bytearray(b"x") * BLOCK for _ in range(BLOCKS)]
    kept = blocks[:: BLOCKS // 10]
    del blocks
    before = resident()
    trim_heaps()
    assert before - resident() > BLOCKS * BLOCK // 2
    assert all(len(block) == BLOCK for block in kept)


def test_heaps_are_trimmed_each_time_that_16_mib_have_been_freed(monkeypatch):
    trims: list[str] = []
    monkeypatch.setattr(heaps, "trim_heaps", lambda: trims.append("trim"))
    freed, counts = FreedBytes(), []
    for _ in range(9):
        freed.add(5 << 20)
        counts.append(len(trims))
    assert counts == [0, 0, 0, 1, 1, 1, 1, 2, 2]


POOLS = """
import os

import tensorflow as tf
from autodist.runtime.heaps import has_pool, pool_tensors

def case(name, is_late, setting):
    os.environ.update(setting)
    if is_late:
        tf.zeros(())
    pool_tensors()
    kept = tf.zeros((1 << 20,))
    try:
        counted = tf.config.experimental.get_memory_info("CPU:0")["current"]
    except ValueError:  # the C library counts nothing
        counted = 0
    print(name, has_pool(), counted >= 4 << 20, flush=True)

for case_of in [
    ("before-the-first-operation", False, {}),
    ("after-it", True, {}),
    ("against-the-script's-own-setting", False, {"TF_CPU_ALLOCATOR_USE_BFC": "false"}),
]:
    if not os.fork():
        case(*case_of)
        break
    assert os.wait()[1] == 0, case_of
"""


def test_tensors_are_in_a_pool_if_it_is_set_before_the_first_operation_and_not_by_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each case in a process of its own, which is forked before TensorFlow has a runtime."""
    for name in (heaps._POOL, heaps._POOL_LIMIT):
        monkeypatch.delenv(name, raising=False)
    found = subprocess.run([sys.executable, "-c", POOLS], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.splitlines() == [
        "before-the-first-operation True True",
        "after-it False False",
        "against-the-script's-own-setting False False",
    ]


THREADS = 12
ALLOCATE = f"""
import ctypes
import threading

from autodist.runtime.heaps import limit_heaps

library = ctypes.CDLL(None)
limit_heaps(4)
barrier = threading.Barrier({THREADS} + 1)

def allocate():
    library.malloc(2000)
    barrier.wait()
    barrier.wait()  # a thread that ends gives its heap to the next one

threads = [threading.Thread(target=allocate) for _ in range({THREADS})]
for thread in threads:
    thread.start()
barrier.wait()
library.malloc_stats()
barrier.wait()
"""


@pytest.mark.parametrize(("user", "heaps"), [(None, 4), ("6", 6)], ids=["by default", "the user's own limit"])
def test_threads_share_as_many_heaps_as_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, user: str | None, heaps: int
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if user is not None:
        monkeypatch.setenv("MALLOC_ARENA_MAX", user)
    found = subprocess.run([sys.executable, "-c", ALLOCATE], capture_output=True, text=True, timeout=120, check=True)
    assert found.stderr.count("\nArena ") + found.stderr.startswith("Arena ") == heaps
