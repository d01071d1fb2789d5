"""SplitConstants: makes a copy of a constant for each reader, since its readers need not be sharded alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from autodist.graph.editor import NodeDef
from autodist.graph.names import as_input, data_renamed, is_control, node_of, output_index, renamed, tensor
from autodist.graph.op_types import types_of_outputs
from autodist.graph.step import CapturedStep
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel
from autodist.kernels.shard.annotated import annotated
from autodist.kernels.shard.constants import Constants
from autodist.sharding import Annotations

T = TypeVar("T")


@dataclass(frozen=True)
class SplitConstants(Kernel[CapturedStep, CapturedStep]):
    """Copies constants, with all that leads to them, for each operand of each reader that is not constant itself.

    Otherwise a sharding would propagate from one reader of a constant to another one. Source: the splitting of
    constants and scalars in Shardy. The first reader and the step itself keep the original nodes. Copies that
    propagation has sharded alike are merged by TensorFlow, which computes equal nodes once.

        AddV2(x, c), MatMul(c, w)    becomes    AddV2(x, c), MatMul(copy of c, w)

    Scalars are not copied, since they are never divided. A large Const is not copied either: if it has several readers,
    each reads it through an Identity that is a barrier for propagation.

    Attributes:
        max_bytes: a Const with more bytes is not copied.
    """

    max_bytes: int = 1 << 16
    name: ClassVar[str] = "split-constants"
    after: ClassVar[Mapping[str, str]] = {
        "inline-branches": "it moves the constants of branches to the step",
    }

    def apply(self, step: CapturedStep, context: Context) -> CapturedStep:
        annotations = annotated(step)
        if annotations is None:
            return step
        marks = {*annotations.constraints, *annotations.barriers}
        marks |= {name for region in annotations.regions.values() for name in (*region.inputs, *region.outputs)}
        split = _Split(step, annotations, Constants.of(step, marks, self.max_bytes))
        split.copy_constants()
        split.insert_barriers()
        return split.to_step()


class _Split:
    """The splitting of the constants of one step."""

    def __init__(self, step: CapturedStep, annotations: Annotations, constants: Constants) -> None:
        self._step, self._annotations, self._constants = step, annotations, constants
        self._editor = StepEditor(step)
        self._copies: dict[str, str] = {}
        self._barriers: set[str] = set()
        self._bodies = {name: set(region.body) for name, region in annotations.regions.items()}
        self._taken: set[str] = set()
        for name in sorted(constants.computed & step.named):
            self._taken.update(constants.leading_to(step, name))

    def copy_constants(self) -> None:
        """Ensures that each operand of each reader has nodes of its own that lead to it."""
        constants = self._constants
        for reader in self._step.graph_index.nodes:
            if reader in constants.computed or reader in constants.broadcasts:
                continue
            for position, name in enumerate(self._step.graph_index.inputs(reader)):
                source = node_of(name)
                is_copied = source in constants.computed or source in constants.broadcasts
                if is_copied and source not in constants.whole and self._step.spec_of(name).shape.rank != 0:
                    self._isolate(reader, position, name)

    def _isolate(self, reader: str, position: int, name: str) -> None:
        """Ensures that no other reader uses the nodes that lead to an operand."""
        leading = self._constants.leading_to(self._step, node_of(name))
        prefix = f"autodist/split_constants/{reader}/{position}/"
        copies = {one: prefix + one for one in leading if one in self._taken}
        for one in reversed(leading):
            node = self._step.graph_index.nodes[one]
            inputs = data_renamed(node.input, copies)
            if one in copies:
                self._copy(node, copies[one], inputs)
            elif inputs != list(node.input):
                self._editor.set_inputs(one, inputs)
        if node_of(name) in copies:
            self._read(reader, position, renamed(as_input(name), copies))
        self._taken.update(leading)
        for region, body in self._bodies.items():
            if reader in self._annotations.regions[region].body:
                body.update(copies.get(one, one) for one in leading)

    def _copy(self, node: NodeDef, name: str, inputs: Iterable[str]) -> None:
        copy = self._editor.add_copy(node, name, inputs)
        copy.attr.pop("_class", None)
        self._copies[name] = node.name
        specs = {f"{name}:{k}": self._step.spec_of(f"{node.name}:{k}") for k, _ in enumerate(types_of_outputs(node))}
        self._editor.note(specs)

    def _read(self, reader: str, position: int, name: str) -> None:
        inputs = list(self._editor[reader].input)
        inputs[position] = name
        self._editor.set_inputs(reader, inputs)

    def insert_barriers(self) -> None:
        """Inserts an Identity between a constant that is too large for copies and each of its readers."""
        for name in sorted(self._constants.whole):
            node = self._editor[name]
            if self._step.spec_of(tensor(name)).shape.rank == 0:
                continue
            reads = list(self._reads_of(name))
            if len(reads) > 1:
                for reader, position in reads:
                    if reader not in self._annotations.barriers:
                        self._insert_barrier(node, reader, position)

    def _reads_of(self, name: str) -> Iterator[tuple[str, int]]:
        for reader in sorted(self._editor.consumers(name)):
            for position, i in enumerate(self._editor[reader].input):
                if not is_control(i) and node_of(i) == name:
                    yield reader, position

    def _insert_barrier(self, node: NodeDef, reader: str, position: int) -> None:
        name, spec = f"autodist/split_constants/{reader}/{position}/{node.name}", self._step.spec_of(tensor(node.name))
        self._editor.add_op("Identity", name, [node.name], spec.dtype, node.device)
        self._editor.note({tensor(name): spec})
        self._barriers.add(name)
        self._copies[name] = node.name
        self._read(reader, position, name)

    def to_step(self) -> CapturedStep:
        """Returns the step, with annotations that contain the copies."""
        given, copies = self._annotations, self._copies
        regions = {
            name: region if self._bodies[name] == region.body else replace(region, body=frozenset(self._bodies[name]))
            for name, region in given.regions.items()
        }
        made = replace(
            given,
            regions=regions,
            tensors={**given.tensors, **_of_copies(given.tensors, copies)},
            groups={
                number: replace(group, members=_with_copies(group.members, copies))
                for number, group in given.groups.items()
            },
            barriers=given.barriers | self._barriers,
        )
        if copies:
            return self._editor.to_step(annotations=made)
        return self._step if made == given else replace(self._step, annotations=made)


def _of_copies(named: Mapping[str, T], copies: Mapping[str, str]) -> dict[str, T]:
    """Returns entries for the copies of the nodes of tensors."""
    return {
        f"{copy}:{output_index(name)}": one
        for name, one in named.items() for copy, original in copies.items() if node_of(name) == original
    }  # fmt: skip


def _with_copies(members: tuple[str, ...], copies: Mapping[str, str]) -> tuple[str, ...]:
    return (*members, *_of_copies(dict.fromkeys(members), copies))
