"""Blocks: the layers of a model that are computed again together in the backward pass."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, sqrt

from autodist.graph.layer_names import layer_names
from autodist.graph.names import node_of
from autodist.graph.ops import Trait, having
from autodist.graph.recomputation import Block, backward_passes, find_recomputations
from autodist.graph.step import CapturedStep
from autodist.graph.walks import reach
from autodist.logs.formatting import listed, nearest, some_of
from autodist.options.fields import OptionError

_LONGEST_PERIOD = 256
"""Most layers, or nodes, of a block that is found by repetition."""

_FED = having(Trait.FED | Trait.ITERATOR_GET | Trait.QUEUE_GET)
_INDEX = re.compile(r"\d+")
_LAST_INDICES = re.compile(r"(_\d+)+$")


def find_blocks(step: CapturedStep, choice: bool | Sequence[str]) -> tuple[Block, ...]:
    """Returns the blocks that the option `recompute` selects in a training step.

    Args:
        step: the captured step.
        choice: patterns of names of layers; True: the layers that repeat in a chain.

    Raises:
        OptionError: a pattern is invalid or matches no layer, no layers repeat, or nothing can be computed again.
    """
    layers = _Layers(step)
    candidates = [matching_blocks(layers.names, choice)] if not isinstance(choice, bool) else repeated_blocks(layers)
    passes = backward_passes(step)
    for blocks in candidates:
        own = {name: name for name in step.graph_index.nodes}
        if any(one.nodes for passed in passes for one in find_recomputations(step, blocks, passed, own)):
            return tuple(blocks)
    raise OptionError("recompute", _nothing_saved(layers, choice))


def _nothing_saved(layers: _Layers, choice: bool | Sequence[str]) -> str:
    if not isinstance(choice, bool):
        return (
            f"the layers that {listed(map(repr, choice))} match compute nothing that the backward pass reads and that "
            "may be computed twice, so recomputation would save no memory. Choose layers that hold several operations."
        )
    some = some_of(list(dict.fromkeys(name for scope, name in layers.names.items() if scope.count("/") < 2)), 12)
    return (
        "no layers of this step repeat in a chain with values to compute again, so there are no blocks to choose. Name "
        f"the layers by patterns, such as recompute: ['.*/block_[0-9]+']; the outer layers are {some}."
    )


class _Layers:
    """The name scopes of a step's forward pass, in the order of their creation.

    Attributes:
        step: the step.
        nodes: the forward nodes that depend on the batch, in the order of the graph.
        names: the name of the layer of each scope.
    """

    def __init__(self, step: CapturedStep) -> None:
        self.step, graph_index = step, step.graph_index
        targets = [node_of(t) for call in step.gradient_calls for t in call.targets]
        backward = set[str]().union(*backward_passes(step))
        leading = reach((t for t in targets if t in graph_index.nodes), graph_index.data.__getitem__) - backward
        fed = {*map(node_of, step.inputs), *(n.name for n in graph_index.nodes.values() if n.op in _FED)}
        of_batch: set[str] = set()
        for name in graph_index.order:
            if name in leading and (name in fed or not of_batch.isdisjoint(graph_index.data[name])):
                of_batch.add(name)
        self.nodes = [name for name in graph_index.nodes if name in of_batch and name not in fed]
        self.names = layer_names(step, leading)

    def children(self) -> Mapping[str, Mapping[str, list[str]]]:
        """Maps each scope to the scopes and nodes in it, each with its nodes."""
        found: dict[str, dict[str, list[str]]] = {}
        for name in self.nodes:
            parent = ""
            for path in accumulate(name.split("/"), lambda outer, inner: f"{outer}/{inner}"):
                found.setdefault(parent, {}).setdefault(path, []).append(name)
                parent = path
        return found


def matching_blocks(names: Mapping[str, str], patterns: Sequence[str]) -> list[Block]:
    """Returns a block for each outermost scope whose layer a pattern matches.

    A pattern matches the path of a layer ("model/block_1"), or its end from a "/" on ("block_1").

    Args:
        names: the name of the layer of each scope.
        patterns: regular expressions.

    Raises:
        OptionError: a pattern is invalid or matches no layer.
    """
    matched = {scope for pattern in patterns for scope in _matched(pattern, names)}
    outermost = [scope for scope in names if scope in matched and matched.isdisjoint(_above(scope))]
    return [Block(names[scope], (scope,)) for scope in outermost]


def _matched(pattern: str, names: Mapping[str, str]) -> list[str]:
    try:
        known = re.compile(pattern)
    except re.error as error:
        raise OptionError("recompute", f"the pattern {pattern!r} is no regular expression: {error}.") from error
    found = [scope for scope, name in names.items() if any(map(known.fullmatch, _ends(name)))]
    found = found or [scope for scope in names if any(map(known.fullmatch, _ends(scope)))]
    if not found:
        near = listed(nearest(pattern, dict.fromkeys(names.values())))
        raise OptionError(
            "recompute",
            f"the pattern {pattern!r} matches no layer of this step (it must match the path of a layer, or its end "
            f"from a / on). The nearest layers are {near}.",
        )
    return found


def _ends(path: str) -> Iterator[str]:
    """Yields a path, and its ends from each "/" on."""
    yield path
    for k, letter in enumerate(path):
        if letter == "/":
            yield path[k + 1 :]


def _above(scope: str) -> Iterator[str]:
    """Yields the scopes around a scope."""
    while "/" in scope:
        scope = scope.rpartition("/")[0]
        yield scope


@dataclass(frozen=True)
class _Run:
    """A part of a model that consists of equal sequences of layers, one after another.

    Attributes:
        period: the number of layers in a sequence.
        layers: the scopes or nodes of all sequences, each with its nodes.
        size: the number of nodes.
    """

    period: int
    layers: Sequence[tuple[str, Sequence[str]]]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(len(nodes) for _, nodes in self.layers))

    def blocks(self, sequences: int, names: Mapping[str, str]) -> list[Block]:
        """Returns blocks of as many sequences each; the last may have fewer."""
        length = self.period * sequences
        parts = [self.layers[k : k + length] for k in range(0, len(self.layers), length)]
        return [_block([scope for scope, _ in part], names) for part in parts]


def _block(scopes: Sequence[str], names: Mapping[str, str]) -> Block:
    first, last = (names.get(scope, scope) for scope in (scopes[0], scopes[-1]))
    return Block(first if len(scopes) == 1 else f"{first} to {last.rpartition('/')[2]}", tuple(scopes))


def repeated_blocks(layers: _Layers) -> Iterator[list[Block]]:
    """Yields ways to divide the layers that repeat in a chain into blocks, best first.

    The chain is the one with the most nodes. A block is one repetition. If layers of one kind follow each other, about
    √n blocks of several layers come next: single layers may have nothing inside to compute again.

    Source: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.
    """
    runs = [run for children in layers.children().values() for run in _runs(list(children.items()))]
    for run in sorted(runs, key=lambda run: (-run.size, run.period)):
        if _is_chain(layers.step, run):
            count = len(run.layers) // run.period
            yield run.blocks(1, layers.names)
            yield run.blocks(ceil(sqrt(count)), layers.names)
            return


def _runs(layers: Sequence[tuple[str, Sequence[str]]]) -> Iterator[_Run]:
    """Yields the parts of a sequence of layers that consist of at least two equal sequences."""
    kinds = [_kind(scope) for scope, _ in layers]
    for period in range(1, min(len(kinds) // 2, _LONGEST_PERIOD) + 1):
        start = 0
        for k in range(len(kinds) - period + 1):
            if k + period < len(kinds) and kinds[k] == kinds[k + period]:
                continue
            count = (k - start) // period + 1
            if count > 1:
                yield _Run(period, layers[start : start + count * period])
            start = k + 1


def _kind(scope: str) -> str:
    """Returns the name of a layer or node without its indices: "model/block_3" becomes "block"."""
    return _INDEX.sub("#", _LAST_INDICES.sub("", scope.rpartition("/")[2]))


def _is_chain(step: CapturedStep, run: _Run) -> bool:
    """Returns True if the last sequence of a run depends on the first."""
    first, last = (
        [name for _, nodes in part for name in nodes] for part in (run.layers[: run.period], run.layers[-run.period :])
    )
    return not reach(first, step.graph_index.consumers.__getitem__).isdisjoint(last)
