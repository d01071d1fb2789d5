"""Assigns variables to pipeline stages: by patterns, by the script's `ad.stage`, or balanced."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise

from autodist.logs.formatting import listed
from autodist.options.fields import OptionError
from autodist.strategies.variables import GraphLike, SyncedVariable

Stages = tuple[tuple[str, ...], ...]
"""For each pipeline stage, patterns of variables' names."""

LayerFlops = Callable[[Sequence[Sequence[str]]], Sequence[int] | None]
"""Returns the forward and backward FLOPs of layers from the names of the variables of each; None: not known."""


def stages_of_variables(
    variables: Sequence[SyncedVariable], stages: Stages | None, count: int, flops_of: LayerFlops = lambda layers: None
) -> dict[str, int]:
    """Returns the stage of each variable.

    Args:
        variables: the variables in order of creation.
        stages: patterns; None: the script sets the stage of each, or of none; then the stages are balanced.
        count: number of stages.
        flops_of: used for balancing; if it returns None, bytes are balanced.

    Raises:
        StrategyError: a variable is in no stage or in two, a stage has no variable, or a pattern is invalid.
    """
    marked = {variable.name: variable.stage for variable in variables if variable.stage is not None}
    for name, stage in marked.items():
        if stage >= count:
            raise OptionError(
                "stages",
                f"{name} is made in ad.stage({stage}), and Pipeline has {count} stages; the last is stage "
                f"{count - 1}. Create it in one of these, or use more stages and workers.",
            )
    if stages is not None:
        found = _matched(variables, stages, marked)
    elif marked:
        found = _as_marked(variables, marked)
    else:
        return _balanced(variables, count, flops_of)
    for stage in range(count):
        if stage not in found.values():
            raise OptionError("stages", _empty(stage, stages is not None, bool(marked)))
    return found


def _as_marked(variables: Sequence[SyncedVariable], marked: Mapping[str, int]) -> dict[str, int]:
    without = [variable.name for variable in variables if variable.name not in marked]
    if without:
        raise OptionError(
            "stages",
            f"{listed(without)} {'is' if len(without) == 1 else 'are'} in no stage of the Pipeline, while "
            f"{next(iter(marked))} is made in ad.stage({next(iter(marked.values()))}): create these in a stage, too, "
            "or add a pattern for them to `stages`.",
        )
    return dict(marked)


def _empty(stage: int, has_patterns: bool, has_marks: bool) -> str:
    if not has_patterns:
        return (
            f"stage {stage} has no variable: none is made in ad.stage({stage}). Create some there, or use fewer stages."
        )
    made = f", and none is made in ad.stage({stage})" if has_marks else ""
    return (
        f"stage {stage} has no variable that an earlier stage has not matched before{made}. Leave it out, or make the "
        "earlier patterns narrower."
    )


def _matched(variables: Sequence[SyncedVariable], stages: Stages, marked: Mapping[str, int]) -> dict[str, int]:
    """Returns the stage of each variable: that of the first pattern that matches its name, or of its `ad.stage` mark.

    Raises:
        StrategyError: a pattern is invalid, matches nothing or contradicts a mark, or a variable is in no stage.
    """
    patterns = [(stage, pattern, _compiled(pattern)) for stage, texts in enumerate(stages) for pattern in texts]
    found: dict[str, int] = {}
    for variable in variables:
        mark = marked.get(variable.name)
        first = next(((s, pattern) for s, pattern, known in patterns if known.fullmatch(variable.name)), None)
        if first is None and mark is None:
            raise OptionError(
                "stages", f"{variable.name} is in no stage of the Pipeline: none of its patterns matches it. Add one."
            )
        if first is not None and mark is not None and first[0] != mark:
            raise OptionError(
                "stages",
                f"{variable.name} is made in ad.stage({mark}), but the pattern {first[1]!r} puts it into stage "
                f"{first[0]}. Leave one of them out, or make both agree.",
            )
        found[variable.name] = first[0] if first is not None else marked[variable.name]
    for stage, pattern, known in patterns:
        if not any(known.fullmatch(variable.name) for variable in variables):
            raise OptionError(
                "stages",
                f"the pattern {pattern!r} of stage {stage} matches no variable that is trained; the trained ones are "
                f"{listed(variable.name for variable in variables)}.",
            )
    return found


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise OptionError("stages", f"the pattern {pattern!r} is no regular expression: {error}.") from error


