"""Loss decomposition: the tensor differentiated instead of the loss has its gradients, and splits into its terms."""

from __future__ import annotations

import inspect
import sys

import pytest
import tensorflow as tf

from autodist.capture.gradients import recording_gradients


def in_graph(build):
    """The one call of `gradient` that `build` makes in a plain graph, and the gradients."""
    with tf.Graph().as_default(), recording_gradients(in_functions=False) as notes:
        variable = tf.Variable([1.0, 2.0])
        target, options = build(variable)
        found = tf.compat.v1.gradients(target, [variable], **options)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            return notes.calls[0], session.run(found)[0].tolist()


def in_function(build):
    """The same on a tape, in a function."""
    variable = tf.Variable([1.0, 2.0])

    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            target, options = build(variable)
        return tape.gradient(target, variable, output_gradients=options.get("grad_ys"))

    with recording_gradients() as notes:
        found = gradient()
    return notes.calls[0], found.numpy().tolist()


in_both = pytest.mark.parametrize("noted", [in_graph, in_function])


@in_both
def test_each_value_that_is_added_has_a_seam(noted):
    call, gradient = noted(lambda v: (tf.reduce_sum(v**2 * tf.ones([2])) + tf.add_n([3 * v[0], tf.constant(1.0)]), {}))
    assert gradient == [5.0, 4.0]
    whole = call.decomposition_points[-1]
    assert whole.tensor is call.targets[0] and len(whole.parts) == 2
    assert len({point.seed.name for point in call.decomposition_points}) == len(call.decomposition_points)


@in_both
@pytest.mark.parametrize(
    "of_values, gradient",
    [
        (lambda a, b: 0.5 * (a + 0.1 * b) / 2.0, [0.25, 0.025]),
        (lambda a, b: tf.negative(tf.negative(a - b)), [1.0, -1.0]),
        (lambda a, b: tf.reduce_mean(tf.stack([a, b, a])), [2 / 3, 1 / 3]),
        (lambda a, b: tf.cast(tf.cast(a, tf.float64) + tf.cast(b, tf.float64), tf.float32), [1.0, 1.0]),
        (lambda a, b: tf.reshape(tf.reshape(a, [1]) + b, []), [1.0, 1.0]),
        (lambda a, b: tf.math.divide_no_nan(a, tf.maximum(b, 0.5)), [0.5, -0.25]),
        (lambda a, b: tf.where(b > 0, tf.sqrt(a) / (b + 2.0), a), [0.125, -0.0625]),
        (lambda a, b: a * b, [2.0, 1.0]),
    ],
    ids=["scaled", "negated", "stacked", "cast", "reshaped", "ratio", "chosen", "product"],
)
def test_gradients_are_those_of_the_loss(noted, of_values, gradient):
    call, found = noted(lambda v: (of_values(v[0], v[1]), {}))
    assert found == pytest.approx(gradient)
    assert len([point for point in call.decomposition_points if not point.parts]) == 2


@in_both
def test_several_targets_have_a_seam_each(noted):
    call, gradient = noted(lambda v: ([v[0] ** 2, 2 * v], {}))
    assert gradient == [4.0, 2.0]
    assert {id(t) for t in call.targets} <= {id(point.tensor) for point in call.decomposition_points}


@in_both
def test_the_weight_of_a_target_is_part_of_it(noted):
    call, gradient = noted(lambda v: (2 * v, {"grad_ys": [tf.square(v)] if noted is in_graph else tf.square(v)}))
    assert gradient == [2.0, 8.0]
    assert call.targets[0].shape.rank == 0


@pytest.mark.parametrize(
    "build",
    [lambda v: (v[0], {}), lambda v: (tf.reduce_sum(tf.gather(v * 1.0, [0, 1, 1])), {})],
    ids=["a value", "a sum of rows"],
)
def test_a_loss_that_is_no_arithmetic_has_none(build):
    assert in_graph(build)[0].decomposition_points == ()


def test_nothing_is_looked_at_behind_what_gradients_end_at():
    def build(v):
        inner = v[0] + v[1]
        return inner * inner, {"stop_gradients": [inner]}

    with tf.Graph().as_default(), recording_gradients(in_functions=False) as notes:
        variable = tf.Variable([1.0, 2.0])
        target, options = build(variable)
        assert tf.compat.v1.gradients(target, [variable], **options) == [None]
    assert [point.tensor.op.type for point in notes.calls[0].decomposition_points] == ["AddV2", "Mul"]


def stopped(tape, v):
    with tape:
        a, b = v[0] * 1.0, v[1] * 3.0
        with tape.stop_recording():
            share = a / (a + b)
        return a * b + share * b


def added_outside(tape, v):
    with tape:
        a, b = v[0] * 1.0, v[1] * 3.0
    return a * b + b


def reset(tape, v):
    with tape:
        a, b = v[0] * 1.0, v[1] * 3.0
        product = a * b
        tape.reset()
        return product * (v[0] + v[1])


def before(tape, v):
    a, b = v[0] * 1.0, v[1] * 3.0
    with tape:
        return (a * b + a) * v[1]


@pytest.mark.parametrize("loss", [stopped, added_outside, reset, before])
@pytest.mark.parametrize("persistent", [False, True])
def test_gradients_end_where_the_tape_does_not_record(loss, persistent):
    variable = tf.Variable([1.0, 2.0])

    def gradient():
        tape = tf.GradientTape(persistent)
        found = tape.gradient(loss(tape, variable), variable)
        return tf.zeros([0]) if found is None else found

    with recording_gradients() as notes:
        found = tf.function(gradient)()
    assert found.numpy().tolist() == gradient().numpy().tolist()
    assert len(notes.calls) == 1


def test_sums_longer_than_python_may_call_itself_are_taken_apart(few_calls_deep):
    def build(v):
        total, other = v[0], v[1]
        for _ in range(few_calls_deep):
            total += other
        return total, {}

    assert in_graph(build)[1] == [1.0, few_calls_deep]


@pytest.fixture
def few_calls_deep():
    """Lowers the recursion limit to a little more than TensorFlow needs, so that a short sum counts as a long one."""
    limit, more = sys.getrecursionlimit(), 200
    sys.setrecursionlimit(len(inspect.stack(0)) + more)
    yield more
    sys.setrecursionlimit(limit)
