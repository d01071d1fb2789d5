"""CopyForPlaces: the programs of several places of one worker, as one graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from autodist.errors import RewriteError
from autodist.graph.editor import NodeDef
from autodist.graph.names import as_input, is_control, node_of, renamed, tensor
from autodist.graph.op_types import is_stateless, types_of_outputs
from autodist.graph.ops import Trait, having
from autodist.graph.parts import Variable, VariableGradient
from autodist.graph.step import PlacedStep
from autodist.graph.step_editor import StepEditor
from autodist.kernels.base import Context, Kernel
from autodist.kernels.shard.local_reshards import Row, add_row
from autodist.kernels.shard.resharded_flows import CopiedFlows
from autodist.kernels.shard.reshards import Reshard, ReshardKind, set_index, source_of
from autodist.placement.holder import Holder
from autodist.placement.partitioning import part_name

_Transfer = tuple[tuple[str, ...], Row, tuple[int, ...]]
"""The tensors of this worker's places in a row, their ranks, and the workers of the row; (): any."""

_SAME_AT_ALL_PLACES = having(Trait.LENGTHS | Trait.QUERY)
"""Ops whose results are those of the whole tensor, or the same for each of its parts."""


@dataclass(frozen=True)
class CopyForPlaces(Kernel[PlacedStep, PlacedStep]):
    """Copies the program of a place for each coordinate of this worker on the axes other than that of the batch.

    A worker with several devices may have several such coordinates. Nodes are copied only if an operand differs between
    them: a part of a tensor, or a partial value. All else runs once. Parts that the worker has itself are joined,
    divided and summed in its graph. One reshard node is left for each row that has places of other workers too.

        h = MatMul(x, w);  y = all_reduce(h)    becomes    h = MatMul(x, w);  h' = MatMul(x, w');  y = h + h'
    """

    name: ClassVar[str] = "copy-for-places"
    after: ClassVar[Mapping[str, str]] = {
        "shard-tensors": "it makes the program of a place",
    }

    def apply(self, step: PlacedStep, context: Context) -> PlacedStep:
        if context.mesh is None or len(context.coordinates) == 1:
            return step
        return _Copying(step, context).run()


