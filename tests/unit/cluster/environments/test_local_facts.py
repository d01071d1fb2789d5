"""The GPUs that CUDA shows to a process."""

from __future__ import annotations

import pytest

from autodist.cluster.environments.local_facts import visible_gpus

INSTALLED = ("GPU-aa", "GPU-ab", "GPU-cc")


@pytest.mark.parametrize(
    "visible, seen",
    [
        (None, INSTALLED),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("1,0", ("GPU-ab", "GPU-aa")),
        ("GPU-c", ("GPU-cc",)),
        ("0,7,1", ("GPU-aa",)),  # CUDA ignores entries after an invalid one
        ("GPU-a", ()),  # ambiguous
    ],
)
def test_visible_gpus(visible: str | None, seen: tuple[str, ...]) -> None:
    assert visible_gpus(INSTALLED, visible) == seen
