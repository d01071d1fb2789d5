"""Measures the speed and size of AutoDist against TensorFlow's own strategies, and against the script alone.

    python scripts/bench.py                                 # everything; some fifteen minutes on two cores
    python scripts/bench.py --only mirrored --model mlp
    python scripts/bench.py --only links                    # slow links, which are not part of everything; 20 minutes
    python scripts/bench.py --only encryption               # the part of it that compares `encrypt: ssh` with none
    python scripts/bench.py --only frameworks               # JAX and PyTorch in environments of their own; half an hour
    python scripts/bench.py --only recovery --image 32      # the loss of a worker; with small images, 5 minutes
    python scripts/bench.py --only auto                     # the choices of Auto, against all builders; two hours
    python scripts/bench.py --only paper --json paper.json  # keeps the results, for scripts/plots.py

Both sides of a ratio run at the same time and alternate, so that other load on the machine affects both equally: the
peer, AutoDist, AutoDist on one device, the peer, …, each for some steps. The first steps of each turn are not counted.

The floor is the ratio measured when it was set, on two cores; no change may fall behind it. The limit is the least time
that a step can take: AutoDist's step on one device, plus the time to transfer the same bytes between as many processes
that do nothing else. This is not a test: a missed floor is reported, and the exit status is 1 only if something did not
run.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import rich.console
import rich.table

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # for the SSH servers of the tests

from bench.auto import cells, compare_auto
from bench.calls import compare_calls
from bench.checkpoints import compare_checkpoints
from bench.comparisons import GOAL, Result, compare, comparisons
from bench.encryption import compare_encryption, encryptions
from bench.first_step import compare_first_step
from bench.growth import compare_giving, compare_planning, compare_reading, compare_rewriting_growth, compare_steps
from bench.jobs import JobError, Length
from bench.links import compare_link, compare_relay, links
from bench.machine import made_with
from bench.memory import MODELS as MEMORY_MODELS
from bench.memory import compare_memory
from bench.on_paper import compare_on_paper
from bench.recovery import MODELS as RECOVERY_MODELS
from bench.recovery import compare_recovery
from bench.rewriting import compare_rewriting

GROUPS = {
    "mirrored": "MirroredStrategy, 2 replicas",
    "mwms": "MultiWorkerMirroredStrategy, 2 workers",
    "ps": "ParameterServerStrategy, 2 workers",
    "evaluate": "one device with a worker's cores, 2 workers",
    "alone": "the script alone, 1 replica",
    "fsdp": "AllReduce, 2 workers",
    "mesh": "DTensor, or AllReduce, 4 places",
    "calls": "the script alone, processor time a call",
    "first-step": "one device, from the start of the script",
    "rewrite": "rewriting",
    "memory": "the script alone, peak memory",
    "checkpoint": "the disk itself, or a step without a save",
    "recovery": "the first start of the same run",
    "growth": "the most it may take, or one of two workers",
    "paper": "two workers, on paper",
    "links": "MultiWorkerMirroredStrategy, 2 workers, a slow link",
    "encryption": "the same without `encrypt`, 2 or 3 workers",
    "frameworks": "Keras on JAX, or PyTorch",
    "auto": "the best of the reference plans, or the measured time",
}
ON_REQUEST = ("links", "encryption", "frameworks", "auto", "recovery")
"""Groups that are not part of everything."""
WARMUP, SETTLING = 5, 2
TABLE_WIDTH = 200
REPEATED = 1
"""Number of times that a step is rewritten for each cluster and builder of "growth": once takes minutes."""
LIMIT = 600.0
"""Time limit in seconds for the two sides of one ratio."""


@dataclass(frozen=True)
class Measurement:
    """A deferred measurement of one or more lines of the table."""

    name: str
    measure: Callable[[], list[Result]]


def main() -> int:
    arguments = _arguments()
    # On SIGTERM, it still ends the processes that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    console = rich.console.Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    results: list[Result] = []
    failed = False
    for measurement in _measurements(arguments):
        console.print(f"[dim]{measurement.name}, load average {os.getloadavg()[0]:.1f}[/dim]")
        try:
            for result in measurement.measure():
                console.print(
                    f"{result.what}: {result.ours} against {result.peer}, {result.ratio:.3f}", highlight=False
                )
                results.append(result)
        except JobError as error:
            console.print(f"error: {error}", style="red", markup=False)
            failed = True
    console.print(_table(results))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"made": made_with(), "results": [asdict(r) for r in results]}, indent=1) + "\n"
        )
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=GROUPS, action="append", help="a group of ratios; may be repeated")
    parser.add_argument("--model", action="append", help="a model; may be repeated")
    parser.add_argument("--steps", type=int, default=10, help="steps timed in a turn (default 10)")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each side (default 5)")
    parser.add_argument("--image", type=int, default=96, help="width of ResNet50's images in recovery (default 96)")
    parser.add_argument(
        "--json", type=pathlib.Path, help="a file for the results and the conditions of the measurement"
    )
    return parser.parse_args()


def _measurements(arguments: argparse.Namespace) -> Iterator[Measurement]:
    length = Length(WARMUP, arguments.repeat, arguments.steps, SETTLING, LIMIT)
    for one in comparisons():
        if _is_selected(arguments, one.group, one.ours.model):
            yield Measurement(f"{one.ours} and {one.peer}", lambda one=one: [compare(one, length)])
    single: tuple[tuple[str, str, str, Callable[[], list[Result]]], ...] = (
        ("first-step", "resnet50", "resnet50: first step", lambda: [compare_first_step(arguments.repeat)]),
        ("rewrite", "resnet50", "resnet50: rewriting", lambda: compare_rewriting(arguments.repeat)),
        ("calls", "tiny", "tiny: calls", compare_calls),
        ("checkpoint", "tables", "tables: checkpoints of 2 GB", compare_checkpoints),
        ("growth", "planning", "planning for many workers", compare_planning),
        (
            "growth", "resnet50", "resnet50: rewriting for one of many workers",
            lambda: compare_rewriting_growth(REPEATED),
        ),
        ("growth", "steps", "steps of many workers", compare_steps),
        ("growth", "data", "data for one of many workers", compare_reading),
        ("growth", "values", "values for many workers", compare_giving),
        ("paper", "paper", "communication on paper", compare_on_paper),
    )  # fmt: skip
    for group, model, name, measure in single:
        if _is_selected(arguments, group, model):
            yield Measurement(name, measure)
    for model in RECOVERY_MODELS:
        if _is_selected(arguments, "recovery", model):
            recovery = partial(compare_recovery, model, arguments.repeat, arguments.image)
            yield Measurement(f"{model}: recovery", lambda recovery=recovery: [recovery()])
    yield from _over_links(arguments, length)
    for cell in cells():
        if _is_selected(arguments, "auto", cell.model):
            yield Measurement(f"Auto: {cell}", lambda cell=cell: compare_auto(cell, length))
    for model in MEMORY_MODELS:
        if _is_selected(arguments, "memory", model):
            yield Measurement(f"{model}: memory", lambda model=model: [compare_memory(model, length)])


def _over_links(arguments: argparse.Namespace, length: Length) -> Iterator[Measurement]:
    """Yields the measurements of "links", which include those of "encryption"."""
    if _is_selected(arguments, "links", "relay"):
        yield Measurement("relay: a socket", compare_relay)
    for link in links():
        if _is_selected(arguments, "links", link.model):
            yield Measurement(f"{link.model}: a link of {link}", partial(compare_link, link, length))
    for case in encryptions():
        if any(_is_selected(arguments, group, case.model) for group in ("links", "encryption")):
            yield Measurement(f"encrypt: ssh, {case}", partial(compare_encryption, case, length))


def _is_selected(arguments: argparse.Namespace, group: str, model: str) -> bool:
    is_chosen = group in arguments.only if arguments.only else group not in ON_REQUEST
    return is_chosen and (not arguments.model or model in arguments.model)


def _table(results: Sequence[Result]) -> rich.table.Table:
    columns = ("against", "what", "AutoDist", "the other", "ratio", "floor", "holds")
    table = rich.table.Table(*columns, "limit", f"of the limit (goal {GOAL})", "note")
    for r in results:
        holds = "yes" if r.ratio <= r.floor else "[bold]no[/bold]"
        of_limit = "" if r.of_limit is None else f"{r.of_limit:.2f}"
        if r.of_limit is not None and r.of_limit > GOAL:
            of_limit = f"[bold]{of_limit}[/bold]"
        name = GROUPS[r.group]
        table.add_row(
            name, r.what, r.ours, r.peer, f"{r.ratio:.3f}", f"{r.floor:.3f}", holds, r.limit, of_limit, r.note
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
