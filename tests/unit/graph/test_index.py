"""GraphIndex: the edges of a graph; a step shares its index only with steps of the same graph."""

from __future__ import annotations

from dataclasses import replace

from autodist.graph.editor import GraphEditor
from autodist.graph.index import GraphIndex, copy_without
from autodist.graph.step import CapturedStep
from tests.unit.graph.graph_text import from_text, to_text

TEXT = "v = VarHandleOp()\na = Placeholder()\nb = AddN(a, a, ^v)\nc = AssignVariableOp(v, b)"


def test_sources_data_and_consumers_are_told_apart():
    graph_index = GraphIndex(from_text(TEXT))
    assert graph_index.sources == {"v": [], "a": [], "b": ["a", "a", "v"], "c": ["v", "b"]}
    assert graph_index.data == {"v": [], "a": [], "b": ["a", "a"], "c": ["v", "b"]}
    assert graph_index.consumers == {"v": ["b", "c"], "a": ["b"], "b": ["c"], "c": []}
    assert {name: graph_index.readers(name) for name in "vab"} == {"v": ["c"], "a": ["b"], "b": ["c"]}
    assert [n.name for n in graph_index.of_op("Placeholder", "VarHandleOp")] == ["a", "v"]
    assert list(graph_index.effects) == ["c"] and graph_index.effects["c"].writes == {"v"}


def test_every_node_comes_after_what_it_needs():
    graph_def = from_text("c = Neg(b)\nb = Neg(a, ^d)\nd = NoOp()\na = Placeholder()")
    assert GraphIndex(graph_def).order.index("b") > max(GraphIndex(graph_def).order.index(n) for n in "ad")
    assert GraphIndex(graph_def).order[-1] == "c"


def test_the_wiring_of_what_is_kept_is_that_of_its_graph():
    whole = GraphIndex(from_text(TEXT))
    kept = whole.only({"v", "a", "b"})
    alone = GraphIndex(kept.graph_def)
    assert to_text(kept.graph_def) == "\n".join(TEXT.splitlines()[:3]) and to_text(whole.graph_def) == TEXT
    for asked in ("sources", "data", "consumers", "order"):
        assert getattr(kept, asked) == getattr(alone, asked)
    assert list(kept.nodes.items()) == list(alone.nodes.items())


def test_a_copy_without_nodes_leaves_the_graph_alone():
    graph_def = from_text(TEXT)
    assert to_text(copy_without(graph_def, [3, 0])) == "\n".join(TEXT.splitlines()[1:3])
    assert to_text(graph_def) == TEXT


def test_an_item_hands_its_wiring_on_to_the_same_graph_alone():
    step = CapturedStep(from_text(TEXT))
    assert replace(step, targets=("c",)).graph_index is step.graph_index
    other = step.with_graph(from_text("a = Placeholder()"))
    assert other.graph_index is not step.graph_index and list(other.graph_index.nodes) == ["a"]


def test_an_editor_that_is_given_the_wiring_knows_the_same_consumers():
    step = CapturedStep(from_text(TEXT))
    given, found = GraphEditor(step.graph_def, step.graph_index), GraphEditor(step.graph_def)
    for editor in (given, found):
        editor.set_inputs("c", ["v", "a"])
        editor.remove(["b"])
        editor.add(step.graph_index.nodes["b"])
    assert {n.name: given.consumers(n.name) for n in given} == {n.name: found.consumers(n.name) for n in found}
    assert to_text(given.to_graph_def()) == to_text(found.to_graph_def())
    assert step.graph_index.consumers["b"] == ["c"]


def test_what_is_found_with_other_things_is_kept_until_these_change():
    graph_index, asked = GraphIndex(from_text("a = Placeholder()")), []

    def find():
        asked.append(len(asked))
        return asked[-1]

    assert [graph_index.once("stages", given, find) for given in ((1,), (1,), (2,), (1,))] == [0, 0, 1, 2]
    assert graph_index.once("other", (1,), find) == 3
