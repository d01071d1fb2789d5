"""Kinds through calls, conditionals and loops, including those of TF1."""

from __future__ import annotations

import pytest
import tensorflow as tf

from autodist.layout import Mean, PerExample, Scalar, Sum, Unknown
from tests.unit.layout.batches import MEAN, SIZES, check, tensor


def test_conditions_and_calls(case, feeds):
    x = tensor(case, "x")
    flag = tf.compat.v1.placeholder_with_default(True, [], name="flag")

    @tf.function
    def inner(value):
        return value @ tf.ones([3, 1], tf.float64), tf.reduce_sum(value)

    rows, total = inner(x)
    mean = tf.reduce_mean(x)
    check(
        case,
        feeds,
        [
            (rows, PerExample(0)),
            (total, Sum()),
            (tf.cond(flag, lambda: tf.reduce_mean(x), lambda: tf.reduce_mean(x * 2)), MEAN),
            (tf.cond(flag, lambda: x, lambda: x * 2), PerExample(0)),
            (tf.cond(flag, lambda: mean + 2 * tf.reduce_mean(x**2), lambda: mean), MEAN),
            (tf.cond(flag, lambda: mean, lambda: tf.constant(0.5, x.dtype)), MEAN),
            (tf.cond(flag, lambda: total + tf.reduce_sum(x**2), lambda: total), Sum()),
            (tf.cond(flag, lambda: tf.reduce_mean(x, 0), lambda: tf.reduce_mean(x, 0) + 1.0), MEAN),
        ],
    )
    assert isinstance(case.kind(tf.cond(flag, lambda: total, lambda: mean)), Unknown)
    assert isinstance(case.kind(tf.cond(flag, lambda: total, lambda: tf.constant(0.5, x.dtype))), Unknown)
    chosen = tf.cond(tf.reduce_all(x > 0), lambda: x, lambda: x * 2)
    assert case.kind(chosen) == PerExample(0)
    assert case.kind(chosen).mixed_at is not None


def test_loops_keep_rows(case, feeds):
    x, s = tensor(case, "x"), tensor(case, "s")
    _, grown = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, tf.tanh(v) * 2), [0, x])
    scanned = tf.scan(lambda carry, now: carry * 0.5 + now, tf.transpose(s, [1, 0, 2]))
    _, loss = tf.while_loop(
        lambda i, v: i < tf.shape(s)[1],
        lambda i, v: (i + 1, v + tf.reduce_mean(s[:, i])),
        [0, tf.constant(0, tf.float64)],
    )
    check(case, feeds, [(grown, PerExample(0)), (scanned, PerExample(1)), (loss, MEAN)])


def fitted(x: tf.Tensor, turns: int) -> tf.Tensor:
    """Returns weights after steps of gradient descent on the examples of the shard."""
    start = tf.constant([[0.1], [0.2], [0.3]], x.dtype)
    gradient = lambda w: tf.reduce_mean(x * (x @ w), 0)[:, None]  # noqa: E731
    return tf.while_loop(lambda i, w: i < turns, lambda i, w: (i + 1, w - 0.1 * gradient(w)), [0, start])[1]


def test_examples_interact_in_a_mean_that_a_later_turn_combines_with_them(case):
    x = tensor(case, "x")
    flag = tf.compat.v1.placeholder_with_default(True, [], name="flag")
    mean, moments = tf.reduce_mean(x, 0), fitted(x, 3)
    chosen = [tf.cond(flag, lambda: mean, lambda: moments[:, 0]), tf.cond(flag, lambda: moments[:, 0], lambda: mean)]
    assert [case.kind(t) for t in (moments, *chosen)] == [MEAN] * 3
    assert all(case.kind(t).mixed_at is not None for t in (moments, *chosen))
    assert case.kind(mean).mixed_at is None


@pytest.mark.usefixtures("first_control_flow")
def test_old_loops_keep_rows(case, feeds):
    x, s = tensor(case, "x"), tensor(case, "s")
    flag = tf.compat.v1.placeholder_with_default(True, [], name="flag")
    _, grown = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, tf.tanh(v) * 2), [0, x])
    scanned = tf.scan(lambda carry, now: carry * 0.5 + now, tf.transpose(s, [1, 0, 2]))
    chosen = tf.cond(flag, lambda: x, lambda: x * 2)
    check(case, feeds, [(grown, PerExample(0)), (scanned, PerExample(1)), (chosen, PerExample(0))])
    assert {"NextIteration", "Merge", "TensorArrayV3"} <= {op.type for op in case.graph.get_operations()}


@pytest.mark.usefixtures("first_control_flow")
def test_examples_interact_in_a_mean_of_an_old_loop(case):
    kind = case.kind(fitted(tensor(case, "x"), 3))
    assert isinstance(kind, Unknown) or kind.mixed_at is not None


