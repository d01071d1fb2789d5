"""Rewrites stored steps as a run would, for every worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache

from google.protobuf import text_format

from autodist.errors import FetchedElsewhereError
from autodist.graph.parts import PendingReduction
from autodist.graph.step import CapturedStep, ReplicatedStep, Step
from autodist.graph.step_text import text_of_step
from autodist.kernels import Context, Fetching, find_holders, rewrite
from autodist.kernels.normalise.reduce_before_postprocessing import ReduceBeforePostprocessing
from autodist.kernels.rows.rewrite_rows import RULES
from autodist.placement.group import Group, worker_count
from autodist.placement.holder import Holder
from autodist.proto import strategy_pb2
from autodist.resources import ResourceSpec
from autodist.strategies import (
    arranged,
    call_builder,
    check_strategy,
    chosen_builder,
    find_mesh,
    graph_config,
    resolve_specs,
)
from tests.replay.cases import CLUSTERS, STRATEGIES, Case
from tests.replay.stored import PIPELINES, StoredStep
from tests.transfers.graphs import Transfers
from tests.transfers.steps import transfers_of
from tests.unit.kernels.in_one_process import rewritten_by
from tests.unit.kernels.without_stacks import without_stacks


@dataclass(frozen=True)
class Replayed:
    """A rewritten case.

    Attributes:
        text: of the strategy and of each worker's step.
        strategy: the built strategy.
        changed_by: the kernels, and the rules for rows, that changed the step of a worker.
        reductions: recorded by kernels.
        transfers: between the workers.
    """

    text: str
    strategy: strategy_pb2.Strategy
    changed_by: frozenset[str]
    reductions: tuple[PendingReduction, ...]
    transfers: Transfers


load = cache(StoredStep.load)
"""Kernels leave the captured step as it is, so one serves all cases."""


@cache
def replay(case: Case) -> Replayed:
    """Rewrites a case for each worker."""
    step, captured, strategy = _planned(case)
    watch = _Watch()
    workers = len(machines(case.cluster).workers)
    text = _text_of_strategy(strategy)
    steps = []
    for worker in range(workers):
        with without_stacks():
            steps.append(_rewrite(step, captured, _context(step, strategy, worker), watch))
        text += f"worker {worker}\n" + text_of_step(steps[-1], captured)
    return Replayed(text, strategy, frozenset(watch.changed_by), tuple(watch.reductions), transfers_of([steps]))


def rewritten(case: Case) -> list[Step]:
    """Returns the step of each worker, whose kernels up to Replicate run once."""
    step, captured, strategy = _planned(case)
    workers = range(len(machines(case.cluster).workers))
    return rewritten_by(captured, [_context(step, strategy, worker) for worker in workers], PIPELINES[step.pipeline])


def _context(step: StoredStep, strategy: strategy_pb2.Strategy, worker: int) -> Context:
    return Context(strategy, worker, Fetching.BY_ALL if step.reduces_outputs else Fetching.BY_EACH)


def _planned(case: Case) -> tuple[StoredStep, Step, strategy_pb2.Strategy]:
    """Returns a case's step, its part to rewrite, and the strategy."""
    step, spec = load(case.step), machines(case.cluster)
    planned = load(step.planned_by).step if step.planned_by else step.step
    strategy = build(planned, case.strategy, spec)
    if step.planned_by and len(spec.workers) > 1:
        return step, _placed_as(planned, step.step, strategy), strategy
    return step, step.step, strategy


@cache
def machines(cluster: str) -> ResourceSpec:
    """Returns nodes that are never contacted."""
    nodes = [{"address": f"10.0.0.{k + 1}", "chief": not k, **said} for k, said in enumerate(CLUSTERS[cluster])]
    return ResourceSpec.from_dict({"nodes": nodes})


def build(step: Step, strategy: str, spec: ResourceSpec) -> strategy_pb2.Strategy:
    """Builds the strategy as a run does: a step without gradients needs no plan."""
    if not step.gradients:
        return resolve_specs(strategy_pb2.Strategy(builder="none", graph_config=graph_config(spec)), step, spec)
    builder = chosen_builder(STRATEGIES[strategy], None)
    if find_mesh(builder) is not None:
        spec = arranged(builder, spec)
    built = call_builder(builder, step, spec)
    check_strategy(built, step, spec)
    return resolve_specs(built, step, spec)


def _placed_as(planned: CapturedStep, step: CapturedStep, strategy: strategy_pb2.Strategy) -> CapturedStep:
    """Returns the item with the holders of another plan, which has other names for the variables."""
    shared = {name: planned.by_name[name].handle for name in planned.by_name}
    holders = find_holders(planned, strategy)
    known = {_shared_name(planned, handle): holders[name] for name, handle in shared.items()}
    everyone = Group.all_workers(worker_count(strategy.graph_config))
    return replace(
        step,
        holders={
            v.name: known.get(_shared_name(step, v.handle), Holder.whole(v.shape, everyone)) for v in step.variables
        },
    )


def _shared_name(step: Step, handle: str) -> bytes:
    return step.graph_index.nodes[handle].attr["shared_name"].s


def _rewrite(step: StoredStep, captured: Step, context: Context, watch: _Watch) -> Step:
    """Rewrites a step as a session does: another worker's fetch is sent only if all workers fetch it."""
    kernels = PIPELINES[step.pipeline]
    try:
        return rewrite(captured, context, kernels=kernels, also=watch)
    except FetchedElsewhereError:
        by_all = Context(context.strategy, context.worker, Fetching.BY_ALL)
        return rewrite(captured, by_all, kernels=kernels, also=watch)


@dataclass
class _Watch:
    """Records the kernels and row rules that change a step."""

    changed_by: set[str] = field(default_factory=set)
    reductions: list[PendingReduction] = field(default_factory=list)
    _last: Mapping[str, object] = field(default_factory=dict)
    _last_reductions: tuple[PendingReduction, ...] = ()

    def __call__(self, kernel: str, step: Step) -> None:
        now = {one.name: getattr(step, one.name) for one in fields(step) if one.compare}
        # A later phase has more fields; they are empty unless the kernel sets them.
        changed = any(value != self._last.get(name) and (value or name in self._last) for name, value in now.items())
        if kernel != "captured" and changed:
            self.changed_by.add(kernel)
        if kernel == ReduceBeforePostprocessing.name:
            self._try_rules(step)
        reductions = step.reductions if isinstance(step, ReplicatedStep) else ()
        if reductions != self._last_reductions:
            self.reductions.extend(reductions)
        self._last, self._last_reductions = now, reductions

    def _try_rules(self, step: Step) -> None:
        for rule in RULES:  # one after the other, as the kernel that follows applies them
            before, step = step, rule.apply(step, Context(strategy_pb2.Strategy(), 0))
            if step is not before:
                self.changed_by.add(rule.name)


def _text_of_strategy(strategy: strategy_pb2.Strategy) -> str:
    shown = (f"  {line}\n" for line in text_format.MessageToString(strategy).splitlines())
    return "strategy\n" + "".join(shown)
