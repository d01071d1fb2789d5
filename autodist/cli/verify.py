"""`autodist verify`: checks that a script trains under a strategy with the numbers of one device."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from autodist.cli.command_errors import output
from autodist.cli.options import Arguments, IsModule, Script, Strategy, Traceback
from autodist.cli.script import Target
from autodist.runs.cli_overrides import CliOverrides

DIFFERENT = 1
"""Exit status if the two trainings differ by more than the limit."""


def verify(
    script: Script,
    arguments: Arguments = None,
    is_module: IsModule = False,
    strategy: Strategy = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of workers, as processes on this machine.")] = 2,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas of each worker.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps to compare.")] = 10,
    traceback: Traceback = False,
) -> None:
    """Train on one device and under a strategy in local processes, and compare. Exit status 1: they differ.

    The script is not changed and needs no cluster: the machines of its YAML are ignored. Keras uses
    float64 unless the script sets a dtype; the limit for relative differences is then 1e-9. For variables of another
    dtype, the limit is ten times the difference between two runs on one device, one of which permutes the examples of
    each batch.

    The reference is the captured training step on one device. The script ends after the requested number of steps.

    Examples:

    * `autodist verify train.py`

    * `autodist verify --strategy Parallax --workers 2 --replicas 2 --steps 20 train.py --batch-size 64`
    """
    target = Target(script, is_module, arguments or [])
    target.require()
    from autodist.cli.verifying import verify_script  # imports NumPy

    with tempfile.TemporaryDirectory(prefix="autodist-verify-") as folder:
        overrides = CliOverrides(None, workers, replicas, strategy)
        verified = verify_script(target, overrides, steps, Path(folder), shows_output=traceback)
    console = output()
    console.print(verified.table())
    for line in verified.verdict():
        console.print(line, soft_wrap=True)
    if verified.differs:
        raise typer.Exit(DIFFERENT)
