"""The walk over the graph: from the tensors that are asked for back to the inputs, then forward with the table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from autodist.graph.effects import PASSES
from autodist.graph.in_step_all_reduce import InStepAllReduce, InStepAllReduceKind
from autodist.graph.op_types import is_stateless
from autodist.graph.ops import Trait, draws_numbers, having
from autodist.graph.propagation.answers import factor_of, kind_of
from autodist.graph.propagation.bodies import DrawAt, Library, RowsOfDraw, leave
from autodist.graph.propagation.by_example import in_turn
from autodist.graph.propagation.factors import EXAMPLES, NONE, Count, PartialSum, power, times
from autodist.graph.propagation.facts import (
    SAME,
    WITHOUT_A_NODE,
    Fact,
    Form,
    GeneratorState,
    Nothing,
    Recovery,
    Rows,
    UnknownFact,
    form_of,
    made_of_noise,
    made_of_state,
    names_a_sum,
    rows,
)
from autodist.graph.propagation.folding import Constants
from autodist.graph.propagation.kinds import (
    Elements,
    Examples,
    Kind,
    Mean,
    PerExample,
    Replicated,
    Sum,
    Unknown,
    Weight,
)
from autodist.graph.propagation.op_context import OpContext, tensor_name
from autodist.graph.propagation.table import NOT_FOLDED, TABLE

ShapeOf = Callable[[str], tf.TensorShape]
_UNKNOWN_SHAPE = tf.TensorShape(None)
_DEEPEST_CALL = 40


class Propagation(ABC):
    """How the values that replicas compute join to the whole batch's."""

    @abstractmethod
    def kind(self, tensor: str) -> Kind:
        """How the replicas' values of a tensor join.

        Args:
            tensor: its name, "node:0" or "node" for the first output.

        Raises:
            ValueError: if the graph has no such node.
        """

    @abstractmethod
    def rows_for_each(self, tensor: str) -> int | None:
        """How many rows of a tensor belong to each example.

        None where it has no such rows (a `PerExample` kind says along which axis they lie), they are not in the order
        of the examples, or their number is not known or not a whole one.
        """

    @abstractmethod
    def draws_within(self, node: str) -> Mapping[DrawAt, RowsOfDraw | None]:
        """The stateless draws in functions that a node calls, by a seed that all replicas share.

        They draw the same numbers on each replica, for examples that are not the same. None where it is not known how
        many rows they draw for each example.
        """


