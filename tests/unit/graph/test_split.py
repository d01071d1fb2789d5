"""Parts of a step: run in sequence, they are equivalent to the step; otherwise the error names the cycle."""

from __future__ import annotations

import graphlib
import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from autodist.errors import PartsError, RewriteError
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.split import split
from autodist.graph.step import CapturedStep
from tests.unit.graph.graph_text import assert_text, from_text

DIAMOND = """
    x = Placeholder()
    a = Tanh(x)
    b = Neg(a)
    c = Neg(a)
    d = AddN(b, c)
"""


def step_of(text, outputs=(), targets=()):
    return CapturedStep(from_text(text), outputs=tuple(outputs), targets=tuple(targets))


def by_part(**parts):
    """Returns a callback by node names: `by_part(first="x a", second="b")`."""
    return {name: key for key, names in parts.items() for name in names.split()}.get


def run_parts(session, parts, feeds):
    """Runs the parts in sequence, each with its inputs; returns all tensors that they output."""
    values = {}
    for key in parts.order:
        graph = parts[key].graph()
        with tf.Graph().as_default() as built:
            tf.graph_util.import_graph_def(graph.graph_def, name="")
        given = {graph.inputs[name]: values[name] for name in graph.inputs}
        given |= {name: value for name, value in feeds.items() if node_of(name) in parts[key].nodes}
        with session(built) as opened:
            found, _ = opened.run([list(graph.outputs), list(graph.targets)], given)
        values.update(zip(graph.outputs, found, strict=True))
    return values


# -- accepted splits -----------------------------------------------------------------------------------------------


def test_no_key_is_no_part():
    parts = split(step_of(DIAMOND, ["d:0"]), lambda _: None)
    assert dict(parts) == {} and parts.order == () and str(parts) == ""


def test_one_key_is_one_part_that_takes_nothing():
    part = split(step_of(DIAMOND, ["d:0"], ["c"]), lambda _: 0)[0]
    assert sorted(part.nodes) == sorted("xabcd") and part.nodes[:2] == ("x", "a") and part.nodes[-1] == "d"
    assert (part.takes, part.gives, part.waits, part.targets) == ((), ("d:0",), (), ("c",))


def test_a_value_that_several_parts_read_is_given_once():
    parts = split(step_of(DIAMOND, ["d:0"]), by_part(first="x a", left="b", right="c", last="d"))
    assert parts["first"].gives == ("a:0",)
    assert sorted(parts.readers["a:0"]) == ["left", "right"]
    assert parts["left"].takes == parts["right"].takes == ("a:0",)
    assert parts["last"].takes == ("b:0", "c:0") and parts["last"].gives == ("d:0",)
    assert parts.needs == {
        "first": frozenset(), "left": {"first"}, "right": {"first"}, "last": {"left", "right"},
    }  # fmt: skip


def test_parts_are_printed_in_their_order():
    parts = split(step_of(DIAMOND, ["a:0", "d:0"], ["b"]), by_part(first="x a", last="b c d"))
    assert str(parts).splitlines() == [
        "part 'first', 2 nodes",
        "  gives a:0 to 'last', to the caller",
        "part 'last', 3 nodes, after 'first'",
        "  takes a:0",
        "  gives d:0 to the caller",
        "  runs b",
    ]


def test_waiting_passes_no_value_but_orders_parts():
    parts = split(step_of("a = Placeholder()\nb = Neg(a)\nc = Placeholder(^b)"), by_part(first="a b", last="c"))
    assert parts.needs["last"] == {"first"}
    assert (parts["first"].gives, parts["first"].targets) == ((), ("b",))
    assert (parts["last"].takes, parts["last"].waits) == ((), ("b",))
    assert_text(parts["last"].graph().graph_def, "c = Placeholder()")


