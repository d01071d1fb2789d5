"""The workers' feeds become one batch on the chief, and each worker gets the rows of its own back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from autodist.batch.gathered import GatheredFeeds, GatheredInput, gather_feeds
from autodist.errors import CaptureError, ClusterError, EmptyBatchError


def on_workers(fed: Sequence[Sequence[GatheredInput]]) -> list[GatheredFeeds | Exception]:
    """Returns the results of some workers, simulated by threads of this process."""
    barrier, said, told = Barrier(len(fed), timeout=20), {}, {}

    def gathers(worker: int) -> Callable[[bytes], list[bytes]]:
        def gather(content: bytes) -> list[bytes]:
            said[worker] = content
            barrier.wait()
            return [said[w] for w in range(len(fed))] if worker == 0 else []

        return gather

    def exchanges(worker: int) -> Callable[[bytes], bytes]:
        def exchange(content: bytes) -> bytes:
            if worker == 0:
                told[0] = content
            barrier.wait()
            return told[0]

        return exchange

    def of(worker: int) -> Any:
        try:
            return gather_feeds(fed[worker], worker, gathers(worker), exchanges(worker))
        except (CaptureError, EmptyBatchError) as error:
            return error

    with ThreadPoolExecutor(len(fed)) as pool:
        return list(pool.map(of, range(len(fed))))


def test_the_chief_has_all_parts_in_the_order_of_the_workers_and_others_no_rows() -> None:
    parts = [np.arange(6.0).reshape(3, 2), np.zeros((0, 2)), np.ones((1, 2))]
    names = [np.array([b"a", b"b", b"c"], object), np.array([], object), np.array([b"d"], object)]
    rate = np.float64(0.5)
    chief, second, third = on_workers(
        [
            [GatheredInput("x", p, 0), GatheredInput("rate", rate, None), GatheredInput("names", n, 0)]
            for p, n in zip(parts, names, strict=True)
        ]
    )
    np.testing.assert_array_equal(chief.values[0], np.concatenate(parts))
    assert [chief.values[1], second.values[1]] == [rate, rate]
    assert chief.values[2].tolist() == [b"a", b"b", b"c", b"d"]
    assert [w.all_examples for w in (chief, second, third)] == [4, 4, 4]
    assert [w.examples for w in (chief, second, third)] == [4, 0, 0]
    assert [w.values[0].shape for w in (second, third)] == [(0, 2), (0, 2)]


def test_a_worker_gets_back_the_rows_of_its_own_examples_alone() -> None:
    found = on_workers([[GatheredInput("x", np.zeros((2, n)), 1)] for n in (3, 0, 2)])
    rows, flat, scalar = np.arange(5), np.arange(20).reshape(2, 10), np.float64(3)
    mine = [one.own_rows([rows, flat, scalar], [0, 1, None]) for one in found]
    assert [m[0].tolist() for m in mine] == [[0, 1, 2], [], [3, 4]]
    assert [m[1][0].tolist() for m in mine] == [[0, 1, 2, 3, 4, 5], [], [6, 7, 8, 9]]
    assert [m[2] for m in mine] == [scalar] * 3
    with pytest.raises(CaptureError, match="returns 4 rows for 5 examples"):
        found[0].own_rows([np.arange(4)], [0])


def test_rows_of_sparse_ones_are_padded_to_the_longest_of_any_worker() -> None:
    chief, _ = on_workers([[GatheredInput("ids", np.ones((2, n), np.int64), 0, is_padded=True)] for n in (1, 3)])
    assert chief.values[0].tolist() == [[1, 0, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("other", [np.zeros((2, 4)), np.zeros((2, 3), np.float32)])
def test_parts_that_do_not_fit_are_refused_on_all_workers(other: np.ndarray) -> None:
    for error in on_workers([[GatheredInput("x", np.zeros((2, 3)), 0)], [GatheredInput("x", other, 0)]]):
        assert isinstance(error, CaptureError)
        assert "worker 1 feeds x as" in str(error)


def test_a_batch_without_examples_is_refused_on_all_workers() -> None:
    assert all(isinstance(e, EmptyBatchError) for e in on_workers([[GatheredInput("x", np.zeros((0, 3)), 0)]] * 2))


@pytest.mark.parametrize(
    "said", [b'{"loss": 1.0}', b"true", b"", b"\xff"], ids=["logs", "a decision", "nothing", "bytes"]
)
def test_a_step_that_the_chief_does_not_make_is_refused_by_name(said: bytes) -> None:
    with pytest.raises(ClusterError, match="the chief makes another call: every worker must make the same steps"):
        gather_feeds([GatheredInput("x", np.ones((2, 3)), 0)], 1, lambda content: [], lambda content: said)
