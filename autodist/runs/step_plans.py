"""Plans of a run's steps: the strategy of each step, and the step rewritten for this worker."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence, Set
from itertools import chain

import tensorflow as tf

from autodist.errors import StrategyError
from autodist.graph.inboxes import name_by_type
from autodist.graph.renaming import Renaming
from autodist.graph.stage_marks import has_stage_marks
from autodist.graph.step import CapturedStep, ReplicatedStep, Step
from autodist.kernels import KERNELS, AnyKernel, Context, Fetching, find_divided, rewrite
from autodist.placement.holder import Holder
from autodist.proto import strategy_pb2
from autodist.resources import Measurements, ResourceSpec
from autodist.runs.stage_costs import Rewriting
from autodist.runtime.fusions import keep_apart
from autodist.sharding import Sharding
from autodist.strategies import (
    BuildsStrategy,
    call_builder,
    check_strategy,
    errors_with_place,
    find_mesh,
    graph_config,
    resolve_specs,
    synced_variables,
)
from autodist.strategies.nodes import pieces
from autodist.verify.recorder import Recorder

log = logging.getLogger("autodist")


class StepPlans:
    """A worker's plans of the steps of a run: the chief builds the strategies, and each worker rewrites its steps.

    Args:
        spec: the machines.
        builder: builds the strategies; None on workers other than the chief.
        index: index of this worker.
        recorder: records training steps; None unless recording is enabled.
    """

    def __init__(
        self, spec: ResourceSpec, builder: BuildsStrategy | None, index: int, recorder: Recorder | None
    ) -> None:
        self._spec, self._builder, self._index, self._recorder = spec, builder, index, recorder
        self._decided: dict[str, strategy_pb2.VariableNode] = {}
        self._owned: dict[str, Sequence[tuple[int, int]]] = {}
        self._rehearsed: tuple[tf.compat.v1.GraphDef, ReplicatedStep] | None = None
        self._seen: Rewriting | None = None
        self._staged: strategy_pb2.Strategy | None = None
        self._shardings: dict[str, Sharding] = {}
        self._count = 0
        self._has_warned_of_marks = False
        self._outer_steps: dict[str, str] = {}

    @property
    def rehearsed(self) -> ReplicatedStep | None:
        """The step that was rewritten in advance; None once it has been used."""
        return None if self._rehearsed is None else self._rehearsed[1]

    def build(
        self,
        step: CapturedStep,
        names: Mapping[str, str],
        measurements: Measurements | None = None,
        compilation: strategy_pb2.Compilation | None = None,
    ) -> strategy_pb2.Strategy:
        """On the chief, builds the strategy for a step; a variable of an earlier step keeps its placement.

        The bytes that earlier steps have placed on owners count as those owners' loads.

        Args:
            step: the step.
            names: the session's name of each variable.
            measurements: the measurements for `Auto`; None for other builders.
            compilation: what XLA compiles of the step, by measurements; None: as the YAML or the script says.

        Raises:
            StrategyError: the strategy is not possible for this step.
        """
        if compilation is None:
            compilation = _compilation_by_yaml(self._spec.xla)
        if not step.gradients:
            strategy = strategy_pb2.Strategy(builder="none", graph_config=graph_config(self._spec))
            strategy.graph_config.MergeFrom(strategy_pb2.GraphConfig(compilation=compilation))
            if self._builder is not None and (mesh := find_mesh(self._builder)) is not None:
                strategy.mesh.CopyFrom(mesh.message(self._spec))
            return resolve_specs(strategy, step, self._spec)
        assert self._builder is not None, "the chief builds the strategy"
        trained = {names[variable.name] for variable in synced_variables(step)}
        spec = self._spec.with_owned_bytes(self._other_owned_bytes(trained))
        spec = spec.with_measurements(measurements or Measurements())
        strategy = call_builder(self._builder, step, spec)
        for node in strategy.nodes:
            earlier = self._decided.get(names.get(node.variable, ""))
            if earlier is not None:
                strategy.ClearField("choice")  # it predicts another step
                variable = node.variable
                node.CopyFrom(earlier)
                node.variable = variable
        check_strategy(strategy, step, self._spec)
        strategy.graph_config.MergeFrom(strategy_pb2.GraphConfig(compilation=compilation))
        self._check_stages_known(strategy)
        self._record_owned(strategy, step, names)
        if not strategy.pipeline.stages and not self._has_warned_of_marks and has_stage_marks(step):
            self._has_warned_of_marks = True
            log.warning(
                "ad.stage has no effect under %s, which has no pipeline stages: each replica computes the whole model. "
                "Use `builder: Pipeline` for stages.", strategy.builder,
            )  # fmt: skip
        if self._recorder is not None:
            self._recorder.require_exact(strategy)
        return resolve_specs(strategy, step, spec)

    def have_decided(self, step: CapturedStep, names: Mapping[str, str]) -> bool:
        """Returns True if earlier steps have decided the placement of all variables that a step trains."""
        return all(names[variable.name] in self._decided for variable in synced_variables(step))

    def _other_owned_bytes(self, names: Set[str]) -> list[int]:
        """Returns, for each worker, the bytes that it owns of the variables of earlier steps.

        Args:
            names: session names of variables to leave out: those that the step trains, which a builder places itself.
        """
        owned = [0] * len(self._spec.workers)
        for owner, byte_size in chain.from_iterable(o for name, o in self._owned.items() if name not in names):
            owned[owner] += byte_size
        return owned

    def _record_owned(self, strategy: strategy_pb2.Strategy, step: CapturedStep, names: Mapping[str, str]) -> None:
        variables = {variable.name: variable for variable in synced_variables(step)}
        for node in strategy.nodes:
            parts = pieces(variables[node.variable], node)
            self._owned[names.get(node.variable, node.variable)] = [
                (one.owner, piece.byte_size) for piece, one in parts if one.owner is not None
            ]

    def _check_stages_known(self, strategy: strategy_pb2.Strategy) -> None:
        """Checks that pipeline stages in the strategy were known when the processes started.

        Raises:
            StrategyError: the stages were not known.
        """
        if strategy.pipeline.stages and not self._spec.micro_batches:
            raise StrategyError(
                f"{strategy.builder} returns a strategy with pipeline stages, whose replicas are the micro-batches. "
                "These must be known before the processes start. Use the builder Pipeline."
            )

    def decide(self, strategy: strategy_pb2.Strategy, names: Mapping[str, str], renaming: Renaming) -> None:
        """Stores the placement of a step's variables for later steps.

        Args:
            strategy: the chief's strategy for the step.
            names: the session's name of each variable.
            renaming: the chief's names.
        """
        shared = {renaming.variable(name): one for name, one in names.items()}
        if strategy.pipeline.stages:
            self._staged = strategy
        self._decided.update({shared[node.variable]: node for node in strategy.nodes})

    def rehearse(self, step: CapturedStep, strategy: strategy_pb2.Strategy, names: Mapping[str, str]) -> None:
        """Rewrites the first step while other workers may still trace it, so that a kernel's error is raised early."""
        self._seen = Rewriting() if strategy.pipeline.stages or strategy.HasField("mesh") else None
        rewritten = self._rewrite(step, strategy, names, seen=self._seen)
        assert isinstance(rewritten, ReplicatedStep), "made by the kernels of a training step"
        self._rehearsed = (step.graph_def, rewritten)

    def take_rewriting(self) -> Rewriting | None:
        """Returns the rewriting recorded in `rehearse` for a pipeline or a mesh; later calls return None."""
        seen, self._seen = self._seen, None
        return seen

    def rewritten(
        self,
        step: CapturedStep,
        strategy: strategy_pb2.Strategy,
        names: Mapping[str, str],
        fetching: Fetching,
        kernels: Sequence[AnyKernel],
    ) -> Step:
        """Returns a step rewritten for this worker; the arguments are those of `Run.program`.

        Raises:
            FetchedElsewhereError: workers may fetch different outputs, and one is computed on other workers.
        """
        rehearsed, self._rehearsed = self._rehearsed, None
        if rehearsed is not None and rehearsed[0] is step.graph_def:
            made: Step = rehearsed[1]
        else:
            made = self._rewrite(step, strategy, names, fetching, kernels)
        self._outer_steps |= {name: key for key, one in made.outer_steps.items() for name in one.variables}
        return made

    def _with_stages(self, strategy: strategy_pb2.Strategy) -> strategy_pb2.Strategy:
        """Adds a training step's pipeline stages, which hold the variables, to the strategy of another step."""
        if self._staged is None or strategy.nodes:
            return strategy
        staged = strategy_pb2.Strategy()
        staged.CopyFrom(strategy)
        staged.pipeline.CopyFrom(self._staged.pipeline)
        if self._staged.HasField("mesh"):
            staged.mesh.CopyFrom(self._staged.mesh)
            del staged.mesh.variables[:]  # with_shardings adds those of the step's variables
        return staged

    def with_shardings(self, strategy: strategy_pb2.Strategy, names: Mapping[str, str]) -> strategy_pb2.Strategy:
        """Adds the shardings that earlier steps have given to variables; these do not change."""
        known = {name: self._shardings[shared] for name, shared in names.items() if shared in self._shardings}
        if not known:
            return strategy
        made = strategy_pb2.Strategy()
        made.CopyFrom(strategy)
        del made.mesh.variables[:]
        made.mesh.variables.extend(one for one in strategy.mesh.variables if one.variable not in known)
        made.mesh.variables.extend(
            strategy_pb2.VariableSharding(variable=name, sharding=str(one.closed()), origin="an earlier step")
            for name, one in known.items()
        )
        return made

    def keep_shardings(self, shardings: Mapping[str, Sharding], names: Mapping[str, str]) -> None:
        """Stores the shardings of a step's variables for later steps."""
        self._shardings.update((names[name], sharding) for name, sharding in shardings.items())

    def divided(
        self, step: CapturedStep, strategy: strategy_pb2.Strategy, names: Mapping[str, str]
    ) -> dict[str, Holder]:
        """Returns the holders of the variables that a mesh divides in a step, and stores their shardings."""
        context = Context(self.with_shardings(strategy, names), self._index)
        with errors_with_place(self._builder):
            shardings, holders = find_divided(step, context)
        self.keep_shardings(shardings, names)
        return holders

    def _rewrite(
        self,
        step: CapturedStep,
        strategy: strategy_pb2.Strategy,
        names: Mapping[str, str],
        fetching: Fetching = Fetching.BY_ALL,
        kernels: Sequence[AnyKernel] = KERNELS,
        seen: Rewriting | None = None,
    ) -> Step:
        strategy = self.with_shardings(self._with_stages(strategy), names)
        context = Context(strategy, self._index, fetching, self._outer_steps)
        if self._recorder is not None:
            kernels = self._recorder.kernels(kernels)
        with errors_with_place(self._builder):
            rewritten = rewrite(share_names(step, names), context, f"step_{self._count}", kernels, seen)
        if isinstance(rewritten, ReplicatedStep):
            self.keep_shardings(rewritten.shardings, names)
        self._count += 1
        if len(self._spec.workers) == 1:
            return rewritten
        made = rewritten.with_graph(keep_apart(rewritten.graph_def))
        if not strategy.HasField("mesh"):
            return made
        return made.with_graph(name_by_type(made.graph_def, "autodist/reshard/"))


def _compilation_by_yaml(xla: object) -> strategy_pb2.Compilation | None:
    """Returns what XLA compiles by the YAML's `xla`, without measurements; None: what the script requests."""
    if not isinstance(xla, bool):
        return None
    extent = strategy_pb2.Compilation.WHOLE if xla else strategy_pb2.Compilation.NOTHING
    return strategy_pb2.Compilation(computation=extent, updates=xla)


def share_names(step: CapturedStep, names: Mapping[str, str]) -> CapturedStep:
    """Sets the `shared_name` of a step's variables to the names that all steps of the session use.

    Args:
        step: the step.
        names: the session's name of each variable.
    """
    definition = tf.compat.v1.GraphDef()
    definition.CopyFrom(step.graph_def)
    by_handle = {v.handle: names[v.name] for v in step.variables}
    for node in definition.node:
        if node.name in by_handle:
            node.attr["shared_name"].s = by_handle[node.name].encode()
    return step.with_graph(definition)
