"""`autodist verify`: whether a script trains under a strategy as it does on one device."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from autodist.cli.options import Arguments, IsModule, Script, Strategy, Traceback
from autodist.cli.script import Target
from autodist.cli.telling import output
from autodist.runs.cli_overrides import CliOverrides

DIFFERENT = 1
"""Exit status where the two trainings lie further apart than is promised."""


def verify(
    script: Script,
    arguments: Arguments = None,
    is_module: IsModule = False,
    strategy: Strategy = None,
    workers: Annotated[int, typer.Option(min=1, help="So many workers, processes on this machine.")] = 2,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas of each worker.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Training steps that are compared.")] = 10,
    traceback: Traceback = False,
) -> None:
    """Train on one device and under a strategy in local processes, and compare. Exit status 1: they differ.

    The script stays as it is, and needs no cluster: its machines are left aside. Keras makes everything in float64 that
    the script gives no type; the largest relative difference that is promised then is 1e-9. Where variables have
    another type, it is ten times what one device differs from itself when the examples of each batch are permuted.

    The reference is the training step as it was captured, which one device runs; the script ends after so many steps.

    Examples:

    * `autodist verify train.py`

    * `autodist verify --strategy Parallax --workers 2 --replicas 2 --steps 20 train.py --batch-size 64`
    """
    target = Target(script, is_module, arguments or [])
    target.require()
    from autodist.cli.verifying import verify_script  # and NumPy

    with tempfile.TemporaryDirectory(prefix="autodist-verify-") as folder:
        asked = CliOverrides(None, workers, replicas, strategy)
        verified = verify_script(target, asked, steps, Path(folder), shows_output=traceback)
    console = output()
    console.print(verified.table())
    for line in verified.words():
        console.print(line, soft_wrap=True)
    if verified.is_past_the_promise:
        raise typer.Exit(DIFFERENT)
