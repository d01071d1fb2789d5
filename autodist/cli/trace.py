"""`autodist trace`: merges the workers' traces into one file for Perfetto, and shows how a step spends its time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autodist.cli.command_errors import output, require_writable, write_file
from autodist.cli.options import Traceback


def trace(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Folder with the workers' traces.", exists=True, file_okay=False),
    ],
    file: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The merged file (default: FOLDER/trace.json).", dir_okay=False),
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Merge the traces of all workers, and show how each worker spends a step.

    A worker computes, sends or receives, reads data, or waits for another worker. If `Auto` chose the strategy, its
    prediction stands beside the traced times. A run with `AUTODIST_TRACE=FOLDER` in its environment traces the tenth
    run of each step. Each worker writes one file into that folder on its own machine; copy these files into one folder
    first. The clocks of the machines are aligned with the chief's. Open the merged file in https://ui.perfetto.dev or
    `chrome://tracing`.

    Examples:

    * `AUTODIST_TRACE=traces autodist run --workers 2 train.py`

    * `autodist trace traces`

    * `autodist trace traces --output merged.json`
    """
    from autodist.cli.tracing.files import read_traces
    from autodist.cli.tracing.spent import time_spent
    from autodist.cli.tracing.summary import alignment_lines, merged, prediction_table, summary_lines, table_of

    target = file or folder / "trace.json"
    traces = read_traces(folder)
    require_writable(target)
    write_file(target, json.dumps(merged(traces)))
    console = output()
    for step, one in traces.items():
        times = time_spent(one)
        console.print(table_of(step, times))
        if (compared := prediction_table(step, times)) is not None:
            console.print(compared)
        for line in summary_lines(times):
            console.print(line, soft_wrap=True)
    for line in alignment_lines([trace for one in traces.values() for trace in one]):
        console.print(line, soft_wrap=True)
    console.print(f"{target}: the merged trace, for https://ui.perfetto.dev", soft_wrap=True)