class GraphPropagation(Propagation):
    """Propagation over one graph; made by `propagate`."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def kind(self, tensor: str) -> Kind:
        name = tensor_name(tensor)
        if self._frame.producer(name) is None:
            raise ValueError(f"The graph has no tensor '{tensor}'. Name it as in the graph that was analysed.")
        kind, node = kind_of(self._frame.fact(name)), self._frame.producer(name)
        if isinstance(kind, Unknown) and kind.reason in WITHOUT_A_NODE and node is not None:
            return Unknown(f"node '{node.name}' ({node.op}): {kind.reason}")
        return kind

    def rows_for_each(self, tensor: str) -> int | None:
        form = form_of(self._frame.fact(tensor_name(tensor)))
        found = form.rows if isinstance(form, Form) and not form.factors else None
        return None if found is None else found.whole_per

    def draws_within(self, node: str) -> Mapping[DrawAt, RowsOfDraw | None]:
        self._frame.follow(node)
        return self._frame.draws_within(node)

    def declare_share(self, tensor: str, weight: Weight | None) -> None:
        """Says of a tensor that each replica has its share of the batch there: its weight over that of all replicas.

        Args:
            tensor: its name.
            weight: of each replica; None: shares add up to the whole, and it is not said by which weight.

        Raises:
            ValueError: it is too late, since what is made of the tensor was asked for.
        """
        name = tensor_name(tensor)
        factor = PartialSum(name, NONE) if weight is None else factor_of(weight)
        self._frame.declare(name, Form(factors=power(factor, 1)))


def propagate(
    graph_def: tf.compat.v1.GraphDef,
    batch_axes: Mapping[str, int],
    shapes: ShapeOf | Mapping[str, tf.TensorShape],
    *,
    declared: Mapping[str, Kind] | None = None,
    nodes: Mapping[str, tf.compat.v1.NodeDef] | None = None,
    whole_sums: Mapping[str, InStepAllReduce] | None = None,
    apart: Mapping[str, str] | None = None,
) -> GraphPropagation:
    """Prepares the analysis of a graph of which replicas compute the same nodes, each on its part of the batch.

    Parts may be of unequal length. Axes other than the batch's have one length on all replicas, and constants are
    what they are: a sum that is divided by a constant number of examples is a sum. A read of a variable counts as
    replicated, even where the step wrote it before: such writes are combined before they are read.

    Args:
        graph_def: the captured single-device graph, with its function library.
        batch_axes: for each tensor that holds the batch (a placeholder, an output of an iterator), the axis that
            is split. They hold the same examples, or in each part numbers of them that are in proportion.
            Placeholders that are not named are the same on all replicas.
        shapes: what is known of each tensor's shape, by name ("x:0").
        declared: kinds that are stated; they win over what would be computed.
        nodes: the graph's nodes by name, where they are at hand.
        whole_sums: by their nodes; the one input of each is added up or gathered over all replicas before the step goes
            on with it. What was the same on all before stays as it is, its gradients, too.
        apart: of those in `batch_axes` whose rows belong to no example of the others: the tensor by whose rows they are
            counted.

    Returns:
        An object that answers `kind(tensor)`. Nothing is computed before it is asked for, and nothing twice.
    """
    shape_of = shapes if callable(shapes) else lambda name: shapes.get(name, _UNKNOWN_SHAPE)
    counted = {name: Count(Elements(tensor_name(by))) for name, by in (apart or {}).items()}
    seeds: dict[str, Fact] = {
        tensor_name(name): Form(Rows(axis, counted.get(name, EXAMPLES))) for name, axis in batch_axes.items()
    }
    for name, kind in (declared or {}).items():
        seeds[tensor_name(name)] = _declared_fact(tensor_name(name), kind)
    nodes = nodes or _by_name(graph_def)
    return GraphPropagation(Frame(nodes, Library(graph_def.library), shape_of, seeds, whole_sums=whole_sums or {}))


def _declared_fact(tensor: str, kind: Kind) -> Fact:
    additive = power(PartialSum(tensor, frozenset()), 1)
    match kind:
        case Replicated(is_generator):
            return GeneratorState() if is_generator else SAME
        case PerExample(axis):
            return rows(axis)
        case Sum():
            return Form(factors=additive)
        case Mean(Examples()):
            below = power(EXAMPLES, -1)
            return Form(factors=times(power(PartialSum(tensor, below), 1), below))
        case Unknown(reason):
            return UnknownFact(reason)
    raise ValueError(f"'{tensor}' cannot be declared as {kind}: only a mean over the examples can be declared.")


class Frame:
    """One graph or one function body, with what is known of its tensors so far."""

    def __init__(
        self,
        nodes: Mapping[str, tf.compat.v1.NodeDef],
        library: Library,
        shape_of: ShapeOf,
        seeds: Mapping[str, Fact],
        tag: str = "",
        whole_sums: Mapping[str, InStepAllReduce] | None = None,
    ) -> None:
        self._nodes = nodes
        self._whole_sums = whole_sums or {}
        self._library = library
        self._shape_of, self._seeds = shape_of, dict(seeds)
        self._seeded = {name.partition(":")[0] for name in seeds}
        self._facts: dict[str, Fact | list[Fact]] = {}
        self._brought_back: dict[str, Fact] = {}
        self._followed: set[str] = set()
        self._same: dict[object, str] = {}
        self._constants = Constants(self.producer, self.shape)
        self.tag = tag

    def declare(self, tensor: str, fact: Fact) -> None:
        """Sets what is known of a tensor before anything is made of it."""
        name = _node_of(tensor)
        if name in self._facts:
            raise ValueError(f"'{tensor}' cannot be declared any more: what depends on it is known already.")
        self._seeds[tensor] = fact
        self._seeded.add(name)

    def producer(self, tensor: str) -> tf.compat.v1.NodeDef | None:
        return self._nodes.get(tensor.partition(":")[0])

    def shape(self, tensor: str) -> tf.TensorShape:
        return self._shape_of(tensor_name(tensor))

    def constant(self, tensor: str) -> np.ndarray | None:
        return None if tensor in self._seeds else self._constants.value(tensor)

    def _variable(self, tensor: str) -> tf.compat.v1.NodeDef | None:
        """The node of a variable's handle, through what only passes it on."""
        node = self.producer(tensor)
        while node is not None and node.op in PASSES:
            node = self.producer(node.input[0])
        return node if node is not None and node.op == "VarHandleOp" else None

    def fact(self, tensor: str) -> Fact:
        """What is known of one tensor; computes what it needs and keeps it."""
        name, _, index = tensor.partition(":")
        self.follow(name)
        return self._output(name, int(index or 0))

    def follow(self, name: str) -> None:
        """Finds what is known of all outputs of a node."""
        while name not in self._facts:
            self._evaluate(name)
            self._follow_loops()

    def draws_within(self, node: str) -> dict[DrawAt, RowsOfDraw | None]:
        """The draws in functions that a node has called so far."""
        within = f"{self.tag}{node}:0>"
        return {at: found for at, found in self._library.draws.items() if at[0].startswith(within)}

    def _follow_loops(self) -> None:
        """Holds what old loops were taken to bring back against what they do; where it differs, all is forgotten."""
        while pending := [name for name in self._brought_back if name not in self._followed]:
            name = pending[0]
            source = _data_inputs(self._nodes[name])[0]
            if _node_of(source) not in self._facts:
                self._evaluate(_node_of(source))
            found, assumed = self._output(*_split(source)), self._brought_back[name]
            self._followed.add(name)
            if found != assumed and not isinstance(assumed, UnknownFact):  # opaque holds whatever is brought back
                first = isinstance(assumed, Nothing)
                changes = UnknownFact(f"node '{name}' (NextIteration): its loop changes how the value joins")
                self._brought_back[name] = found if first and not names_a_sum(found) else changes
                self._followed.clear()
                self._facts.clear()
                return

    def _output(self, name: str, index: int) -> Fact:
        if name in self._seeded and (seed := self._seeds.get(f"{name}:{index}")) is not None:
            return seed
        found = self._facts[name]
        return found[index] if isinstance(found, list) else found

    def _evaluate(self, root: str) -> None:
        """Depth first with a stack of its own, since graphs are deeper than Python's."""
        stack, open_nodes = [root], set()
        while stack:
            name = stack[-1]
            if name in self._facts:
                stack.pop()
                continue
            node = self._nodes[name]
            sources = [] if node.op == "NextIteration" else _data_inputs(node)
            missing = [source for source in map(_node_of, sources) if source not in self._facts]
            if missing and name not in open_nodes:
                open_nodes.add(name)
                stack.extend(missing)
                continue
            stack.pop()
            if missing:
                self._facts[name] = UnknownFact(f"node '{name}' ({node.op}): it stands in a loop of the graph")
            else:
                self._facts[name] = self._apply(node, sources)

    def _apply(self, node: tf.compat.v1.NodeDef, sources: list[str]) -> Fact | list[Fact]:
        if node.op == "NextIteration":
            return self._brought_back.setdefault(node.name, Nothing())
        facts = [self._output(*_split(source)) for source in sources]
        if node.name in self._whole_sums:
            return self._summed(self._whole_sums[node.name], facts[0])
        rule = TABLE.get(node.op)
        turned = in_turn(OpContext(node, sources, facts, self), is_stateless(node.op))
        if turned is not None:
            return turned
        if node.op not in NOT_FOLDED and (rule is not None or _is_stateless(node.op)):
            if all(fact is SAME or fact == SAME for fact in facts):
                return SAME
            if (made := made_of_noise(facts) or made_of_state(facts)) is not None:
                return made
        site = OpContext(node, sources, facts, self)
        if rule is None and self._library.has(node.op):
            return self.call(site, node.op, facts, sources)
        if rule is None:
            return site.opaque(
                "this op is not in the table of what shows how a batch goes through", Recovery.BATCH_SHAPED
            )
        found = rule(site)
        if self.tag and node.op in having(Trait.BY_KEY) and not isinstance(found, list):
            self._library.note_draw((self.tag, node.name), site, found)
        return [_named(site, fact) for fact in found] if isinstance(found, list) else _named(site, found)

    def _summed(self, whole: InStepAllReduce, own: Fact) -> Fact:
        """The fact of a sum over all replicas, or of the rows that they gather."""
        first = whole.of or whole.node
        before = self.fact(tensor_name(_data_inputs(self._nodes[first])[0])) if first in self._nodes else None
        if before == SAME:
            return own
        mixed_at = own.mixed_at if isinstance(own, Form) else None
        if whole.how is InStepAllReduceKind.OWN_ROWS:
            found = before.rows if isinstance(before, Form) else None
            return (
                Form(found, mixed_at=mixed_at) if found else UnknownFact(f"node '{first}' gathers what has no examples")
            )
        return Form(mixed_at=mixed_at) if isinstance(own, Form) else SAME

    def same_as(self, key: object, tensor: str) -> str:
        return self._same.setdefault(key, tensor)

    def call(self, site: OpContext, function: str, arguments: list[Fact], tensors: list[str]) -> list[Fact]:
        """What a function of the library gives; `tensors` are the caller's names of its arguments."""
        if not self._library.has(function) or self.tag.count(">") >= 2 * _DEEPEST_CALL:
            why = f"its function '{function}' is not in the graph's library, or calls are too deep"
            return [site.opaque(why)] * _number_of_outputs(site.node)
        handles = [self._variable(name) for name in tensors]
        # A loop's results have the shapes that hold in every turn; where it names none, these are its inputs'.
        is_loop = site.node.op in having(Trait.LOOP)
        shaped = [f"{site.node.name}:{k}" for k in range(len(tensors))] if is_loop else tensors
        body = self._library.body(function, [self.shape(name) for name in shaped], handles)
        seeds = dict(zip(body.arguments, arguments, strict=True))
        tag = f"{site.named()}>{function}>"
        frame = Frame(_by_name(body.graph_def), self._library, body.shape, seeds, tag)
        return leave([frame.fact(name) for name in body.outputs], site, tag)


def _named(site: OpContext, fact: Fact) -> Fact:
    """Sees to it that the node is named at which something is not known."""
    if isinstance(fact, UnknownFact) and fact.reason in WITHOUT_A_NODE:
        return site.opaque(f"of an input, {fact.reason}", fact.recovery)
    return fact


def _number_of_outputs(node: tf.compat.v1.NodeDef) -> int:
    """Of an op that calls functions: a loop names its types T, the others Tout."""
    return len(node.attr["Tout" if "Tout" in node.attr else "T"].list.type)


def _by_name(graph_def: tf.compat.v1.GraphDef) -> dict[str, tf.compat.v1.NodeDef]:
    return {node.name: node for node in graph_def.node}


def _is_stateless(op: str) -> bool:
    return is_stateless(op) and not draws_numbers(op)


def _data_inputs(node: tf.compat.v1.NodeDef) -> list[str]:
    return [tensor_name(name) for name in node.input if not name.startswith("^")]


def _node_of(tensor: str) -> str:
    return tensor.partition(":")[0]


def _split(tensor: str) -> tuple[str, int]:
    name, _, index = tensor.partition(":")
    return name, int(index)
