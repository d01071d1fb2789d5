"""Whether two workers captured the same step, and where they differ first."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from autodist.errors import CaptureMismatchError
from autodist.graph.item import GraphItem

_SEPARATOR = b"\n"


@dataclass(frozen=True)
class Fingerprint:
    """One line for each node, variable and gradient of a step, and what it hashes to.

    Constants are left out: a seed or a worker's own number may stand in one.
    """

    lines: tuple[str, ...]

    @classmethod
    def of(cls, item: GraphItem) -> Fingerprint:
        nodes = [f"node {n.name} = {n.op}({', '.join(n.input)})" for n in item.graph_def.node]
        variables = [f"variable {v.name} {v.shape} {v.dtype.name}" for v in item.variables]
        gradients = [f"gradient of {g.variable}: {', '.join(g.tensors)}" for g in item.gradients]
        apart = [f"input {name} has as many rows as {by}" for name, by in item.apart.items()]
        return cls((*variables, *gradients, *apart, *nodes))

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()

    def packed_with(self, content: bytes) -> bytes:
        """A message with the fingerprint and `content`."""
        return json.dumps(self.lines).encode() + _SEPARATOR + content

    @classmethod
    def unpack(cls, message: bytes) -> tuple[Fingerprint, bytes]:
        """What `packed_with` put together."""
        lines, _, content = message.partition(_SEPARATOR)
        return cls(tuple(json.loads(lines))), content


def require_equal(chief: Fingerprint, mine: Fingerprint, name: str) -> None:
    """Passes if both captured the same step.

    Raises:
        CaptureMismatchError: with the first line in which they differ.
    """
    if chief.digest == mine.digest:
        return
    at, theirs, ours = _first_difference(chief.lines, mine.lines)
    raise CaptureMismatchError(
        f"{name} captured another step than the chief; they differ first at line {at}:\n"
        f"    chief:  {theirs}\n    here:   {ours}\n"
        "The script must build the same step on every worker: let nothing that shapes it depend on the worker, the "
        "machine or chance."
    )


def _first_difference(chief: Sequence[str], mine: Sequence[str]) -> tuple[int, str, str]:
    for at, (theirs, ours) in enumerate(zip(chief, mine, strict=False), start=1):
        if theirs != ours:
            return at, theirs, ours
    at = min(len(chief), len(mine))
    missing = "(nothing more)"
    return at + 1, chief[at] if at < len(chief) else missing, mine[at] if at < len(mine) else missing