@pytest.mark.usefixtures("first_control_flow")
def test_old_loops_that_turn_rows_into_something_else_are_unknown(case):
    x, s = tensor(case, "x"), tensor(case, "s")
    _, mixed = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v + tf.cumsum(s, 0)), [0, s])
    start = [0, tf.constant(1, tf.float64), tf.constant(1, tf.float64)]
    _, _, ratio = tf.while_loop(lambda i, v, r: i < 3, lambda i, v, r: (i + 1, tf.reduce_sum(s[:, i]), v), start)
    assert isinstance(case.kind(ratio), Unknown)
    [grown] = tf.while_loop(lambda v: tf.reduce_max(v) < 100, lambda v: (v * 2,), [x])
    assert isinstance(case.kind(mixed), Unknown)
    assert isinstance(case.kind(grown), Unknown)


def test_names_inside_functions_are_not_those_outside(case, feeds):
    """A sum in a function and one outside may have the same name; they must not cancel."""
    x, s = tensor(case, "x"), tensor(case, "s")
    outside = tf.reduce_sum(x)

    @tf.function
    def inner(value, divisor):
        return tf.reduce_sum(value) / divisor, tf.reduce_sum(value[:, 0])

    ratio, total = inner(s, outside)
    kinds = case.assert_joins([ratio / total, ratio, total], feeds, SIZES)
    assert isinstance(kinds[0], Unknown)
    assert isinstance(kinds[1], Unknown) or kinds[1] == Mean(Scalar(outside.name))
    assert kinds[2] == Sum()


def test_a_loop_that_runs_as_long_as_its_examples_ask_is_unknown(case):
    x = tensor(case, "x")
    [grown] = tf.while_loop(lambda v: tf.reduce_max(v) < 100, lambda v: (v * 2,), [x])
    assert "how often it runs" in case.kind(grown).reason


def test_a_function_of_each_example(case, feeds):
    x, s, y = tensor(case, "x"), tensor(case, "s"), tensor(case, "y")

    def of_one(pair):
        vector, rows = pair
        chosen = tf.cond(vector[0] > 1, lambda: tf.reduce_max(rows), lambda: tf.reduce_sum(rows))
        _, grown = tf.while_loop(lambda i, v: v < 9, lambda i, v: (i + 1, v * 2), [0, vector[0]])
        return tf.cumsum(vector) * chosen * grown, tf.constant(2.0, tf.float64)

    mapped, twos = tf.map_fn(of_one, (x, s), fn_output_signature=(tf.float64, tf.float64))
    table = tf.constant([3.0, 5.0, 7.0], tf.float64)
    looked_up = tf.map_fn(lambda label: tf.gather(table, label), y, fn_output_signature=tf.float64)
    loss = tf.reduce_mean(tf.reduce_sum(mapped, 1) * looked_up)
    check(
        case,
        feeds,
        [(mapped, PerExample(0)), (twos, PerExample(0)), (looked_up, PerExample(0)), (loss, MEAN)],
    )


def test_a_function_of_each_example_in_a_loop_that_keeps_what_its_gradient_needs(case, feeds):
    x = tensor(case, "x")
    mapped = tf.map_fn(lambda row: tf.sin(row) * row, x)
    loss = tf.reduce_mean(mapped)
    slope = tf.gradients(loss, x)[0]
    assert slope is not None
    check(case, feeds, [(mapped, PerExample(0)), (loss, MEAN)])


def turns(x, of_turn, start=0, step=1, more=0):
    """A hand-written loop with one iteration per example."""
    number = tf.shape(x)[0] + more if more else tf.shape(x)[0]
    places = tf.TensorArray(tf.float64, number, element_shape=[3])
    _, filled = tf.while_loop(lambda i, a: i < number, lambda i, a: (i + step, a.write(i, of_turn(i))), [start, places])
    return filled.stack()


def test_turns_that_take_their_own_example(case, feeds):
    x = tensor(case, "x")
    ways = [lambda i: x[i] * 2, lambda i: tf.gather(x, i), lambda i: x[i : i + 1, 0] + x[i]]
    check(case, feeds, [(turns(x, way), PerExample(0)) for way in ways])


VECTORIZED = {
    "elementwise": lambda x, s: tf.vectorized_map(tf.sin, x),
    "two": lambda x, s: tf.vectorized_map(lambda pair: tf.reduce_sum(pair[0]) * tf.tanh(pair[1]), (x, s[..., 0])),
    "products": lambda x, s: tf.vectorized_map(lambda rows: tf.transpose(rows) @ rows, s),
}


@pytest.mark.parametrize("name", VECTORIZED)
def test_functions_that_are_vectorized(case, feeds, name):
    check(case, feeds, [(VECTORIZED[name](tensor(case, "x"), tensor(case, "s")), PerExample(0))])


def test_a_vectorized_function_that_sees_other_examples_is_unknown(case):
    x = tensor(case, "x")
    assert isinstance(case.kind(tf.vectorized_map(lambda row: row - tf.reduce_max(x), x)), Unknown)


