"""Recomputation: the forward nodes of a block that run again for the backward nodes that read them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autodist.graph.control_flow import V1_CONTROL_FLOW, find_inside
from autodist.graph.index import GraphIndex
from autodist.graph.op_types import is_stateless
from autodist.graph.ops import Trait, having
from autodist.graph.seeds import live_calls
from autodist.graph.step import Step
from autodist.graph.walks import reach

RESHARD = "_autodist_reshard"
"""Attribute of a node that stands for a transfer between the devices of a mesh, which must not run twice."""

_COPY = "-recomputed"
_OF_LENGTHS_ALONE = having(Trait.BY_SHAPES) & having(Trait.OF_SHAPES)
"""Ops whose results are a few numbers, which are not worth recomputing."""
_BY_SHAPES = having(Trait.BY_SHAPES)


@dataclass(frozen=True)
class Block:
    """Layers that are computed again together.

    Attributes:
        name: for tables and messages.
        scopes: the name scopes of its nodes; a scope may also be the whole name of a node.
    """

    name: str
    scopes: tuple[str, ...]


@dataclass(frozen=True)
class Recomputation:
    """The nodes of one block to compute again.

    Attributes:
        block: the block.
        nodes: the forward nodes to copy, in topological order.
        readers: the backward nodes that read the copies.
        kept: the nodes whose values stay in memory for `readers` or the copies, because they must not run twice.
    """

    block: Block
    nodes: tuple[str, ...]
    readers: tuple[str, ...]
    kept: tuple[str, ...]


def suffix_of_copies(position: int = 0) -> str:
    """Returns the suffix of the copies of forward nodes that a backward pass reads, by the position of the pass.

    TensorFlow's optimizer sorts the operands of sums and products by name, and rounding depends on it. With this
    suffix, a copy sorts as its original.

    >>> suffix_of_copies(), suffix_of_copies(1)
    ('-recomputed', '-recomputed_1')
    """
    return f"{_COPY}_{position}" if position else _COPY


def copied_for(name: str) -> str:
    """Returns the suffix of a copy of a forward node, which shows its backward pass; "" for all other nodes.

    >>> copied_for("dense/MatMul-recomputed_1"), copied_for("dense/MatMul")
    ('-recomputed_1', '')
    """
    _, mark, position = name.rpartition(_COPY)
    return mark + position if mark else ""


def is_repeatable(graph_index: GraphIndex, name: str) -> bool:
    """Returns True if a node may run twice in a step, and computes more than a few lengths."""
    return graph_index.nodes[name].op not in _OF_LENGTHS_ALONE and may_repeat(graph_index, name)


def may_repeat(graph_index: GraphIndex, name: str) -> bool:
    """Returns True if a node may run twice in a step.

    Random ops that advance a state, reads of variables, stateful calls, branches of TensorFlow 1 and transfers between
    the devices of a mesh must not.
    """
    node = graph_index.nodes[name]
    op = node.op
    return (
        RESHARD not in node.attr and op not in V1_CONTROL_FLOW and name not in graph_index.effects and is_stateless(op)
    )


def backward_passes(step: Step) -> tuple[frozenset[str], ...]:
    """Returns, for each call of `gradient` that the step needs, the nodes that depend on its seed."""
    is_planned = not (step.outputs or step.targets)  # the entire graph of a session
    calls = step.gradient_calls if is_planned else [step.gradient_calls[k] for k in live_calls(step)]
    onward = step.graph_index.consumers
    return tuple(frozenset(reach((s for s in call.seeds if s in onward), onward.__getitem__)) for call in calls)


def blocks_of_nodes(names: Mapping[str, str], blocks: Sequence[Block]) -> dict[str, Block]:
    """Maps nodes to the blocks that they belong to.

    The scope of a block may be within a node's name: TensorFlow puts the gradient of SCOPE/op in `gradient_tape/SCOPE/`
    or `gradients/SCOPE/`.
    """
    by_scope = {tuple(scope.split("/")): block for block in blocks for scope in block.scopes}
    longest = max(map(len, by_scope), default=0)
    starts = {scope[0] for scope in by_scope}
    found: dict[str, Block] = {}
    for name, captured in names.items():
        parts = tuple(captured.split("/"))
        for k, part in enumerate(parts):
            if part in starts:
                scopes = (parts[k:end] for end in range(k + 1, min(len(parts), k + longest) + 1))
                block = next((by_scope[scope] for scope in scopes if scope in by_scope), None)
                if block is not None:
                    found.setdefault(name, block)
    return found


def find_recomputations(
    step: Step, blocks: Sequence[Block], backward: Collection[str], names: Mapping[str, str]
) -> list[Recomputation]:
    """Returns the nodes of each block to compute again, in the order of the blocks.

    These are the nodes that nothing outside of the block reads but the backward pass. Tensors that enter or leave a
    block stay in memory, as do values that are computed from constants alone.

    Args:
        step: the step.
        blocks: the blocks.
        backward: the nodes of the backward pass.
        names: the captured name of each node that may belong to a block: those of one replica.
    """
    graph_index = step.graph_index
    inside = set(find_inside(graph_index))
    found = blocks_of_nodes({n: c for n, c in names.items() if n not in backward and n not in inside}, blocks)
    members: dict[Block, list[str]] = {block: [] for block in blocks}
    constant = find_constant(graph_index)
    for name in graph_index.order if found else ():
        if name in found and name not in constant:
            members[found[name]].append(name)
    return [_Search(step, block, own, backward, inside).run() for block, own in members.items()]


def find_constant(graph_index: GraphIndex) -> set[str]:
    """Returns the constants, and the nodes that compute from constants alone."""
    found: set[str] = set()
    for name in graph_index.order:
        op, sources = graph_index.nodes[name].op, graph_index.data[name]
        if op == "Const" or (sources and found.issuperset(sources) and is_stateless(op)):
            found.add(name)
    return found


class _Search:
    """The search for the nodes of one block to compute again."""

    def __init__(
        self, step: Step, block: Block, members: Sequence[str], backward: Collection[str], inside: Collection[str]
    ) -> None:
        self.graph_index, self.block, self.members, self.backward = step.graph_index, block, members, backward
        self._own, self._inside, self._named = set(members), inside, step.named
        self._inner = {name for name in members if self._is_inner(name)}

    def run(self) -> Recomputation:
        readers = {name: self._readers_of(name) for name in self._inner}
        read = [name for name, found in readers.items() if found and not self._is_length(name)]
        nodes = reach(read, self._values_before)
        for name in self.members:  # lengths of recomputed values, which need no recomputation of their own
            before = self._values_before(name)
            if name in self._inner and self._is_length(name) and before and nodes.issuperset(before):
                nodes.add(name)
        of_copies = dict.fromkeys(reader for name in self.members if name in nodes for reader in readers[name])
        sources = {s for name in (*nodes, *of_copies) for s in self.graph_index.data[name]} - nodes
        return Recomputation(
            self.block,
            tuple(name for name in self.members if name in nodes),
            tuple(of_copies),
            tuple(name for name in self.members if name in sources and self._must_not_repeat(name)),
        )

    def _is_length(self, name: str) -> bool:
        return self.graph_index.nodes[name].op in _OF_LENGTHS_ALONE

    def _values_before(self, name: str) -> list[str]:
        """Returns the inner nodes that a node reads, without those whose results are lengths."""
        return [s for s in self.graph_index.data[name] if s in self._inner and not self._is_length(s)]

    def _is_inner(self, name: str) -> bool:
        """Returns True if a node may run twice, and only the block and the backward pass read it."""
        return (
            name not in self._named
            and may_repeat(self.graph_index, name)
            and all(map(self._stays_inside, self.graph_index.consumers[name]))
        )

    def _stays_inside(self, reader: str) -> bool:
        return reader in self._own or reader in self.backward or self.graph_index.nodes[reader].op in _BY_SHAPES

    def _readers_of(self, name: str) -> list[str]:
        """Returns the backward nodes that read a node's outputs."""
        return [
            reader for reader in self.graph_index.consumers[name]
            if reader in self.backward and reader not in self._inside and name in self.graph_index.data[reader]
        ]  # fmt: skip

    def _must_not_repeat(self, name: str) -> bool:
        """Returns True if a node computes from the batch, and running it twice would change the step."""
        node = self.graph_index.nodes[name]
        op = node.op
        is_kept = RESHARD in node.attr or op in V1_CONTROL_FLOW or not is_stateless(op)
        return is_kept and name not in self.graph_index.effects
