"""Place stages: each worker of a pipeline runs its own part of the step, and hands on what the others need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import tensorflow as tf

from autodist.errors import FetchedElsewhereError
from autodist.graph.names import node_of
from autodist.graph.step import Step
from autodist.graph.step_editor import StepEditor
from autodist.graph.subgraph import subgraph
from autodist.graph.waiting import wait_past
from autodist.kernels.base import Context, Kernel
from autodist.kernels.communicate.communicator import Communicator
from autodist.kernels.pipelined.execution_order import find_order, nodes_of_units, take_turns
from autodist.kernels.pipelined.recompute import recompute
from autodist.kernels.pipelined.stage_placement import StagePlacement, StageRank
from autodist.kernels.pipelined.stage_transfers import Post, parcels


@dataclass(frozen=True)
class PlaceStages(Kernel):
    """Deals out a step that is replicated as that of one worker: its micro-batches are the replicas.

    A worker keeps what its pipeline stage computes and what updates its variables. Tensors that another one reads are
    sent through queues as soon as they are there, those of a micro-batch by themselves, so that the stages work at
    different ones side by side; in which order a worker takes these up, the schedule says. As no arithmetic is changed,
    the result is, bit for bit, that of as many replicas on one worker.

    A step ends on every worker once all have updated their variables, so that what is read between two steps is new.

    Source: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS
    2019.
    """

    name: ClassVar[str] = "place-stages"

    def apply(self, item: Step, context: Context) -> Step:
        if not context.goes_through_stages(item):
            return item
        homes = StagePlacement(item, context)
        _require_fetched_by_all(homes, context)
        order, sent = find_order(homes, context), parcels(homes)
        mine = {name for name, workers in homes.runs_at.items() if context.worker in workers}
        editor = StepEditor(item)
        nodes = nodes_of_units(homes, order[context.worker])
        turns = take_turns(editor, homes, nodes)
        Post(editor, homes, context).exchange(sent)
        anew = recompute(editor, homes.graph_index, nodes, turns) if context.plan.recomputes else {}
        _hand_out_tokens(editor, homes, context)
        editor.drop_targets([name for name in editor.targets if name in homes.runs_at and name not in mine])
        made = set(editor.names) - item.graph_index.nodes.keys()
        wait_past(editor, mine | made)
        return _for_their_micro_batches(editor.to_item(), anew)


def _for_their_micro_batches(item: Step, originals: Mapping[str, str]) -> Step:
    """The step in which a copy is known to be for the micro-batch that its original is for."""
    replication = item.replication
    if replication is None or not originals:
        return item
    made = {copy: item.replica_of(name) for copy, name in originals.items()}
    anew = {copy: replace(item.pipeline_parts[own], is_anew=True) for copy, (_, own) in made.items()}
    return replace(
        item,
        replication=replace(replication, copies={**replication.copies, **made}),
        pipeline_parts={**item.pipeline_parts, **anew},
    )


def _require_fetched_by_all(homes: StagePlacement, context: Context) -> None:
    """Passes if nothing that one pipeline stage has is fetched where workers may fetch different things."""
    if context.joins_outputs:
        return
    for name in homes.item.outputs:
        if isinstance(homes.home[node_of(name)], StageRank):
            raise FetchedElsewhereError(
                f"{name} is computed by the stages of a pipeline, one after the other, and not all workers fetch it in "
                "this run. Fetch it on every worker alike, and not under `if ad.is_chief`."
            )


def _hand_out_tokens(editor: StepEditor, homes: StagePlacement, context: Context) -> None:
    """Each worker tells the others that its variables are written."""
    writes: dict[int, list[str]] = {}
    for name, effect in homes.graph_index.effects.items():
        stages = {homes.stage_of[h] for h in effect.writes if h in homes.stage_of}
        if name in homes.needed and stages:
            writes.setdefault(stages.pop(), []).append(name)
    for stage, names in sorted(writes.items()):
        for writer in context.plan.seats[stage]:
            _hand_out_token(editor, names, context, writer)


def _hand_out_token(editor: StepEditor, names: Sequence[str], context: Context, writer: int) -> None:
    """A worker tells those that may read or set its variables once `names` have written them."""
    readers = [reader for reader in range(context.workers) if _touches(context, reader, writer)]
    if context.worker not in (writer, *readers):
        return
    with subgraph(editor, f"pipeline/token/{writer}") as f, tf.device(context.cpu(context.worker)):
        exchange = Communicator(f, context, f"pipeline/token/{writer}")
        done = tf.constant(True)
        if writer == context.worker:
            for reader in readers:
                exchange.send(reader, "done", [done], [f.after(names)])
        else:
            exchange.receive(writer, "done", [done])
    editor.run(exchange.effects)


def _touches(context: Context, reader: int, writer: int) -> bool:
    """Whether a worker reads or sets between steps what another one holds.

    The chief sets what all hold; of those who hold the same, all read at the first, and a step at that of its pipeline.
    """
    if reader == writer:
        return False
    pipelines = [next(w.index(one) for w in context.plan.seats if one in w) for one in (reader, writer)]
    return reader == 0 or pipelines[1] in (0, pipelines[0])
