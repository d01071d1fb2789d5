"""`autodist report`: makes a page of the metrics of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autodist.cli.command_errors import UsageError, output, require_writable, write_file
from autodist.cli.options import Traceback
from autodist.logs.formatting import counted


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The `folder` of `metrics`.", exists=True, file_okay=False)
    ],
    file: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page (default: FOLDER/report.html).", dir_okay=False)
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Make a page of a run: its step times, the time of each worker, the prediction, the restarts and the plan.

    The run has written its metrics, as `metrics: {folder: FOLDER}` in its YAML file requests. The page works offline.

    Examples:

    * `autodist report metrics`

    * `autodist report metrics --output run.html`
    """
    from autodist.cli.metrics.follow import FollowedFolder
    from autodist.cli.metrics.history import History
    from autodist.cli.metrics.page import page_of

    target = file or folder / "report.html"
    history = History()
    history.add(FollowedFolder(folder).read(), str(folder))
    if not history.lines:
        raise UsageError(
            f"{folder} has no metrics. `metrics: {{folder: {folder}}}` in the YAML file makes a run write them there."
        )
    require_writable(target)
    write_file(target, page_of(history))
    lines = counted(len(history.lines), "line")
    output().print(f"{target}: {lines}, up to step {history.lines[-1].step}", soft_wrap=True)