def test_what_lies_in_no_part_stands_between_them():
    parts = split(step_of(DIAMOND, ["d:0"]), by_part(first="a", last="d"))
    assert parts.needs == {"first": frozenset(), "last": {"first"}}
    assert parts["first"].takes == ("x:0",) and parts["first"].gives == ("a:0",)
    assert parts["last"].takes == ("b:0", "c:0")
    assert parts.readers == {"x:0": ("first",), "b:0": ("last",), "c:0": ("last",)}


def test_a_part_is_a_graph_with_placeholders_for_what_it_takes():
    graph = split(step_of(DIAMOND, ["d:0"]), by_part(first="x a", last="b c d"))["last"].graph()
    assert_text(
        graph.graph_def,
        """
        autodist/taken/a/0 = Placeholder()
        b = Neg(autodist/taken/a/0:0)
        c = Neg(autodist/taken/a/0:0)
        d = AddN(b, c)
        """,
    )
    assert graph.inputs == {"a:0": "autodist/taken/a/0:0"} and graph.outputs == ("d:0",)


def test_a_list_of_tensors_does_not_pass():
    with tf.Graph().as_default() as graph:
        tf.raw_ops.TensorListStack(
            input_handle=tf.raw_ops.TensorListReserve(
                element_shape=tf.constant([2]), num_elements=tf.constant(3), element_dtype=tf.float32, name="list"
            ),
            element_shape=tf.constant([2]), element_dtype=tf.float32, name="stack",
        )  # fmt: skip
    parts = split(CapturedStep(graph.as_graph_def()), lambda name: name == "stack")
    for part in parts.values():
        with pytest.raises(RewriteError, match="list:0 passes .* variant, not a value: give 'list' the key"):
            part.graph()


# -- parameters ----------------------------------------------------------------------------------------------------


def test_a_parameter_used_in_two_parts_is_one_variable_with_a_handle_in_each():
    with tf.Graph().as_default() as graph:
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[2], shared_name="weight", name="weight")
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        forward = x * tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32, name="forward/read")
        with tf.control_dependencies([forward]):
            write = tf.raw_ops.AssignAddVariableOp(resource=handle, value=tf.identity(x, "update/x"), name="update/add")
        with tf.control_dependencies([write]):
            after = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32, name="late/read")
        start = tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant([1.0, 2.0]), name="start")
    step = CapturedStep(graph.as_graph_def(), outputs=(forward.name, after.name), targets=(write.name,))
    parts = split(step, lambda name: name.split("/")[0] if "/" in name else None if name == "start" else "forward")
    assert [parts[key].copies for key in parts.order] == [("weight",)] * 3
    assert "weight:0" not in parts.readers
    server = tf.distribute.Server.create_local_server()
    with tf.compat.v1.Session(server.target, graph=graph) as session:
        session.run(start)
    values = run_parts(lambda g: tf.compat.v1.Session(server.target, graph=g), parts, {"x:0": [3.0, 4.0]})
    np.testing.assert_array_equal(values[forward.name], [3.0, 8.0])
    np.testing.assert_array_equal(values[after.name], [4.0, 6.0])


# -- cycles --------------------------------------------------------------------------------------------------------


def test_a_part_that_needs_itself_through_another_is_refused_by_the_node_that_goes_back():
    with pytest.raises(PartsError) as caught:
        split(step_of(DIAMOND), by_part(outer="x a c d", inner="b"))
    assert caught.value.keys == ("outer", "inner")
    assert caught.value.ways == (("a", "b"), ("b", "d"))
    assert caught.value.node == "d"
    assert str(caught.value) == (
        "The node 'd' leads back to the part 'outer', so that no part can run first: 'outer' feeds 'inner' (a → b), "
        "'inner' feeds 'outer' (b → d). Use another key for 'd', or one key for all nodes of the cycle."
    )


def test_a_part_that_needs_itself_through_nodes_of_no_part_is_refused():
    with pytest.raises(PartsError, match=r"'d' leads back to the part 'u', .*: 'u' feeds 'u' \(a → b → d\)"):
        split(step_of(DIAMOND), by_part(u="a c d"))