class _Copying:
    """The work of one `CopyForPlaces.apply`."""

    def __init__(self, step: PlacedStep, context: Context) -> None:
        assert context.mesh is not None, "only a mesh has places"
        self.step, self.context, self.mesh, self.places = step, context, context.mesh, context.coordinates
        self.editor = StepEditor(step)
        self.copies: list[dict[str, str]] = [{} for _ in self.places]
        """For each coordinate, the copies of nodes that are not those of the first one."""
        self.parts: dict[str, tuple[int, str]] = {}
        self.sources: dict[str, str] = {}
        """The tensors of which new tensors are copies."""

    def run(self) -> PlacedStep:
        divided = {self.step.by_name[name].handle: name for name in self.step.shardings}
        for name in self.step.graph_index.order:
            reshard = Reshard.of(self.step.graph_index.nodes[name])
            if reshard is not None:
                self._exchange(name, reshard)
            elif name in divided:
                self._copy_handle(name, divided[name])
            else:
                self._copy(name)
        self.editor.replace_targets({name: self._all_of(name) for name in self.step.targets})
        self._require_whole()
        return self.editor.to_step(
            variables=tuple(one for variable in self.step.variables for one in self._variables(variable)),
            holders={name: one for of_part in self.step.holders.items() for name, one in self._holders(*of_part)},
            gradients=tuple(one for gradient in self.step.gradients for one in self._gradients(gradient)),
            flows=None if self.step.flows is None else CopiedFlows(self.step.flows, self.parts, self.sources),
            parts=self.parts,
        )

    # -- nodes -----------------------------------------------------------------------------------------------------

    def _copy(self, name: str) -> None:
        """Copies a node for each coordinate with other operands; a node that is not copied waits for all copies."""
        node = self.step.graph_index.nodes[name]
        sharing: dict[tuple[str, ...], list[int]] = {}
        for coordinate in range(len(self.places)):
            sharing.setdefault(self._key(name, node, coordinate), []).append(coordinate)
        for coordinates in sharing.values():
            data = [self._input(i, coordinates[0]) for i in node.input if not is_control(i)]
            inputs = [*data, *self._control(node, coordinates)]
            if 0 in coordinates:
                self.editor.set_inputs(name, inputs)
                continue
            copy = _without_class(self.editor.add_copy(node, self._named(name, coordinates[0]), inputs))
            self._share(name, copy.name, coordinates)

    def _key(self, name: str, node: NodeDef, coordinate: int) -> tuple[str, ...]:
        """Returns the operands of a node by which it differs between coordinates."""
        effect = self.step.graph_index.effects.get(name)
        if effect and effect.writes:  # places with the same part of a variable write the same value
            return tuple(self.copies[coordinate].get(handle, handle) for handle in sorted(effect.writes))
        if node.op in _SAME_AT_ALL_PLACES or not (effect or is_stateless(node.op)):
            return ()
        return tuple(self._input(i, coordinate) for i in node.input if not is_control(i))

    def _copy_handle(self, handle: str, variable: str) -> None:
        """Adds a handle for each other part of a variable."""
        axes = [axis for found in self.step.shardings[variable].axes for axis in found]
        known: dict[int, str] = {}
        for coordinate, place in enumerate(self.places):
            index = self.mesh.index(place, axes)
            if index not in known:
                name = self._named(handle, coordinate)
                known[index] = self.editor.add_copy(self.editor[handle], name, ()).name if coordinate else handle
            self._share(handle, known[index], [coordinate])

    def _share(self, name: str, copy: str, coordinates: Iterable[int]) -> None:
        """Notes the copy of a node for some coordinates, with the specs of its outputs."""
        if copy == name:
            return
        for coordinate in coordinates:
            self.copies[coordinate][name] = copy
            self.parts.setdefault(copy, (coordinate, name))
        for output, _ in enumerate(types_of_outputs(self.step.graph_index.nodes[name])):
            self.editor.note({f"{copy}:{output}": self.step.spec_of(f"{name}:{output}")})

    def _named(self, name: str, coordinate: int) -> str:
        return f"autodist/part_{coordinate}/{name}"

    def _input(self, spelling: str, coordinate: int) -> str:
        """Returns the data input of a node's copy for a coordinate."""
        return as_input(renamed(spelling, self.copies[coordinate]))

    def _control(self, node: NodeDef, coordinates: Sequence[int]) -> list[str]:
        """Returns the control inputs of a node's copy for some coordinates."""
        before = [node_of(i) for i in node.input if is_control(i)]
        return list(dict.fromkeys(f"^{self.copies[k].get(name, name)}" for name in before for k in coordinates))

    def _all_of(self, name: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(copies.get(name, name) for copies in self.copies))

    # -- transfers -------------------------------------------------------------------------------------------------

    def _exchange(self, name: str, reshard: Reshard) -> None:
        """Replaces a reshard node by arithmetic on this worker's parts, or by a reshard node for each row."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for coordinate, place in enumerate(self.places):
            rows.setdefault(self.mesh.row(place, reshard.axes), []).append(coordinate)
        if reshard.kind is ReshardKind.INDEX:
            self._set_ranks(name, [(row.index(self.places[k]), k) for row, members in rows.items() for k in members])
            return
        source, known = source_of(name, self.step.graph_index.nodes), dict[_Transfer, list[str]]()
        results: dict[str, list[int]] = {}
        for places, coordinates in rows.items():
            ranks = {coordinate: places.index(self.places[coordinate]) for coordinate in coordinates}
            members = sorted(coordinates, key=ranks.__getitem__)
            values = tuple(tensor(self._input(source, coordinate)) for coordinate in members)
            row = Row(len(places), tuple(ranks[coordinate] for coordinate in members))
            workers = tuple(self.context.strategy.mesh.places[place].worker for place in places)
            # Rows with equal tensors have equal results. A row of other workers expects the parts of this one, though.
            if (values, row, workers) not in known:
                made, nodes = add_row(self.editor, f"{name}/{coordinates[0]}", values, reshard, row)
                self.parts |= dict.fromkeys(nodes, (coordinates[0], name))
                known[values, row, workers] = known.setdefault((values, row, ()), made)
            for coordinate, value in zip(members, known[values, row, ()], strict=True):
                results.setdefault(value, []).append(coordinate)
        for value, sharing in results.items():
            self._become(name, value, sorted(sharing))

    def _become(self, name: str, value: str, coordinates: Sequence[int]) -> None:
        """Makes a reshard node, or its copy for some coordinates, return a tensor."""
        dtype = self.step.spec_of(f"{name}:0").dtype
        control = self._control(self.step.graph_index.nodes[name], coordinates)
        if 0 in coordinates:
            self.editor.pass_on(name, value, dtype, control)
            return
        copy = self.editor.add_op("Identity", self._named(name, coordinates[0]), [value, *control], dtype)
        self._share(name, copy, coordinates)

    def _set_ranks(self, name: str, ranks: Sequence[tuple[int, int]]) -> None:
        """Replaces the stand-in of a rank by constants, a copy for each coordinate with another rank."""
        node, first = self.step.graph_index.nodes[name], dict[int, str]()
        for rank, coordinate in sorted(ranks, key=lambda one: one[1]):
            if rank not in first:
                first[rank] = name if coordinate == 0 else self._named(name, coordinate)
                set_index(self.editor[name] if coordinate == 0 else self.editor.add_copy(node, first[rank], ()), rank)
            self._share(name, first[rank], [coordinate])

    # -- fields of the step ----------------------------------------------------------------------------------------

    def _variables(self, variable: Variable) -> Iterator[Variable]:
        """Yields the parts of a variable that this worker holds."""
        for handle in self._all_of(variable.handle):
            coordinate, _ = self.parts.get(handle, (0, handle))
            yield replace(variable, name=part_name(variable.name, coordinate), handle=handle)

    def _holders(self, variable: str, holder: Holder) -> Iterator[tuple[str, Holder]]:
        """Yields the holders of the parts of a variable; the rows of all coordinates have the same workers."""
        yield from ((part.name, holder) for part in self._variables(self.step.by_name[variable]))

    def _gradients(self, gradient: VariableGradient) -> Iterator[VariableGradient]:
        """Yields the gradients of the parts of a variable; parts whose gradients are the same rows share the first."""
        known: set[str] = set()
        for handle in self._all_of(self.step.by_name[gradient.variable].handle):
            coordinate, _ = self.parts.get(handle, (0, handle))
            *indices, values = (tensor(self._input(one, coordinate)) for one in gradient.tensors)
            if values in known:
                continue
            known.add(values)
            own = [self._apart(one, coordinate) if coordinate else one for one in indices]
            yield replace(gradient, variable=part_name(gradient.variable, coordinate), tensors=(*own, values))

    def _apart(self, indices: str, coordinate: int) -> str:
        """Returns a copy of a gradient's indices for the nodes of a coordinate: no two gradients have one tensor."""
        own = [c for c in self.editor.consumers(node_of(indices)) if self.parts.get(c, (0, c))[0] == coordinate]
        copy, dtype = self._named(f"indices/{node_of(indices)}", coordinate), self.editor.spec(indices).dtype
        made = tensor(self.editor.add_op("Identity", copy, [indices], dtype))
        self.editor.rewire(indices, made, own)
        self.sources[made] = indices
        return made

    def _require_whole(self) -> None:
        """Checks that the whole tensors that the step refers to are computed once.

        Raises:
            RewriteError: one of them differs between places.
        """
        calls = [name for call in self.step.gradient_calls for name in (call.seed, *call.targets)]
        terms = [term for call in self.step.gradient_calls for term in call.terms]
        calls += [name for term in terms for name in (term.tensor, term.seed, term.value)]
        for name in map(node_of, [*self.step.outputs, *self.step.inputs, *calls]):
            if any(name in copies for copies in self.copies):
                raise RewriteError(
                    f"{name} is computed from parts of tensors in another way at each place of this worker. Start a "
                    "worker for each device: set `gpus_per_worker` or `workers`, or pass --workers."
                )


def _without_class(node: NodeDef) -> NodeDef:
    """Removes the colocation of a copy, which would name the original."""
    node.attr.pop("_class", None)
    return node
