"""ApplyConstraints: lets constraints decide how their operands are sharded, and which nodes read their results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from autodist.graph.editor import NodeDef
from autodist.graph.names import is_control, node_of, tensor
from autodist.graph.step import CapturedStep
from autodist.kernels.base import Kernel
from autodist.kernels.rule import Facts, Refusal, Rewrite, Rule
from autodist.kernels.shard.annotated import annotated, sharding_of
from autodist.kernels.shard.apply_in_functions import ApplyInFunctions
from autodist.kernels.until_stable import UntilStable
from autodist.sharding import Annotations, Constraint, DataFlowEdge


class ConstraintRule(Rule):
    """A rule for constraints."""

    ops: ClassVar[tuple[str, ...]] = ("Identity",)

    def candidates(self, step: CapturedStep) -> Iterable[str]:
        annotations = annotated(step)
        return [name for name in (annotations.constraints if annotations else ()) if name in step.graph_index.nodes]


@dataclass(frozen=True)
class FollowChain(ConstraintRule):
    """Lets nodes that were captured after a chain of constraints read its result.

    c1 = C(s), c2 = C(c1), then s·s    becomes    c2·c2
    """

    name: ClassVar[str] = "follow-chain"

    def match(self, facts: Facts, node: NodeDef) -> Rewrite | Refusal | None:
        seen = _Operand.of(facts, node)
        chain = _chain(facts, node.name)
        if len(chain) < 2 or seen.others:
            return None
        if seen.sharding or (seen.edge and seen.edge.sharding):
            return Refusal(f"{seen.name}, the operand of a chain, has a sharding")
        last = chain[-1]
        position = facts.once(_positions_of)
        late = [name for name in seen.readers if position.get(name, 0) > position.get(last, 0)]
        return _let_read(facts, seen.name, last, late)


@dataclass(frozen=True)
class TakeSharding(ConstraintRule):
    """Gives the operand of a closed constraint its sharding, if it has none and is not on an edge."""

    name: ClassVar[str] = "take-sharding"

    def match(self, facts: Facts, node: NodeDef) -> Rewrite | Refusal | None:
        seen = _Operand.of(facts, node)
        refusal = seen.refusal()
        if refusal or seen.edge:
            return refusal

        def rewrite() -> None:
            annotations: Annotations = facts.current("annotations")
            if seen.name not in annotations.tensors:  # another constraint of the round may request the same
                facts.change(annotations=annotations.with_tensor(seen.name, seen.own))

        return rewrite


@dataclass(frozen=True)
class ReadConstraint(ConstraintRule):
    """Lets all readers of a tensor on an edge read its closed constraint, so that the edge stays free."""

    name: ClassVar[str] = "read-constraint"

    def match(self, facts: Facts, node: NodeDef) -> Rewrite | Refusal | None:
        seen = _Operand.of(facts, node)
        refusal = seen.refusal()
        if refusal or not seen.edge:
            return refusal
        return _let_read(facts, seen.name, node.name, seen.readers)


@dataclass(frozen=True)
class ApplyConstraints(UntilStable):
    """Applies constraints beyond their results.

    A constraint determines the sharding that its readers see; often, also that of its operand.
    Source: the application of sharding constraints in Shardy.
    """

    rules: tuple[Kernel[CapturedStep, CapturedStep], ...] = (
        FollowChain(),
        TakeSharding(),
        ReadConstraint(),
        ApplyInFunctions(),
    )
    name: ClassVar[str] = "apply-constraints"
    after: ClassVar[Mapping[str, str]] = {
        "add-data-flow-edges": "a tensor on an edge does not take the sharding of a constraint",
    }


@dataclass(frozen=True)
class _Operand:
    """The operand of a constraint.

    Attributes:
        name: of the tensor.
        own: the constraint.
        sharding: the requested sharding of the tensor; None: it has none.
        edge: the edge that has the tensor as a target.
        others: shardings that other constraints and manual regions request of the tensor.
        readers: other nodes that read the tensor.
    """

    name: str
    own: Constraint
    sharding: Constraint | None
    edge: DataFlowEdge | None
    others: tuple[Constraint, ...]
    readers: tuple[str, ...]

    @classmethod
    def of(cls, facts: Facts, node: NodeDef) -> _Operand:
        """Describes the operand of the constraint whose node is `node`."""
        annotations: Annotations = facts.current("annotations")
        name = tensor(node.input[0])
        requests = dict(annotations.constraints)
        for region in annotations.regions.values():
            requests |= region.inputs
        consumers = [one for one in facts.editor.consumers(node_of(name)) if _reads(facts.editor[one], name)]
        position = facts.once(_positions_of)
        readers = sorted(set(consumers) - {node.name}, key=lambda one: (position.get(one, 0), one))
        return cls(
            name,
            annotations.constraints[node.name],
            sharding_of(annotations, name),
            next((edge for edge in annotations.edges if name in edge.targets), None),
            tuple(requests[one] for one in readers if one in requests),
            tuple(one for one in readers if one not in requests),
        )

    def refusal(self) -> Refusal | None:
        """Returns the reason why the constraint does not decide how its operand is made."""
        if self.sharding or (self.edge and self.edge.sharding):
            return Refusal(f"{self.name} has a sharding already")
        if not self.own.sharding.is_closed:
            return Refusal("a dimension is open")
        other = next((one for one in self.others if one.sharding != self.own.sharding), None)
        return Refusal(f"{self.name} has another constraint, {other.sharding} ({other.origin})") if other else None


def _positions_of(facts: Facts) -> dict[str, int]:
    """Returns the position of each node in the order of capture, for `Facts.once`."""
    return {name: k for k, name in enumerate(facts.step.graph_index.nodes)}


def _reads(node: NodeDef, name: str) -> bool:
    return any(not is_control(i) and tensor(i) == name for i in node.input)


def _chain(facts: Facts, name: str) -> list[str]:
    """Returns constraints of which each but the last is read only by the next one."""
    annotations: Annotations = facts.current("annotations")
    returned = {node_of(output) for output in facts.editor.outputs}
    chain = [name]
    while chain[-1] not in returned:
        readers = facts.editor.consumers(chain[-1])
        follower, *others = readers or [""]
        if others or follower not in annotations.constraints or not _reads(facts.editor[follower], tensor(chain[-1])):
            break
        chain.append(follower)
    readers = facts.editor.consumers(chain[-1])
    return [] if any(reader in annotations.constraints for reader in readers) else chain


def _let_read(facts: Facts, name: str, constraint: str, readers: Iterable[str]) -> Rewrite | None:
    """Returns a rewrite after which readers of a tensor read its constraint, unless the constraint depends on them."""
    before = facts.editor.ancestors([constraint])
    others = [reader for reader in readers if reader not in before]
    return (lambda: _rewire(facts, name, constraint, others)) if others else None


def _rewire(facts: Facts, name: str, constraint: str, readers: Iterable[str]) -> None:
    before = facts.editor.ancestors([constraint])  # another rewrite of the round may have changed the graph
    facts.editor.rewire(name, tensor(constraint), [reader for reader in readers if reader not in before])
