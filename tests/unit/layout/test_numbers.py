"""Random expressions: if one has a kind, the values of shards combined by kind equal the value for the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autodist.layout import Unknown
from tests.unit.layout.graphs import Case

Draw = Callable[..., object]
LENGTH, WIDTH, BATCH = 3, 4, 9


def _sum_or_mean(draw: Draw, value: tf.Tensor) -> tf.Tensor:
    axes = draw(st.one_of(st.none(), st.sets(st.integers(0, max(value.shape.rank - 1, 0)), max_size=value.shape.rank)))
    reduce = draw(st.sampled_from([tf.reduce_sum, tf.reduce_mean, tf.reduce_max]))
    keep = draw(st.booleans())
    return value if value.shape.rank == 0 else reduce(value, None if axes is None else sorted(axes), keepdims=keep)


def _unary(draw: Draw, value: tf.Tensor) -> tf.Tensor:
    functions = [tf.tanh, tf.sqrt, lambda v: 2 * v, lambda v: v + 1, lambda v: 1 / v, tf.stop_gradient, tf.square]
    return draw(st.sampled_from(functions))(value)


def _layout(draw: Draw, value: tf.Tensor) -> tf.Tensor:
    rank = value.shape.rank
    functions = [
        lambda v: tf.transpose(v, draw(st.permutations(range(rank)))),
        lambda v: tf.expand_dims(v, draw(st.integers(0, rank))),
        lambda v: tf.reshape(v, [-1]),
        lambda v: tf.reshape(v, [tf.shape(v)[0], -1]) if rank else v,
        lambda v: v[..., :1] if rank > 1 else v,
        lambda v: v[:, 0] if rank > 1 else v,
        lambda v: tf.concat([v, v], draw(st.integers(0, rank - 1))) if rank else v,
        lambda v: tf.stack([v, 2 * v], draw(st.integers(0, rank))),
        lambda v: tf.tile(v, [2] + [1] * (rank - 1)) if rank else v,
        lambda v: tf.repeat(v, 2, rank - 1) if rank else v,
    ]
    return draw(st.sampled_from(functions))(value)


def _size(draw: Draw, value: tf.Tensor) -> tf.Tensor:
    sizes = [tf.size(value), tf.reduce_prod(tf.shape(value)[1:])] + ([tf.shape(value)[0]] if value.shape.rank else [])
    return tf.cast(draw(st.sampled_from(sizes)), tf.float64)


def _product(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    if left.shape.rank == 2 and right.shape.rank == 2:
        return tf.matmul(left, right, transpose_a=True)
    return left * right


BINARY = [
    tf.add,
    tf.multiply,
    tf.divide,
    tf.maximum,
    tf.math.divide_no_nan,
    _product,
    lambda a, b: tf.where(a > 1, a, b),
    lambda a, b: tf.where(a > 1, b, 0),
    lambda a, b: tf.reduce_sum(a) / tf.reduce_sum(b),
    lambda a, b: tf.reduce_sum(a) / tf.cast(tf.size(b), tf.float64),
]


def _broadcast(function: Callable[..., tf.Tensor], left: tf.Tensor, right: tf.Tensor) -> tf.Tensor | None:
    """Returns the result if the shapes are compatible for every batch size."""
    try:
        return function(left, right)
    except (ValueError, tf.errors.InvalidArgumentError):
        return None


def _grow(draw: Draw, pool: list[tf.Tensor]) -> tf.Tensor | None:
    """Adds a value computed from the existing ones."""
    picked = st.integers(0, len(pool) - 1).map(pool.__getitem__)
    step = draw(st.sampled_from([_unary, _layout, _sum_or_mean, _sum_or_mean, _size, None, None, None]))
    if step is None:
        return _broadcast(draw(st.sampled_from(BINARY)), draw(picked), draw(picked))
    return step(draw, draw(picked))


def _runs(case: Case, pool: list[tf.Tensor], feeds: dict[str, np.ndarray], sizes: list[int]) -> list[tf.Tensor]:
    """Returns the values computable on the whole batch and on each shard; the shapes of others match by chance only."""
    kept = []
    for value in pool:
        try:
            found = [case.run([value.name], part)[value.name] for part in [feeds, *case.parts(feeds, sizes)]]
        except tf.errors.InvalidArgumentError:
            continue
        if all(np.isfinite(v).all() and np.abs(v).max(initial=0) < 1e9 for v in found):
            kept.append(value)
    return kept


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.data())
def test_parts_joined_by_their_kind_are_the_whole(data):
    draw = data.draw
    case = Case()
    with case.graph.as_default():
        mask = tf.cast(case.batch("m", LENGTH) > 1, tf.float64)
        pool = [
            case.batch("x", WIDTH),
            case.batch("s", LENGTH, WIDTH),
            mask,
            tf.constant([[0.5, 1.0, 2.0, 3.0]], tf.float64),
        ]
        pool += [tf.reduce_sum(pool[1], -1) * mask, tf.reduce_sum(mask)]
        for _ in range(draw(st.integers(1, 12))):
            grown = _grow(draw, pool)
            if grown is not None and grown.shape.rank is not None and grown.shape.rank < 5:
                pool.append(grown)
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    feeds = {"x": (BATCH, WIDTH), "s": (BATCH, LENGTH, WIDTH), "m": (BATCH, LENGTH)}
    values = {name: rng.uniform(0.5, 2, shape) for name, shape in feeds.items()}
    sizes = draw(st.sampled_from([[2, 4, 3], [1, 8], [6, 3], [1, 1, 7]]))
    kinds = case.assert_joins(_runs(case, pool, values, sizes), values, sizes)
    assert not all(isinstance(kind, Unknown) for kind in kinds)
