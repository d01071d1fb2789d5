"""GraphEditor: its operations on small graphs, and invariants after any sequence of them."""

from __future__ import annotations

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from autodist.errors import RewriteError
from autodist.graph.editor import GraphEditor
from autodist.graph.names import node_of, tensor
from autodist.graph.walks import topological
from tests.unit.graph.graph_text import assert_imports, assert_text, from_text, to_text

CHAIN = """
    a = Placeholder()
    b = Neg(a)
    c = Neg(b, ^a)
    d = AddN(b, c)
"""

PREFIXES = ("replica_1/", "replica_2/")


@st.composite
def graphs(draw):
    """Generates acyclic graphs with control inputs, ops with two outputs, and unused nodes."""
    lines = ["axis = Const()", "n0 = Placeholder()"]
    tensors, names = ["n0"], ["n0"]
    for k in range(1, draw(st.integers(1, 9))):
        op = draw(st.sampled_from(["Neg", "AddN", "Split", "Placeholder", "IdentityN"]))
        pick = st.sampled_from(tensors)
        data = {
            "Neg": lambda pick=pick: [draw(pick)],
            "AddN": lambda pick=pick: draw(st.lists(pick, min_size=1, max_size=3)),
            "Split": lambda pick=pick: ["axis", draw(pick)],
            "Placeholder": list,
            "IdentityN": lambda pick=pick: draw(st.lists(pick, min_size=2, max_size=2)),
        }[op]()
        control = sorted(draw(st.sets(st.sampled_from(names), max_size=2)))
        lines.append(f"n{k} = {op}({', '.join([*data, *(f'^{c}' for c in control)])})")
        names.append(f"n{k}")
        tensors += [f"n{k}", f"n{k}:1"] if op in ("Split", "IdentityN") else [f"n{k}"]
    return from_text("\n".join(lines))


def assert_index_is_right(editor):
    rebuilt = GraphEditor(editor.to_graph_def())
    assert {n.name: editor.consumers(n.name) for n in editor} == {n.name: rebuilt.consumers(n.name) for n in rebuilt}


def sinks(graph_def):
    read = {node_of(i) for n in graph_def.node for i in n.input}
    return [n.name for n in graph_def.node if n.name not in read]


# -- properties ----------------------------------------------------------------------------------------------------


@given(graphs())
def test_an_editor_that_changes_nothing_gives_the_same_graph(graph_def):
    assert list(GraphEditor(graph_def).to_graph_def().node) == list(graph_def.node)


@given(graphs())
def test_to_clone_and_prune_to_the_original_is_the_identity(graph_def):
    editor = GraphEditor(graph_def)
    editor.clone([n.name for n in graph_def.node], PREFIXES[0])
    editor.prune(sinks(graph_def))
    assert list(editor.to_graph_def().node) == list(graph_def.node)


@given(graphs())
def test_to_clone_and_prune_to_the_copy_is_the_graph_under_a_prefix(graph_def):
    editor = GraphEditor(graph_def)
    renamed = editor.clone([n.name for n in graph_def.node], PREFIXES[0])
    editor.prune([renamed[name] for name in sinks(graph_def)])
    assert to_text(editor.to_graph_def()).replace(PREFIXES[0], "") == to_text(graph_def)


@st.composite
def edited(draw):
    """Generates a graph and an editor of it after some operations."""
    graph_def = draw(graphs())
    editor = GraphEditor(graph_def)
    for number in range(draw(st.integers(1, 6))):
        names = sorted(editor.names)
        one = st.sampled_from(names)
        verb = draw(st.sampled_from(["clone", "rewire", "add_control", "replace_control", "prune", "set_inputs"]))
        if verb == "clone":
            editor.clone(draw(st.lists(one, unique=True, max_size=4)), f"copy_{number}/")
        elif verb == "rewire":
            _rewire_without_cycle(editor, draw(one), draw(one))
        elif verb == "add_control":
            name, before = draw(one), draw(one)
            if name not in editor.ancestors([before]):
                editor.add_control(name, [before])
        elif verb == "replace_control":
            old, new = draw(one), draw(one)
            if not editor.consumers(old) & editor.ancestors([new]):
                editor.replace_control(old, [new])
        elif verb == "prune":
            editor.prune(draw(st.lists(one, min_size=1, max_size=3)))
        else:
            name = draw(one)
            editor.set_inputs(name, list(editor[name].input))
    return graph_def, editor


def _rewire_without_cycle(editor, old, new):
    are_floats = not any(name.endswith("axis") for name in (old, new))  # a copy of the axis is an integer, too
    if are_floats and old != new and not editor.consumers(old) & editor.ancestors([new]):
        editor.rewire(old, new)


