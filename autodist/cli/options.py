"""Options and arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autodist.resources import MOST_RESTARTS

Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="The training script; with -m, a module.")]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="The script's own arguments.")]
IsModule = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module, as for `python -m`.")]
Cluster = Annotated[
    Path | None,
    typer.Option(help="YAML file of the machines, in place of the script's.", exists=True, dir_okay=False),
]
Workers = Annotated[int | None, typer.Option(min=1, help="So many workers on this machine, in place of the script's.")]
Replicas = Annotated[int | None, typer.Option(min=1, help="Replicas of each of these workers.")]


def _builders(incomplete: str) -> list[str]:
    from autodist.strategies import registered_names

    return [name for name in registered_names() if name.startswith(incomplete)]


Strategy = Annotated[
    str | None,
    typer.Option(
        metavar="BUILDER|FILE",
        help="A builder's name, or a YAML file with a section `strategy`; else the script's.",
        autocompletion=_builders,
    ),
]
Strategies = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        metavar="BUILDER|FILE",
        help="A builder's name, or a YAML file with a section `strategy`; else the script's. Twice or more: side by "
        "side.",
        autocompletion=_builders,
    ),
]
PendingReduction = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where the process with index 0 runs: each process is started by hand, with its --index.",
    ),
]
Index = Annotated[
    int | None, typer.Option(min=0, help="Of this process; the one with 0, the chief, is told --workers, too.")
]
MaxRestarts = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=MOST_RESTARTS,
        help="So often all workers start again, from the last checkpoint, when one was lost; else as the YAML says.",
    ),
]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")]
