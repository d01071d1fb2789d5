"""What TensorFlow keeps of the gradients of a graph, and what of it is let go."""

from __future__ import annotations

import gc
import weakref

import pytest
import tensorflow as tf

from autodist.capture.gradients import forget_custom_gradients, noting_gradients


@tf.custom_gradient
def tripled(x):
    return tf.identity(x), lambda upstream: 3.0 * upstream


@tf.RegisterGradient("AutodistTestDoubled")
def _doubled(op, upstream):
    return 2.0 * upstream


def graph_of(operation):
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [], "x")
        tf.identity(operation(x), "y")
    return graph


def gradient(graph):
    with graph.as_default():
        (found,) = tf.gradients(graph.get_tensor_by_name("y:0"), graph.get_tensor_by_name("x:0"))
        with tf.compat.v1.Session(graph=graph) as session:
            return session.run(found, {"x:0": 1.0})


def test_custom_gradients_of_a_graph_are_let_go_and_the_graph_with_them():
    graph = graph_of(tripled)
    seen = weakref.ref(graph)
    forget_custom_gradients(graph.as_graph_def())
    with pytest.raises(LookupError):
        gradient(graph)
    del graph
    gc.collect()
    assert seen() is None


def test_those_of_other_graphs_remain():
    other = graph_of(tripled)
    forget_custom_gradients(graph_of(tripled).as_graph_def())
    assert gradient(other) == 3.0


def test_a_gradient_that_the_script_has_registered_remains():
    def doubled(x):
        with tf.compat.v1.get_default_graph().gradient_override_map({"Identity": "AutodistTestDoubled"}):
            return tf.identity(x)

    graph = graph_of(doubled)
    forget_custom_gradients(graph.as_graph_def())
    assert gradient(graph) == 2.0


def noted(build, by_term=True):
    """The one call of `gradient` that `build` makes in a plain graph, and the gradients."""
    with tf.Graph().as_default(), noting_gradients(in_functions=False, by_term=by_term) as notes:
        variable = tf.Variable([1.0, 2.0])
        target, sources, options = build(variable)
        found = tf.compat.v1.gradients(target, sources, **options)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            return notes.calls[0], session.run(found)


def three_terms(variable):
    return tf.reduce_sum(variable**2) + tf.add_n([3 * variable[0], tf.constant(1.0)]), [variable], {}


def test_a_loss_is_differentiated_term_by_term_with_a_seed_for_each():
    call, (gradient,) = noted(three_terms)
    assert len(call.terms) == 3 and len({seed.name for _, seed in call.terms}) == 3
    assert all(seed.op.inputs[0] is call.seed for _, seed in call.terms)
    assert list(gradient) == [5.0, 4.0]


def test_stacked_terms_are_told_apart():
    call, (gradient,) = noted(lambda v: (tf.reduce_sum(tf.stack([v[0] ** 2, v[1]])), [v], {}))
    assert len(call.terms) == 2 and list(gradient) == [2.0, 1.0]


@pytest.mark.parametrize(
    "build",
    [
        lambda v: (v[0] + v[0] ** 2, [v], {"grad_ys": [tf.constant(2.0)]}),
        lambda v: (v + v**2, [v], {}),
        lambda v: (tf.reduce_sum(v), [v], {}),
        lambda v: (_twice(v[0]), [v], {}),
        lambda v: (v[0] + v[1], [v], {"stop_gradients": [tf.constant(0.0)]}),
    ],
    ids=["weighed", "no scalar", "one term", "a term twice", "stopped"],
)
def test_other_losses_are_differentiated_as_they_are(build):
    assert noted(build)[0].terms == ()


def _twice(term):
    return term + term


def test_nothing_is_told_apart_unless_it_is_asked_for():
    call, (gradient,) = noted(three_terms, by_term=False)
    assert call.terms == () and list(gradient) == [5.0, 4.0]