def test_to_wait_is_to_need():
    text = "a = Placeholder()\nb = Neg(a)\nc = Neg(a, ^b)\nd = Neg(a, ^c)"
    with pytest.raises(PartsError, match=r"b → c → d"):
        split(step_of(text), by_part(u="b d"))


def test_a_callback_that_changes_its_mind_from_node_to_node_is_refused_or_cut():
    chain = "\n".join(["n0 = Placeholder()", *(f"n{k} = Neg(n{k - 1})" for k in range(1, 6))])
    step = step_of(chain, ["n5:0"])
    queried = []

    def key(name):
        queried.append(name)
        return len(queried) % 2

    with pytest.raises(PartsError, match="'n2' leads back to the part 1"):
        split(step, key)
    assert queried == [f"n{k}" for k in range(6)]  # once per node, in topological order
    queried.clear()
    parts = split(step, key, cut_cycles=True)
    assert [parts[one].nodes for one in parts.order] == [(f"n{k}",) for k in range(6)]
    assert {one[0] for one in parts} == {0, 1}


def test_what_does_not_come_back_is_not_cut():
    parts = split(step_of(DIAMOND), by_part(first="x a", last="b c d"), cut_cycles=True)
    assert list(parts.order) == [("first", 0), ("last", 0)]


def test_a_part_is_cut_where_a_path_leaves_it():
    parts = split(step_of(DIAMOND, ["d:0"]), by_part(u="a d", v="b c"), cut_cycles=True)
    assert dict(parts.key_of) == {
        "a": ("u", 0), "b": ("v", 1), "c": ("v", 1), "d": ("u", 2),
    }  # fmt: skip


# -- control flow of TensorFlow 1 ----------------------------------------------------------------------------------


def _loop():
    with tf.Graph().as_default() as graph:
        tf.compat.v1.disable_control_flow_v2()
        try:
            x = tf.compat.v1.placeholder(tf.float32, [], name="x")
            found = tf.compat.v1.while_loop(lambda v: v < 100.0, lambda v: v * tf.constant(2.0), [x], name="loop")
            chosen = tf.compat.v1.cond(found > 128.0, lambda: found + 1.0, lambda: found - 1.0, name="branch")
            tf.identity(chosen, "out")
        finally:
            tf.compat.v1.enable_control_flow_v2()
    return CapturedStep(graph.as_graph_def(), outputs=("out:0",))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_loops_and_branches_that_are_whole_are_parts_that_run(count):
    scopes = ["x", "loop", "Greater", "branch", "out"]
    first = {2: "AABBB", 3: "ABCCC", 4: "ABCDD"}[count]
    parts = split(_loop(), lambda name: dict(zip(scopes, first, strict=True))[name.split("/")[0]])
    assert len(parts) == count
    values = run_parts(lambda g: tf.compat.v1.Session(graph=g), parts, {"x:0": 3.0})
    assert values["out:0"] == 191.0 + 2.0


