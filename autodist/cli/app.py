"""The Typer application: its name, its version, and its commands in the order of `--help`."""

from __future__ import annotations

from typing import Annotated

import typer

from autodist.cli.check import check
from autodist.cli.command_errors import report_errors
from autodist.cli.plan import diff, plan
from autodist.cli.report import report
from autodist.cli.run import run
from autodist.cli.top import top
from autodist.cli.trace import trace
from autodist.cli.verify import verify
from autodist.versions import VERSION

# All arguments after a script, or after the module of -m, belong to the script.
_BEFORE_A_SCRIPT = {"allow_interspersed_args": False}

app = typer.Typer(
    name="autodist",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@report_errors
def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"autodist {VERSION}")
        raise typer.Exit


@app.callback()
def autodist(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Train a TensorFlow script written for one device on many devices and many machines.

    Examples:

    * `autodist run --workers 2 train.py` trains on two workers on this machine

    * `autodist plan --workers 2 train.py` shows the cost of each variable, and starts nothing

    * `autodist plan --workers 2 --strategy PS --strategy Parallax train.py` compares two strategies

    * `autodist check cluster.yml train.py` checks that every machine is ready to train

    * `autodist verify train.py` checks that two workers train the same model as one device

    * `autodist trace FOLDER` shows how a step spends its time

    * `autodist top FOLDER` shows step times and workers of a run while it trains

    * `autodist report FOLDER` makes a page of a run's step times and workers

    * `autodist COMMAND --help` shows examples of each command
    """


app.command(context_settings=_BEFORE_A_SCRIPT)(report_errors(run))
app.command()(report_errors(check))
app.command(context_settings=_BEFORE_A_SCRIPT)(report_errors(plan))
app.command()(report_errors(diff))
app.command(context_settings=_BEFORE_A_SCRIPT)(report_errors(verify))
app.command()(report_errors(trace))
app.command()(report_errors(top))
app.command()(report_errors(report))


def main() -> None:
    """Runs the command and exits with its status."""
    app(prog_name="autodist")
