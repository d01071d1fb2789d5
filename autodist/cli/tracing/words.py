"""Where a step's time goes, in a table and in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from autodist.cli.checking.tables import readable_seconds
from autodist.cli.tracing.files import Trace
from autodist.cli.tracing.shares import ANYBODY, Share
from autodist.readable import readable_bytes

_WORTH_A_WORD = 0.05
"""The part of a step from which on a worker's waiting is told."""


def table_of(step: str, shares: Sequence[Share]) -> Table:
    """A row for each worker."""
    table = Table(title=Text(f"{step}: the run that was traced, by worker"), title_justify="left")
    for head in ("worker", "took", "computing", "sending", "reading", "waiting", "rest"):
        # In a narrow terminal cells are broken, and none is left out.
        table.add_column(Text(head), justify="left" if head == "worker" else "right", overflow="fold")
    names = worker_names([share.trace for share in shares])
    for share in shares:
        parts = (share.computing, share.sending, share.reading, share.waited, share.rest)
        cells = [names[share.trace.worker], _time(share.took), *(_part(part, share.took, "\n") for part in parts)]
        table.add_row(*map(Text, cells))
    return table


def words_of(shares: Sequence[Share]) -> Iterator[str]:
    """Who waits for whom and why, what each sends, and what holds up the step."""
    names = worker_names([share.trace for share in shares])
    for share in shares:
        mine = names[share.trace.worker]
        for (whom, meanwhile), waited in sorted(share.waiting.items(), key=lambda entry: -entry[1]):
            if waited >= _WORTH_A_WORD * share.took:
                yield f"{mine} waits {_part(waited, share.took)} for {_name(whom, names)}, which {meanwhile.value}"
        if share.sent:
            sent = ", ".join(f"{readable_bytes(n)} to {_name(to, names)}" for to, n in sorted(share.sent.items()))
            yield f"{mine} sends {sent}"
    yield from _verdict(shares, names)


def alignment_of(traces: Sequence[Trace]) -> Iterator[str]:
    """How well the clocks are aligned, and which workers' traces are missing."""
    workers = {trace.worker for trace in traces}
    known = [trace.uncertainty for trace in traces if trace.worker and trace.uncertainty is not None]
    if known:
        yield f"clocks are aligned with the chief's to ± {readable_seconds(max(known))}"
    for worker in sorted({trace.worker for trace in traces if trace.uncertainty is None}):
        yield (
            f"worker {worker}'s clock was not compared with the chief's (an older AutoDist wrote its trace): its times "
            "are those of its own machine"
        )
    missing = sorted(set(range(max(trace.workers for trace in traces))) - workers)
    if missing:
        which = ", ".join(f"*.worker_{worker}.json" for worker in missing)
        yield f"not here: {which}; bring them from the folder of that name on their workers' machines"


def worker_names(traces: Sequence[Trace]) -> dict[int, str]:
    """What workers are called: with their machines, where there are several."""
    several = len({trace.machine for trace in traces}) > 1
    return {trace.worker: f"worker {trace.worker}" + (f" ({trace.machine})" if several else "") for trace in traces}


def _verdict(shares: Sequence[Share], names: Mapping[int, str]) -> Iterator[str]:
    """What most of the time goes into, and who holds up the others."""
    waited: dict[int, float] = {}
    for share in shares:
        for (whom, _), time in share.waiting.items():
            waited[whom] = waited.get(whom, 0.0) + time
    parts = {
        "computing": sum(share.computing for share in shares),
        "sending and receiving": sum(share.sending for share in shares),
        "reading data": sum(share.reading for share in shares),
        "waiting for one another": sum(waited.values()),
    }
    most = max(parts, key=lambda kind: parts[kind])
    yield f"most of all workers' time is {most}: {_part(parts[most], sum(share.took for share in shares))}"
    if most == "waiting for one another":
        whom = max(waited, key=lambda worker: waited[worker])
        yield f"held up most by {_name(whom, names)}, for which the others wait {_time(waited[whom])} together"


def _name(worker: int, names: Mapping[int, str]) -> str:
    return "another worker" if worker == ANYBODY else names.get(worker, f"worker {worker}")


def _time(microseconds: float) -> str:
    return readable_seconds(microseconds / 1e6)


def _part(part: float, whole: float, between: str = " ") -> str:
    return f"{_time(part)}{between}({part / whole:.0%})" if part else "–"
