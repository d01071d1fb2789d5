import random

from autodist.strategies import GreedyLoads


def test_the_least_loaded_are_those_that_sorting_all_would_give(cluster):
    draw = random.Random(3)
    for bandwidths in ([10.0] * 9, [10.0, 25.0, 10.0, 40.0, 25.0, 10.0, 10.0, 40.0, 25.0]):
        loads, owned = GreedyLoads(cluster(9, bandwidths=bandwidths)), [0] * 9
        for _ in range(200):
            count, size = draw.randint(0, 9), draw.choice([0, 8, 100])
            ordered = sorted(range(9), key=lambda w: ((owned[w] + size) / bandwidths[w], w))
            assert loads.least_loaded(count, size) == tuple(ordered[:count])
            worker, more = draw.randrange(9), draw.choice([0, 40, 400])
            loads.add(worker, more)
            owned[worker] += more