@settings(max_examples=60)
@given(edited())
def test_after_any_verbs_the_index_is_as_if_built_from_nothing(pair):
    assert_index_is_right(pair[1])


@given(edited())
def test_after_any_verbs_tensorflow_imports_the_graph(pair):
    assert_imports(pair[1].to_graph_def())


@given(st.data())
def test_verbs_leave_the_graph_that_the_editor_was_made_from_alone(data):
    graph_def = data.draw(graphs())
    before = graph_def.SerializeToString(deterministic=True)
    editor = GraphEditor(graph_def)
    names = sorted(editor.names)
    editor.clone(names, PREFIXES[0])
    editor.add_control(names[-1], [f"{PREFIXES[0]}{names[0]}"])
    editor[names[0]].device = "/cpu:0"
    editor.prune([names[-1]])
    assert graph_def.SerializeToString(deterministic=True) == before


@given(graphs(), st.data())
def test_ancestors_are_closed_under_inputs(graph_def, data):
    editor = GraphEditor(graph_def)
    found = editor.ancestors([data.draw(st.sampled_from(sorted(editor.names)))])
    assert all(node_of(i) in found for name in found for i in editor[name].input)


@given(graphs())
def test_a_topological_order_has_each_node_after_all_that_it_needs(graph_def):
    position = {n.name: k for k, n in enumerate(topological(graph_def))}
    assert len(position) == len(graph_def.node)
    assert all(position[node_of(i)] < position[n.name] for n in graph_def.node for i in n.input)


# -- verbs ---------------------------------------------------------------------------------------------------------


def test_a_rewired_tensor_is_read_by_all_or_by_some():
    editor = GraphEditor(from_text(CHAIN))
    assert editor.rewire("b:0", "a", ["d"]) == 1
    assert_text(editor.to_graph_def(), "a = Placeholder()\nb = Neg(a)\nc = Neg(b, ^a)\nd = AddN(a, c)")
    assert editor.rewire("b", "a:0") == 1
    assert not editor.consumers("b")


def test_rewiring_one_output_leaves_the_others_and_control_inputs():
    editor = GraphEditor(from_text("x = Const()\na = Placeholder()\ns = Split(x, a)\nb = AddN(s, s:1, ^s)"))
    assert editor.rewire("s:1", "a") == 1
    assert list(editor["b"].input) == ["s", "a", "^s"]


def test_a_node_of_two_outputs_has_two_tensors_of_one_spelling_each():
    assert tensor("s") == tensor("s:0") != tensor("s:1")


def test_clones_of_a_part_read_the_rest_from_outside():
    editor = GraphEditor(from_text(CHAIN))
    renamed = editor.clone(["b", "c"], "r/", outside=lambda spelling: spelling.replace("a", "d"))
    assert renamed == {"b": "r/b", "c": "r/c"}
    assert (list(editor["r/b"].input), list(editor["r/c"].input)) == (["d"], ["r/b", "^d"])


def test_clones_have_frames_shared_names_and_colocation_of_their_own():
    graph_def = from_text("a = Placeholder()\nb = Neg(a)\nc = Neg(b)")
    b, c = graph_def.node[1], graph_def.node[2]
    b.attr["frame_name"].s, b.attr["shared_name"].s = b"loop", b"table"
    b.attr["_class"].list.s[:] = [b"loc:@a"]
    c.attr["_class"].list.s[:] = [b"loc:@b", b"other"]
    c.attr["shared_name"].s = b""
    editor = GraphEditor(graph_def)
    editor.clone(["b", "c"], "r/")
    assert editor["r/b"].attr["frame_name"].s == b"r/loop"
    assert editor["r/b"].attr["shared_name"].s == b"r/table"
    assert list(editor["r/b"].attr["_class"].list.s) == [b"loc:@a"]
    assert list(editor["r/c"].attr["_class"].list.s) == [b"loc:@r/b", b"other"]
    assert editor["r/c"].attr["shared_name"].s == b""


def test_pruning_drops_colocation_with_what_went():
    graph_def = from_text("a = Placeholder()\nb = Placeholder()\nc = Neg(b)")
    graph_def.node[2].attr["_class"].list.s[:] = [b"loc:@a"]
    editor = GraphEditor(graph_def)
    assert editor.prune(["c"]) == ["a"]
    assert "_class" not in editor["c"].attr
    assert_imports(editor.to_graph_def())


