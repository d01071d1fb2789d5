"""Runs: the dimensions of activations and matrices that the forward pass of a step divides alike."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod

from autodist.graph.names import is_control, node_of
from autodist.graph.node_rules import ROW, Lengths, NodeRule, Rules, Side
from autodist.graph.ops import Factor, ReducedBy, Trait, having
from autodist.graph.parameter_uses import ParameterUses
from autodist.graph.step import CapturedStep
from autodist.graph.walks import reach

_LENGTHS = having(Trait.LENGTHS)

Member = tuple[str, int]
"""A dimension of a tensor or variable: `Side.key`, and its position."""


@dataclass(frozen=True)
class Divided:
    """The division of a variable.

    Attributes:
        dimension: the dimension that is divided.
        role: "columns", "rows" or "vocabulary".
    """

    dimension: int
    role: str


@dataclass(eq=False)
class Run:
    """Dimensions that are divided alike.

    A run begins at the columns of matrices, passes elementwise ops, moves of axes and batched products, and ends at the
    rows of matrices. If it is divided, each place computes its part alone, and the results of the last matrices are
    summed. The heads of an attention are a run, and so are the columns of the first layer of a perceptron.

    Attributes:
        root: identifies it.
        lengths: of the dimensions; None for one that depends on the batch.
        columns: the dimension of each variable whose columns begin it, by name.
        rows: the dimension of each variable whose rows end it.
        tables: the variables whose rows an input of the step indexes.
        parameters: the number of elements of all these variables.
        summed: the number of elements of the results that are summed, for each example.
        obstacle: the first use that needs a dimension whole.
        others: the roots of the runs that divide other dimensions of the same tensors.
    """

    root: Member
    lengths: set[int | None] = field(default_factory=set)
    columns: dict[str, int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    tables: set[str] = field(default_factory=set)
    parameters: int = 0
    summed: int = 0
    obstacle: str | None = None
    others: set[Member] = field(default_factory=set)

    def meets(self, other: Run) -> bool:
        """Returns True if a tensor has dimensions of both, so that one axis cannot divide both."""
        return other.root in self.others

    def uses(self) -> dict[str, Divided]:
        """Returns the matrices that it begins or ends at, by name; of a run with tables, the tables alone."""
        if self.tables:
            return {name: Divided(self.rows[name], "vocabulary") for name in sorted(self.tables)}
        ends = {name: Divided(at, "rows") for name, at in self.rows.items()}
        return ends | {name: Divided(at, "columns") for name, at in self.columns.items()}


def find_runs(step: CapturedStep) -> list[Run]:
    """Returns the runs of the tensors that the differentiated values depend on, in the order of the graph."""
    return list(_Search(step).runs.values())


class _Search:
    """The work of one `find_runs`."""

    def __init__(self, step: CapturedStep) -> None:
        self._step, self._index, self._rules = step, step.graph_index, Rules(step)
        targets = [node_of(name) for call in step.gradient_calls for name in call.targets]
        forward = reach(targets, self._index.data.__getitem__)
        self._order = [name for name in self._index.order if name in forward]
        effects = self._index.effects
        reads = {name: effects[name].reads for name in self._order if name in effects and not effects[name].writes}
        derived = ParameterUses(self._index, reads).derived
        self._weights = {
            name: frozenset(handle for read in derived[name] for handle in reads[read])
            for name in self._order if name in derived
        }  # fmt: skip
        self._fed = self._depending_on(map(node_of, step.inputs))
        trained = {step.by_name[gradient.variable].handle for gradient in step.gradients}
        self._trained = self._depending_on(name for name, handles in reads.items() if handles & trained)
        self._parent: dict[Member, Member] = {}
        self.runs: dict[Member, Run] = {}
        rules = [self._rules.of(name) for name in self._order if self._index.nodes[name].op not in _LENGTHS]
        for rule in rules:
            self._unite(rule)
        for rule in rules:
            self._visit(rule)

    def _depending_on(self, roots: Iterable[str]) -> set[str]:
        """Returns the nodes that depend on the values of some nodes, not only on their shapes."""
        found = set(roots)
        for name in self._order:
            if self._index.nodes[name].op not in _LENGTHS and not found.isdisjoint(self._index.data[name]):
                found.add(name)
        return found

    # -- dimensions that are divided alike -------------------------------------------------------------------------

    def _find(self, member: Member) -> Member:
        while (parent := self._parent.get(member, member)) != member:
            self._parent[member] = self._parent.get(parent, parent)
            member = parent
        return member

    def _unite(self, rule: NodeRule) -> None:
        first: dict[Factor, Member] = {}
        for side in rule.sides:
            for at, factor in enumerate(side.factors):
                if factor is not None:
                    root = self._find((side.key, at))
                    self._parent[root] = self._find(first.setdefault(factor, root))

    def _run(self, side: Side, at: int) -> Run:
        root = self._find((side.key, at))
        run = self.runs.setdefault(root, Run(root))
        run.lengths.add(side.lengths[at])
        return run

    # -- uses ------------------------------------------------------------------------------------------------------

    def _visit(self, rule: NodeRule) -> None:
        runs: dict[Factor, Run] = {}
        for side in rule.sides:
            own = {f: self._run(side, at) for at, f in enumerate(side.factors) if f is not None}
            runs |= own
            for run in own.values():
                run.others |= {other.root for other in own.values()} - {run.root}
                if list(own.values()).count(run) > 1:
                    self._stop(run, rule, "has it twice")
        # The gradient of a result that is made whole would be needed whole.
        for side in filter(None, (*rule.operands, *(rule.results if rule.node.name in self._trained else ()))):
            for at, (factor, length) in enumerate(zip(side.factors, side.lengths, strict=True)):
                if factor is None and length != 1:
                    self._stop(self._run(side, at), rule, "needs it whole")
        if rule.node.name not in self._weights:
            for factor, run in runs.items():
                self._visit_factor(rule, factor, run)

    def _visit_factor(self, rule: NodeRule, factor: Factor, run: Run) -> None:
        holders = {k for k, side in enumerate(rule.operands) if side is not None and factor in side.factors}
        if not holders:
            return
        weights = {k for k in range(len(rule.operands)) if self._is_weight(rule, k)}
        if any(side is not None and factor in side.factors for side in rule.results):
            if holders <= weights:
                self._use_columns(rule, run, holders)
            elif not weights and _is_product(rule) and holders != _divisible(rule):
                self._stop(run, rule, "multiplies two activations")
        elif holders & weights and _is_product(rule) and (factor == ROW or len(holders - weights) == 1):
            self._use_rows(rule, run, min(holders & weights))
        elif not holders <= weights:
            self._stop(run, rule, "reduces it")

    def _input(self, rule: NodeRule, operand: int) -> str:
        return [i for i in rule.node.input if not is_control(i)][operand]

    def _is_weight(self, rule: NodeRule, operand: int) -> bool:
        name = self._input(rule, operand)
        return node_of(name) in self._weights or self._rules.key(name) in self._step.by_handle

    def _variables(self, rule: NodeRule, operand: int, run: Run) -> Iterator[tuple[str, Lengths, int]]:
        """Yields the matrices that a weight is computed from, with their shapes and their dimension in a run."""
        name = self._input(rule, operand)
        key = self._rules.key(name)
        for handle in [key] if key in self._step.by_handle else sorted(self._weights[node_of(name)]):
            variable = self._step.by_handle[handle]
            found = [k for k, n in enumerate(variable.shape) if n != 1 and self._find((handle, k)) == run.root]
            if len(found) > 1:
                self._stop(run, rule, "reads it twice")
            elif found and len(variable.shape) > 1:
                yield variable.name, variable.shape, found[0]

    def _use_columns(self, rule: NodeRule, run: Run, operands: Iterable[int]) -> None:
        """Notes the matrices whose columns are in a run; a bias is not multiplied."""
        if _is_product(rule):
            for operand in operands:
                self._note(run, run.columns, list(self._variables(rule, operand, run)))

    def _use_rows(self, rule: NodeRule, run: Run, operand: int) -> None:
        used, result, table = list(self._variables(rule, operand, run)), rule.results[0], rule.operands[operand]
        self._note(run, run.rows, used)
        run.summed += prod(n or 1 for n in result.lengths) if result is not None else 0
        if table is not None and table.factors[0] == ROW and node_of(self._input(rule, 1)) in self._fed:
            run.tables.update(name for name, _, _ in used)

    @staticmethod
    def _note(run: Run, uses: dict[str, int], found: Collection[tuple[str, Lengths, int]]) -> None:
        for name, shape, at in found:
            if name not in run.columns and name not in run.rows:
                run.parameters += prod(n or 1 for n in shape)
            uses[name] = at

    @staticmethod
    def _stop(run: Run, rule: NodeRule, why: str) -> None:
        if run.obstacle is None:
            scopes = [scope for scope in rule.node.name.split("/")[:-1] if scope != rule.node.op]
            run.obstacle = f"{rule.node.op} of {'/'.join(scopes) or rule.node.name} {why}"


def _is_product(rule: NodeRule) -> bool:
    """Returns True if a node sums over a factor of its operands, as products of matrices and lookups do."""
    kept = {factor for side in rule.results if side is not None for factor in side.factors}
    operands = [side for side in rule.operands if side is not None]
    is_reduced = any(factor is not None and factor not in kept for side in operands for factor in side.factors)
    return is_reduced and rule.rule is not None and rule.rule.reduced is ReducedBy.SUM


def _divisible(rule: NodeRule) -> set[int]:
    """Returns the operands with factors."""
    return {
        k for k, side in enumerate(rule.operands)
        if side is not None and any(factor is not None for factor in side.factors)
    }  # fmt: skip