def _balanced(variables: Sequence[SyncedVariable], count: int, flops_of: LayerFlops) -> dict[str, int]:
    """Splits the variables into consecutive runs that minimise the largest FLOPs, then the largest bytes.

    Variables of one layer, which share a name scope, stay together if there are at least as many layers as stages.

    Raises:
        StrategyError: there are fewer variables than stages.
    """
    if len(variables) < count:
        raise OptionError(
            "stages",
            f"Pipeline has {count} stages for {len(variables)} trained variables, and a stage without variables "
            "computes nothing. Use fewer stages, and as many workers.",
        )
    layers = [list(group) for _, group in groupby(variables, lambda variable: variable.name.rpartition("/")[0])]
    groups = layers if len(layers) >= count else [[variable] for variable in variables]
    flops = flops_of([[variable.name for variable in group] for group in groups])
    sizes = [sum(variable.byte_size for variable in group) for group in groups]
    cuts = balanced_cuts(flops or [0] * len(groups), sizes, count)
    return {
        variable.name: stage
        for stage, (start, end) in enumerate(pairwise(cuts))
        for group in groups[start:end]
        for variable in group
    }


def flops_in(graph_item: GraphLike) -> LayerFlops:
    """Returns a function that computes the FLOPs of layers of a captured step; it returns None without a graph."""

    def flops_of(layers: Sequence[Sequence[str]]) -> Sequence[int] | None:
        # Imports TensorFlow only if there is a graph, which TensorFlow has created.
        from autodist.graph.layer_flops import layer_flops
        from autodist.graph.step import CapturedStep

        return layer_flops(graph_item, layers) if isinstance(graph_item, CapturedStep) else None

    return flops_of


def balanced_cuts(work: Sequence[int], sizes: Sequence[int], count: int) -> list[int]:
    """Returns the starts of `count` runs of layers, and the end of the last one, such that the largest run is minimal.

    The largest work counts first, and among all splits with the least work, the largest size. Both limits of a run are
    found by bisection: layers fill run after run, which shows if `count` runs suffice.

    Args:
        work: the FLOPs of each layer.
        sizes: the bytes of each layer.
        count: the number of runs, all non-empty; at most the number of layers.
    """
    most_work = _least(work, lambda most: _filled(work, sizes, most, sum(sizes), count) is not None)
    most_size = _least(sizes, lambda most: _filled(work, sizes, most_work, most, count) is not None)
    cuts = _filled(work, sizes, most_work, most_size, count)
    assert cuts is not None, "these limits have been tried"
    return cuts


def _least(of_layers: Sequence[int], is_enough: Callable[[int], bool]) -> int:
    """Returns the least sufficient limit of a run, by bisection."""
    return bisect.bisect_left(range(sum(of_layers)), True, key=is_enough)


def _filled(work: Sequence[int], sizes: Sequence[int], most_work: int, most_size: int, count: int) -> list[int] | None:
    """Splits into runs within these limits; None if that is impossible."""
    cuts, run_work, run_size = [0], 0, 0
    for position, (more_work, more_size) in enumerate(zip(work, sizes, strict=True)):
        run_work, run_size = run_work + more_work, run_size + more_size
        are_left = len(work) - position == count - len(cuts)  # each of the last layers is a run
        if position and (are_left or run_work > most_work or run_size > most_size):
            cuts.append(position)
            run_work, run_size = more_work, more_size
        if len(cuts) > count or run_work > most_work or run_size > most_size:
            return None
    return [*cuts, len(work)]