LOOPS_OVER_EXAMPLES = {
    "the example before": lambda x: turns(x, lambda i: x[i - 1]),
    "the first example": lambda x: turns(x, lambda i: x[0]),
    "every other turn": lambda x: turns(x, lambda i: x[i], step=2),
    "one turn left out": lambda x: turns(x, lambda i: x[i], start=1),
    "a turn more": lambda x: turns(x, lambda i: x[0], more=1),
    "its number": lambda x: turns(x, lambda i: x[i] * tf.cast(i, tf.float64)),
    "all examples": lambda x: tf.map_fn(lambda row: x, x),
    "two examples": lambda x: turns(x, lambda i: tf.reduce_sum(x[i : i + 2], 0)),
    "a scan": lambda x: tf.scan(lambda carry, row: carry * 0.5 + row, x),
    "a sum": lambda x: tf.foldl(lambda total, row: total + row, x),
    "another batch": lambda x: tf.map_fn(
        lambda pair: pair[0] * pair[1], (x[:, 0], tf.range(7.0, dtype=tf.float64)), fn_output_signature=tf.float64
    ),
    "numbers drawn": lambda x: tf.map_fn(lambda row: row * tf.random.uniform([3], dtype=tf.float64), x),
    "a neighbour": lambda x: tf.map_fn(lambda i: x[i] + x[0], tf.range(tf.shape(x)[0]), fn_output_signature=tf.float64),
    "a longer list": lambda x: tf.while_loop(
        lambda i, a: i < tf.shape(x)[0],
        lambda i, a: (i + 1, a.write(i, tf.ones([3], tf.float64))),
        [0, tf.TensorArray(tf.float64, tf.shape(x)[0] + 1, element_shape=[3])],
    )[1].stack(),
    "an element": lambda x: tf.TensorArray(tf.float64, tf.shape(x)[0]).unstack(x).read(1),
}


@pytest.mark.parametrize("name", LOOPS_OVER_EXAMPLES)
def test_loops_over_examples_that_see_more_than_one_are_unknown(case, name):
    assert isinstance(case.kind(LOOPS_OVER_EXAMPLES[name](tensor(case, "x"))), Unknown)


def test_a_scan_over_examples_says_why(case):
    scanned = tf.scan(lambda carry, row: carry * 0.5 + row, tensor(case, "x"), tf.zeros([3], tf.float64))
    assert "goes on from what another example has left" in case.kind(scanned).reason


def test_a_list_of_the_batch_is_as_long_as_the_batch(case, feeds):
    x = tensor(case, "x")
    listed = tf.TensorArray(tf.float64, tf.shape(x)[0]).unstack(x)
    check(case, feeds, [(listed.stack(), PerExample(0)), (tf.cast(listed.size(), tf.float64), Sum())])


def test_turns_up_to_the_longest_sequence_of_a_part_keep_rows(case, feeds):
    """As in `dynamic_rnn`: after the end of its sequence an example keeps its state and returns zeros."""
    s = tensor(case, "s")
    lengths = 1 + tf.cast(tf.reduce_sum(s, [1, 2]) > 0, tf.int32)
    bound = tf.minimum(2, tf.reduce_max(lengths))

    def turn(step, state, given):
        going = (step < lengths)[:, None]
        new = tf.tanh(state + s[:, step])
        return step + 1, tf.where(going, new, state), given.write(step, tf.where(going, new, tf.zeros_like(new)))

    start = [0, tf.zeros_like(s[:, 0]), tf.TensorArray(tf.float64, 2)]
    turns, last, given = tf.while_loop(lambda step, *_: step < bound, turn, start)
    outputs = tf.transpose(given.stack(), [1, 0, 2])
    loss = tf.reduce_mean(last) + tf.reduce_mean(outputs)
    found = [case.kind(t) for t in (last, outputs, loss)]
    assert found == [PerExample(0), PerExample(0), MEAN]
    assert all(kind.mixed_at for kind in found)
    assert isinstance(case.kind(turns), Unknown)


def test_a_list_that_grows_with_the_turns_of_a_part_is_unknown(case):
    """Its length differs between replicas."""
    s = tensor(case, "s")
    bound = tf.reduce_max(1 + tf.cast(tf.reduce_sum(s, [1, 2]) > 0, tf.int32))
    given = tf.TensorArray(tf.float64, bound, element_shape=s[:, 0].shape)
    start = [0, given]
    _, given = tf.while_loop(lambda step, _: step < bound, lambda step, g: (step + 1, g.write(step, s[:, 0])), start)
    assert "how often it runs" in case.kind(given.stack()).reason


def test_a_body_that_is_to_stand_beside_a_node_of_its_caller(case):
    """TensorFlow colocates ops for the gradient of a loop with the loop, also in function bodies."""
    s = tensor(case, "s")
    weight = tf.Variable(tf.ones([4], tf.float64))
    start = [0, tf.zeros([tf.shape(s)[0], 4], tf.float64)]
    _, last = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, tf.tanh(v * weight + s[:, i])), start)
    [gradient] = tf.compat.v1.gradients(tf.reduce_mean(last), [weight.handle], colocate_gradients_with_ops=True)
    assert case.kind(gradient) != PerExample(0)
