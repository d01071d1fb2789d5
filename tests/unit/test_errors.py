"""Errors of AutoDist in another process."""

from __future__ import annotations

import pickle

import pytest

from autodist.errors import (
    AutoDistError,
    CheckpointMismatchError,
    MachinesAwayError,
    PartsError,
    Place,
    ResourceSpecError,
    UnsupportedVersionError,
    WorkerFailedError,
)


@pytest.mark.parametrize(
    "error",
    [
        WorkerFailedError("n1:1", "raised ValueError: boom", ("a line", "the last")),
        MachinesAwayError("n2 does not answer", ("n2:0",)),
        CheckpointMismatchError("saved/ckpt-1", ("a",), (), ()),
        ResourceSpecError("allowed: 1 or more", Place("cluster.yml", 3, "workers")),
        PartsError(("a", "b"), (("x", "y"), ("y", "x"))),
        UnsupportedVersionError("keras", "2.0", "3.15", "pip install keras"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_are_the_same_in_another_process(error: AutoDistError) -> None:
    """Python's own way calls the constructor with the text, which Ray and Dask could then not unpickle."""
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other) == vars(error)
