"""Checks that two texts of a case differ only in the names of nodes.

A name does not describe its node. So each node is identified by its op, by its inputs and consumers, and so on, as long
as that distinguishes more nodes (Weisfeiler–Leman refinement). Two texts with the same multiset of nodes in the same
places count as equal.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_NODE = re.compile(r"  (?P<name>\S+) = (?P<what>.*)\((?P<inputs>[^()]*)\)(?P<where>( on \S+)?)$")
_WORD = re.compile(r"[\w./\-]+(?::\d+)?")
_PARTS = re.compile(r"^(?=worker )", re.MULTILINE)


@dataclass(frozen=True)
class _Node:
    what: str
    inputs: tuple[str, ...]


def differ_by_names_alone(one: str, other: str) -> bool:
    """Returns True if two texts differ only in the names of nodes."""
    parts = [_PARTS.split(text) for text in (one, other)]
    pairs = zip(*parts, strict=False)
    return len(parts[0]) == len(parts[1]) and all(_nameless(a) == _nameless(b) for a, b in pairs)


def under_names(text: str, renames: str) -> str:
    """Returns a text with other words, and without digests of names in the names of queues.

    Args:
        text: of a case.
        renames: a line "old new" for each word, or part of a path such as a node's name, in the order in which they are
            applied. "_~_" stands for a space; a line that starts with # is a comment.
    """
    for line in renames.splitlines():
        if line.strip() and not line.startswith("#"):
            old, new = (word.replace("_~_", " ") for word in line.split())
            text = re.sub(rf"(?<![\w.-]){re.escape(old)}(?![\w-])", new, text)
    return without_digests(text)


def without_digests(text: str) -> str:
    """Returns a text in which every digest of names in the name of a queue is #: it follows the names."""
    return re.sub(r"(?<=shared_name=')[^']*", lambda found: re.sub(r"\b[0-9a-f]{16}\b", "#", found[0]), text)


def _nameless(text: str) -> Counter[str]:
    """The lines of a worker's text, in which labels stand for the names of nodes."""
    lines = text.splitlines()
    nodes = dict(_nodes(lines))
    labels = _refined(nodes)
    return Counter(labels[k] for k in nodes) + Counter(
        _WORD.sub(lambda found: _named(found[0], labels), line) for line in lines if not _NODE.match(line)
    )


def _nodes(lines: list[str]) -> Iterator[tuple[str, _Node]]:
    """Yields the nodes of the graph and of its functions, whose nodes have names of their own."""
    section = ""
    for line in lines:
        if not line.startswith(" "):
            section = "" if line == "nodes" else f"{line}: "
        elif found := _NODE.match(line):
            inputs = filter(None, found["inputs"].split(", "))
            yield (
                section + found["name"],
                _Node(f"{section}{found['what']}{found['where']}", tuple(_in_section(i, section) for i in inputs)),
            )


def _in_section(spelling: str, section: str) -> str:
    return f"^{section}{spelling[1:]}" if spelling.startswith("^") else section + spelling


def _refined(nodes: Mapping[str, _Node]) -> dict[str, str]:
    """Returns a refined label for each node's name."""
    labels = {name: _digest(node.what) for name, node in nodes.items()}
    readers: dict[str, list[tuple[str, str]]] = {name: [] for name in nodes}
    for name, node in nodes.items():
        for place, spelling in enumerate(node.inputs):
            source, port = _split(spelling, nodes)
            if source in readers:
                readers[source].append((name, "^" if spelling.startswith("^") else f"{place} {port}"))
    while True:
        more = {name: _digest(labels[name], *_around(name, nodes, readers, labels)) for name in nodes}
        if len(set(more.values())) == len(set(labels.values())):
            return more
        labels = more


def _around(
    name: str, nodes: Mapping[str, _Node], readers: Mapping[str, list[tuple[str, str]]], labels: Mapping[str, str]
) -> Iterator[str]:
    """Yields labels of a node's inputs in order, and of its control inputs and consumers in any order."""
    waits = []
    for spelling in nodes[name].inputs:
        source, port = _split(spelling, nodes)
        if spelling.startswith("^"):
            waits.append(labels.get(source, source))
        else:
            yield f"{labels.get(source, source)} {port}"
    yield from sorted(waits)
    yield from sorted(f"{labels[reader]} {how}" for reader, how in readers[name])


def _split(spelling: str, nodes: Mapping[str, _Node]) -> tuple[str, str]:
    """The node of an input and which of its outputs; in functions the output has a name as well."""
    whole = spelling.removeprefix("^")
    if whole in nodes:
        return whole, "0"
    head, _, rest = whole.rpartition(":")
    while head and head not in nodes:
        head, _, more = head.rpartition(":")
        rest = f"{more}:{rest}"
    return (head, rest) if head else (whole, "0")


def _named(word: str, labels: Mapping[str, str]) -> str:
    """A word of a line, or the label of the node that it names."""
    node, colon, port = word.partition(":")
    return labels[node] + colon + port if node in labels else word


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
