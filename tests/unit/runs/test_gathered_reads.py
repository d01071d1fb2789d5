"""Values that reads bring up to date: own ones in groups; those of others together, one by one, or refused."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import StrategyError
from autodist.placement.group import Group
from autodist.placement.holder import Holder
from autodist.runs import gathered_reads
from autodist.runs.gathered_reads import GatheredReads
from autodist.runtime import variable_slices
from autodist.runtime.variables import TrackedVariable

SHAPE = (4, 8)
SIZE = 4 * 8 * 8
"""Bytes of a variable."""
DIVIDED = Holder.divided(SHAPE, (1, 2), [Group.of_workers((0,)), Group.of_workers((1,))])
WHOLE = Holder.whole(SHAPE, Group.all_workers(2))


@pytest.fixture(autouse=True)
def small_values_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_reads, "NOTED", 1)


def variables(*holders: Holder, behind: bool = True) -> list[TrackedVariable]:
    made = [TrackedVariable(tf.Variable(np.ones(SHAPE), name=f"v{k}"), f"v{k}", h) for k, h in enumerate(holders)]
    for one in made:
        one.is_ahead, one.is_behind = False, behind
    return made


def test_all_are_gathered_if_half_of_the_memory_has_room(caplog: pytest.LogCaptureFixture):
    some = variables(DIVIDED, DIVIDED, WHOLE)
    with caplog.at_level(logging.INFO, logger="autodist"):
        assert GatheredReads(0, some, lambda: 4 * SIZE).of(some[0]) == some[:2]
    assert "gathering 512 B of variables that other workers hold" in caplog.text


def test_the_one_that_is_read_is_gathered_if_there_is_no_room_for_all():
    some = variables(DIVIDED, DIVIDED, WHOLE)
    assert GatheredReads(0, some, lambda: 3 * SIZE).of(some[1]) == [some[1]]


@pytest.mark.parametrize("memory", [0, 2 * SIZE])
def test_values_that_this_worker_holds_and_an_unknown_memory_refuse_nothing(memory: int):
    some = variables(*[DIVIDED if memory == 0 else WHOLE] * 8)
    assert GatheredReads(1, some, lambda: memory).of(some[0]) == some


@pytest.mark.parametrize(("read", "found"), [(0, [0, 5]), (1, [1]), (2, [2, 3]), (4, [4])])
def test_a_read_of_a_value_that_is_held_brings_no_copy_of_the_model(
    read: int, found: list[int], monkeypatch: pytest.MonkeyPatch
):
    """A small one brings the other small ones; a large one those behind it, up to the size of a transfer."""
    monkeypatch.setattr(gathered_reads, "LARGE", SIZE)
    monkeypatch.setattr(variable_slices, "GROUP_BYTES", 2 * SIZE)
    small, large = (2,), SHAPE
    shapes = [small, (8, *SHAPE), large, large, large, small]
    some = [
        TrackedVariable(tf.Variable(np.ones(shape)), "v", Holder.whole(shape, Group.all_workers(2)), is_behind=True)
        for shape in shapes
    ]
    assert GatheredReads(0, some, lambda: 0).of(some[read]) == [some[k] for k in found]


@pytest.mark.parametrize("reads_all", [False, True])
def test_values_without_room_are_refused_with_the_fix(reads_all: bool):
    some = variables(DIVIDED, DIVIDED)
    with pytest.raises(StrategyError, match=r"reading (v1:0|all variables) .* Call `evaluate` and `predict` on all"):
        GatheredReads(0, some, lambda: SIZE).of(None if reads_all else some[1])


def test_values_that_were_gathered_before_count():
    before, some = variables(DIVIDED, behind=False), variables(DIVIDED)
    reads = GatheredReads(0, [*before, *some], lambda: 3 * SIZE)
    with pytest.raises(StrategyError, match="has room for 128 B"):
        reads.of(some[0])
