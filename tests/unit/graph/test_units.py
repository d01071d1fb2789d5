"""Sets of nodes that are to become one node each, without a cycle."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autodist.graph.units import by_levels, is_acyclic
from autodist.graph.wiring import Wiring
from tests.unit.graph.graph_text import from_text

DIAMOND = from_text(
    """
    a = Placeholder()
    b = Tanh(a)
    c = Neg(b)
    d = Add(b, c)
    """
)


def test_nothing_to_join_has_no_cycle():
    assert is_acyclic(Wiring(DIAMOND), {})
    assert by_levels(Wiring(DIAMOND), {}) == {}


def test_a_node_between_two_of_a_unit_makes_a_cycle():
    around = {"b": ("u",), "d": ("u",)}
    assert not is_acyclic(Wiring(DIAMOND), around)
    assert by_levels(Wiring(DIAMOND), around) == {"b": ("u", 0), "d": ("u", 1)}


def test_a_whole_branch_is_one_unit():
    whole = dict.fromkeys("bcd", ("u",))
    assert is_acyclic(Wiring(DIAMOND), whole)
    assert set(by_levels(Wiring(DIAMOND), whole).values()) == {("u", 0)}


def test_control_inputs_count():
    graph = from_text("a = Placeholder()\nb = Neg(a)\nc = Neg(a, ^b)\nd = Neg(a, ^c)")
    assert not is_acyclic(Wiring(graph), {"b": ("u",), "d": ("u",)})


def test_back_edges_of_loops_do_not_count():
    graph = from_text(
        """
        x = Placeholder()
        enter = Enter(x)
        merge = Merge(enter, next)
        next = NextIteration(merge)
        """
    )
    assert is_acyclic(Wiring(graph), {"enter": ("u",)})


@given(
    edges=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11), st.booleans()), max_size=30),
    units=st.lists(st.sampled_from(["", "", "u", "v", "w"]), min_size=12, max_size=12),
)
def test_levels_leave_no_cycle_in_any_graph(edges, units):
    inputs = {k: {f"{'^' if control else ''}n{a}" for a, b, control in edges if a < k == b} for k in range(12)}
    lines = [f"n{k} = AddN({', '.join(sorted(inputs[k], key=lambda i: i.startswith('^')))})" for k in range(12)]
    wiring = Wiring(from_text("\n".join(lines)))
    wanted = {f"n{k}": (unit,) for k, unit in enumerate(units) if unit}
    found = by_levels(wiring, wanted)
    assert found.keys() == wanted.keys() and all(found[name][:1] == wanted[name] for name in found)
    assert is_acyclic(wiring, found)
