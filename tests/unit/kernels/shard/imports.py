"""Assertions about the passes that import annotations."""

from __future__ import annotations

from typing import Any

from autodist.graph.step import CapturedStep
from autodist.kernels import Context
from autodist.kernels.base import Kernel
from tests.unit.kernels.in_one_process import plan
from tests.unit.kernels.rewrites import assert_rewrites, step_of

PLACES = 4
"""The number of devices, for a mesh {a: 2, b: 2}."""


def assert_imports(kernel: Kernel, text: str, places: int = PLACES, **fields: Any) -> CapturedStep:
    """Asserts that a pass rewrites the step before a text to that after it, and keeps the result in a second run."""
    after = assert_rewrites(kernel, text, replicas=places, **fields)
    assert kernel.apply(after, Context(plan(after, 1, places), 0)) is after, "a second run changes the step"
    assert isinstance(after, CapturedStep)
    return after


def imported(kernel: Kernel, text: str, places: int = PLACES, **fields: Any) -> CapturedStep:
    """Returns the step of a text after a pass."""
    step = step_of(text, **fields)
    made = kernel.apply(step, Context(plan(step, 1, places), 0))
    assert isinstance(made, CapturedStep)
    return made
