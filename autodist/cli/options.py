"""Options and arguments shared by several commands."""

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
    typer.Option(help="YAML file of the machines; overrides the script's.", exists=True, dir_okay=False),
]
Workers = Annotated[int | None, typer.Option(min=1, help="Number of workers on this machine; overrides the script's.")]
Replicas = Annotated[int | None, typer.Option(min=1, help="Replicas of each of these workers.")]


def _builders(incomplete: str) -> list[str]:
    from autodist.strategies import registered_names

    return [name for name in registered_names() if name.startswith(incomplete)]


Strategy = Annotated[
    str | None,
    typer.Option(
        metavar="BUILDER|FILE",
        help="Name of a strategy builder, or a YAML file with a section `strategy`; overrides the script's.",
        autocompletion=_builders,
    ),
]
Strategies = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        metavar="BUILDER|FILE",
        help="Name of a strategy builder, or a YAML file with a section `strategy`; overrides the script's. Repeat it "
        "to compare strategies.",
        autocompletion=_builders,
    ),
]
Join = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Address of the process with index 0. Start each process by hand, with its --index.",
    ),
]
Index = Annotated[
    int | None, typer.Option(min=0, help="Index of this process; the one with 0, the chief, also needs --workers.")
]
Nodes = Annotated[
    str | None,
    typer.Option(
        metavar="MIN:MAX",
        help="Start with MIN processes of a scheduler or more, and take in up to MAX; in place of --workers for a "
        "process with --index. Needs `checkpoint` in the YAML, or --max-restarts.",
    ),
]
MaxRestarts = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=MOST_RESTARTS,
        help="How often all workers restart from the last checkpoint after one was lost; overrides the YAML.",
    ),
]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error.")]
