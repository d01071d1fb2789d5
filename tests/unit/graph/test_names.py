"""Formats of input names."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autodist.graph import names

NODES = st.from_regex(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]{0,8}", fullmatch=True)


@given(NODES, st.integers(0, 12))
def test_a_tensor_spelled_as_an_input_is_the_same_tensor(node, index):
    spelled = names.as_input(f"{node}:{index}")
    assert names.tensor(spelled) == f"{node}:{index}"
    assert (names.node_of(spelled), names.output_index(spelled)) == (node, index)


@given(NODES)
def test_control_inputs_name_a_node(node):
    assert names.is_control(f"^{node}") and not names.is_control(node)
    assert names.node_of(f"^{node}") == node


def test_the_tenth_output_is_not_the_first():
    assert names.as_input("a:10") == "a:10"


@given(NODES, NODES, st.integers(0, 12))
def test_a_renamed_input_is_the_same_output_of_another_node(node, other, index):
    renamed = names.renamed(names.as_input(f"{node}:{index}"), {node: other})
    assert names.tensor(renamed) == f"{other}:{index}"
    assert names.renamed(f"^{node}", {node: other}) == f"^{other}"
    assert names.data_renamed([f"^{node}", node], {node: other}) == [f"^{node}", other]