def test_pruning_keeps_what_is_needed_by_control_alone():
    editor = GraphEditor(from_text("a = Placeholder()\nb = Placeholder()\nc = Neg(b, ^a)\nd = Neg(c)"))
    assert editor.prune(["c"]) == ["d"]


def test_what_nobody_reads_goes_with_what_led_to_it_alone():
    editor = GraphEditor(
        from_text("""
        a = Placeholder()
        b = Neg(a)
        c = Neg(b)
        kept = Neg(c)
        d = AddN(c, kept)
        e = Neg(b)
        """)
    )
    editor.remove_unread(["d", "b"], stays=lambda node: node.name == "kept")
    assert set(editor.names) == {"a", "b", "c", "kept", "e"}
    editor.remove_unread(["kept"], stays=lambda node: node.op == "Placeholder")
    assert set(editor.names) == {"a", "b", "e"}
    assert_index_is_right(editor)


def test_a_node_of_an_op_with_one_type_has_it_as_its_attribute():
    editor = GraphEditor(from_text("a = Placeholder()"))
    copy = editor.add_op("Identity", "copy", ["a"], tf.float64, "/cpu:0")
    read = editor.add_op("ReadVariableOp", "read", ["handle", "^copy"], tf.int32)
    assert (editor[copy].attr["T"].type, editor[read].attr["dtype"].type) == (tf.float64, tf.int32)
    assert (editor[copy].device, list(editor[read].input)) == ("/cpu:0", ["handle", "^copy"])


def test_ancestors_by_data_leave_control_inputs_out():
    editor = GraphEditor(from_text("a = Placeholder()\nb = Neg(a)\nc = Placeholder()\nd = Neg(b, ^c)"))
    assert editor.ancestors(["d:0"], control=False) == {"a", "b", "d"}


def test_what_was_ordered_after_a_node_is_ordered_after_others():
    editor = GraphEditor(from_text("a = Placeholder()\nb = Placeholder()\nc = Placeholder()\nd = Neg(c, ^a)"))
    editor.replace_control("a", ["b", "c"])
    assert list(editor["d"].input) == ["c", "^b", "^c"]


def test_a_node_is_never_ordered_before_itself():
    editor = GraphEditor(from_text(CHAIN))
    editor.add_control("c", ["c", "b"])
    assert list(editor["c"].input) == ["b", "^a", "^b"]


def test_control_inputs_stand_last_and_once():
    editor = GraphEditor(from_text(CHAIN))
    editor.set_inputs("d", ["^a", "b:0", "^a", "c"])
    assert list(editor["d"].input) == ["b", "c", "^a"]


def test_a_name_is_taken_once():
    editor = GraphEditor(from_text(CHAIN))
    with pytest.raises(RewriteError, match="'a' is already in the graph"):
        editor.add(from_text("a = Placeholder()").node[0])


def test_a_node_that_is_not_there_is_named():
    with pytest.raises(RewriteError, match="'nothing' is not in the graph"):
        GraphEditor(from_text(CHAIN))["nothing"]


def test_a_cycle_is_named():
    graph_def = from_text("a = Neg(b)\nb = Neg(a)")
    with pytest.raises(ValueError, match="cycle through 'a'"):
        topological(graph_def)


def test_the_back_edge_of_a_loop_is_no_cycle():
    with tf.Graph().as_default() as graph:
        tf.compat.v1.disable_control_flow_v2()
        try:
            tf.while_loop(lambda i: i < 3, lambda i: i + 1, [tf.constant(0)])
        finally:
            tf.compat.v1.enable_control_flow_v2()
    ops = [n.op for n in topological(graph.as_graph_def())]
    assert ops.index("Merge") < ops.index("NextIteration")


def test_functions_come_along_with_a_graph():
    with tf.Graph().as_default() as graph:
        tf.function(lambda x: -x)(tf.compat.v1.placeholder(tf.float32))
    editor = GraphEditor(from_text(CHAIN))
    editor.add_graph(graph.as_graph_def())
    editor_twice = GraphEditor(editor.to_graph_def())
    assert len(editor_twice.library.function) == 1
    assert_imports(editor_twice.to_graph_def())


def test_a_node_passes_on_a_tensor_and_waits_for_what_is_named_alone():
    editor = GraphEditor(from_text("a = Placeholder()\nb = Placeholder()\nc = Add(a, b, ^b)"))
    editor.pass_on("c", "a:0", tf.float32, ["^a"])
    assert editor["c"].op == "Identity" and list(editor["c"].input) == ["a", "^a"]
    assert list(editor["c"].attr) == ["T"] and editor.consumers("b") == set()