@pytest.mark.parametrize("scope", ["loop", "branch"])
def test_a_loop_or_a_branch_is_not_taken_apart(scope):
    inner = [n.name for n in _loop().graph_def.node if n.name.startswith(scope)]
    halves = dict.fromkeys(inner[len(inner) // 2 :], "half")
    with pytest.raises(RewriteError, match="a loop or a branch of TensorFlow 1 cannot be split"):
        split(_loop(), lambda name: halves.get(name, "rest"))


# -- any graph -----------------------------------------------------------------------------------------------------

KEYS = ("p", "q", "r")


@st.composite
def steps(draw):
    """Generates runnable steps with multi-output nodes and control inputs, and a key for each node."""
    lines, tensors, names = ["n0 = Placeholder()"], ["n0"], ["n0"]
    for k in range(1, draw(st.integers(1, 9))):
        op = draw(st.sampled_from(["Neg", "AddN", "IdentityN"]))
        data = draw(st.lists(st.sampled_from(tensors), min_size=1, max_size={"Neg": 1}.get(op, 3)))
        control = sorted(draw(st.sets(st.sampled_from(names), max_size=2)))
        lines.append(f"n{k} = {op}({', '.join([*data, *(f'^{c}' for c in control)])})")
        names.append(f"n{k}")
        tensors += [f"n{k}:{j}" for j in range(len(data) if op == "IdentityN" else 1)]
    outputs = draw(st.lists(st.sampled_from(sorted({tensor(t) for t in tensors})), min_size=1, unique=True))
    step = step_of(
        "\n".join(lines), outputs, draw(st.lists(st.sampled_from(names[1:] or ["n0"]), max_size=2 * (len(names) > 1)))
    )
    keys = draw(st.lists(st.sampled_from(KEYS), min_size=len(names), max_size=len(names)))
    return step, dict(zip(names, keys, strict=True))


def has_a_cycle(graph_def, keys):
    """Checks the graph of parts for a cycle with graphlib."""
    needs = {}
    for node in graph_def.node:
        own = keys.get(node.name, node.name)
        needs.setdefault(own, set()).update(keys.get(node_of(i), node_of(i)) for i in node.input)
        needs[own].discard(own)
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError:
        return True
    return False


def assert_goes_back(step, keys, error):
    """Asserts that an error is accurate: each path follows edges and leads from its part to the next."""
    edges = {(node_of(i), node.name) for node in step.graph_def.node for i in node.input}
    for key, after, way in zip(error.keys, (*error.keys[1:], error.keys[0]), error.ways, strict=True):
        assert set(itertools.pairwise(way)) <= edges
        assert (keys[way[0]], keys[way[-1]]) == (key, after)
        assert len(way) > 1 and not any(name in keys for name in way[1:-1])
        assert key != after or len(way) > 2


def assert_crossings(step, parts):
    """Asserts that a part inputs the tensors it reads from others and outputs those that others or the caller read."""
    for key, part in parts.items():
        read = {
            (tensor(i), parts.key_of.get(node.name)) for node in step.graph_def.node for i in node.input
            if not is_control(i)
        }  # fmt: skip
        assert sorted(part.takes) == sorted({t for t, own in read if own == key and node_of(t) not in part.nodes})
        wanted = {t for t, own in read if own != key} | set(step.outputs)
        assert sorted(part.gives) == sorted(t for t in wanted if node_of(t) in part.nodes)


def split_or_cut(step, keys):
    """Returns the parts, with cycles cut if they are refused; asserts that they are refused exactly if there is one."""
    try:
        parts = split(step, keys.get)
    except PartsError as error:
        assert has_a_cycle(step.graph_def, keys)
        assert_goes_back(step, keys, error)
        parts = split(step, keys.get, cut_cycles=True)
        assert {one[0] for one in parts} == set(keys.values())
    else:
        assert not has_a_cycle(step.graph_def, keys)
    return parts


@settings(deadline=None, max_examples=25)
@given(steps())
def test_parts_do_what_the_step_does_or_have_a_cycle(drawn):
    step, keys = drawn
    parts = split_or_cut(step, keys)
    assert sorted(name for part in parts.values() for name in part.nodes) == sorted(keys)
    assert_crossings(step, parts)
    feeds = {"n0:0": np.float32([1.5, -2.0])}
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.graph_util.import_graph_def(step.graph_def, name="")
        wanted = session.run(list(step.outputs), feeds)
    found = run_parts(lambda g: tf.compat.v1.Session(graph=g), parts, feeds)
    np.testing.assert_array_equal([found[name] for name in step.outputs], wanted)


@given(steps(), st.data())
def test_nodes_of_no_part_lead_back_as_well(drawn, data):
    step, keys = drawn
    kept = data.draw(st.sets(st.sampled_from(sorted(keys))))
    keys = {name: key for name, key in keys.items() if name in kept}
    parts = split_or_cut(step, keys)
    assert not has_a_cycle(step.graph_def, dict(parts.key_of))
    assert_crossings(step, parts)
    ordered = [set(parts.needs[key]) for key in parts.order]
    assert all(needs <= set(parts.order[:k]) for k, needs in enumerate(ordered))
