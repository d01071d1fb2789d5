"""`autodist top`: shows the metrics of a run while it trains, on this machine or over SSH."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from autodist.cli.command_errors import output
from autodist.cli.options import Traceback

MOST_LINES = 2000
"""Lines that are kept; older ones are not shown."""


def top(
    place: Annotated[
        str | None,
        typer.Argument(
            metavar="[[USER@]HOST:]FOLDER",
            help="The `folder` of `metrics` (default: that of the only run on this machine).",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="YAML file of the run, for its chief and its folder.", exists=True, dir_okay=False),
    ] = None,
    is_once: Annotated[bool, typer.Option("--once", help="Show the current figures, and end.")] = False,
    traceback: Traceback = False,
) -> None:
    """Show the step times, the examples per second and the workers of a run while it trains; Ctrl-C ends it.

    A run writes its metrics if its YAML file has a section such as `metrics: {folder: metrics}`. The view reads the
    files in that folder, here or on another machine over SSH, where AutoDist has to be installed too. If standard
    output is no terminal, the current figures are shown once.

    Examples:

    * `autodist top` shows the only run on this machine

    * `autodist top metrics`

    * `autodist top ubuntu@10.0.0.1:/home/ubuntu/metrics`

    * `autodist top --cluster cluster.yml`
    """
    import rich.live

    from autodist.cli.metrics.history import History
    from autodist.cli.metrics.live import view_of
    from autodist.cli.metrics.sources import source_of

    history, console = History(), output()
    with source_of(place, cluster) as source:

        def update() -> None:
            history.add(source.read())
            del history.lines[:-MOST_LINES]

        update()
        if is_once or not sys.stdout.isatty():
            console.print(view_of(history, source.title))
            return
        with rich.live.Live(view_of(history, source.title), console=console, auto_refresh=False) as live:
            try:
                while True:
                    update()
                    live.update(view_of(history, source.title), refresh=True)
            except KeyboardInterrupt:
                return
