"""A worker fetches the same values as one device does for the same examples."""

from __future__ import annotations

import numpy as np
import pytest

from tests.equivalence.harness import Cluster, Trainings

pytestmark = [pytest.mark.equivalence, pytest.mark.processes, pytest.mark.slow]

CLUSTER = Cluster("shuffle")


@pytest.mark.trains(CLUSTER, "graph_fetches")
@pytest.mark.trains(None, "graph_fetches")
def test_rows_come_in_their_order_and_sums_and_means_are_of_the_workers_own_examples(trainings: Trainings) -> None:
    alone, trained = trainings.alone("graph_fetches").by_worker[0], trainings.on(CLUSTER, "graph_fetches")
    parts = zip(*(trained.own(name) for name in ("rows", "classes", "right", "loss")), strict=True)
    (rows, classes, right, losses), sizes = zip(*parts, strict=True), [15, 15]
    assert [len(r) for r in rows] == sizes
    np.testing.assert_allclose(np.concatenate(rows), alone["worker:rows"], rtol=1e-9)
    np.testing.assert_array_equal(np.concatenate(classes), alone["worker:classes"])
    assert sum(right) == alone["worker:right"]
    np.testing.assert_allclose(np.average(losses, weights=sizes), alone["worker:loss"], rtol=1e-9)
