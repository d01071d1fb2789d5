"""Memory used to create a step is returned to the system."""

from __future__ import annotations

import gc
import pathlib
import weakref

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
