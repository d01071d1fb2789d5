"""`autodist trace`: workers' traces as one file for Perfetto, and where a step's time goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autodist.cli.options import Traceback
from autodist.cli.telling import output, require_writable, write_file


def trace(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Where workers have written their traces.", exists=True, file_okay=False),
    ],
    file: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The merged file; by default FOLDER/trace.json.", dir_okay=False),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Merge the traces of all workers, and tell where a step's time goes, by worker: computing, sending, waiting for
    whom.

    A run whose environment has `AUTODIST_TRACE=FOLDER` writes what the tenth run of each step did when, a file for each
    worker, into that folder on the worker's machine; bring these files together first. Clocks of machines are aligned
    by what each worker has measured against the chief's. The merged file is for https://ui.perfetto.dev or
    `chrome://tracing`.

    Examples:

    * `AUTODIST_TRACE=traces autodist run --workers 2 train.py`

    * `autodist trace traces`

    * `autodist trace traces --output merged.json`
    """
    from autodist.cli.tracing.files import read_traces
    from autodist.cli.tracing.merge import merged
    from autodist.cli.tracing.spent import time_spent
    from autodist.cli.tracing.words import alignment_of, table_of, words_of

    target = file or folder / "trace.json"
    traces = read_traces(folder)
    require_writable(target)
    write_file(target, json.dumps(merged(traces)))
    console = output()
    for step, one in traces.items():
        times = time_spent(one)
        console.print(table_of(step, times))
        for line in words_of(times):
            console.print(line, soft_wrap=True)
    for line in alignment_of([trace for one in traces.values() for trace in one]):
        console.print(line, soft_wrap=True)
    console.print(f"{target}: all of it, for https://ui.perfetto.dev", soft_wrap=True)
