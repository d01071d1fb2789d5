"""The IPython magic `%%autodist`, loaded by `%load_ext autodist`: runs a cell on several workers."""

from __future__ import annotations

import argparse
import itertools
import linecache
import shlex
from collections.abc import Mapping
from typing import Any, NoReturn

from autodist.errors import LaunchError
from autodist.notebook.launch import launch

_count = itertools.count(1)


def load_ipython_extension(ipython: Any) -> None:
    """Registers the magic `%%autodist`; called by `%load_ext autodist`."""
    ipython.register_magic_function(_Magic(ipython), "cell", "autodist")


class _Magic:
    """Runs a cell as a script on every worker; `ad` is the AutoDist.

    Args:
        ipython: the shell with the notebook's variables.
    """

    def __init__(self, ipython: Any) -> None:
        self._ipython = ipython

    def __call__(self, line: str, cell: str) -> None:
        options = read_options(line)
        names = self._ipython.user_ns
        missing = [name for name in options.ins if name not in names]
        if missing:
            raise LaunchError(
                f"--in names {', '.join(missing)}, which does not exist in this notebook; define it, or leave it out."
            )
        file = f"<autodist-cell-{next(_count)}>"
        try:
            compile(cell, file, "exec", dont_inherit=True)
        except SyntaxError:
            # The traceback of the error shows the source of the cell.
            linecache.cache[file] = (len(cell), None, cell.splitlines(keepends=True), file)
            raise
        known = {name: names[name] for name in options.ins}
        others = frozenset(name for name in names if not name.startswith("_")) - known.keys()
        where = {name: getattr(options, name) for name in ("cluster", "strategy", "workers", "replicas")}
        names.update(launch(run_cell, cell, file, known, tuple(options.outs), others, **where))


def read_options(line: str) -> argparse.Namespace:
    """Parses the options after `%%autodist`.

    Raises:
        LaunchError: they are not valid.
    """
    options = _Parser(prog="%%autodist", add_help=False, allow_abbrev=False)
    options.add_argument("--cluster")
    options.add_argument("--strategy")
    options.add_argument("--workers", type=int)
    options.add_argument("--replicas", type=int)
    options.add_argument("--in", dest="ins", type=_names, default=(), metavar="NAME,…")
    options.add_argument("--out", dest="outs", type=_names, default=(), metavar="NAME,…")
    try:
        return options.parse_args(shlex.split(line))
    except ValueError as error:  # of shlex: an unmatched quotation mark
        raise LaunchError(f"%%autodist {line}: {error}.") from None


class _Parser(argparse.ArgumentParser):
    """Raises an error instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}. {' '.join(self.format_usage().split())}")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, (name.strip() for name in text.split(","))))
    if wrong := [name for name in names if not name.isidentifier()]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not a name")
    return names


def run_cell(
    ad: Any, cell: str, file: str, known: Mapping[str, Any], outs: tuple[str, ...], others: frozenset[str]
) -> dict[str, Any]:
    """Runs a cell as a script.

    Args:
        ad: available to the cell as `ad`.
        cell: its source.
        file: the file name for tracebacks.
        known: further variables of the cell, by name.
        outs: names of variables to return.
        others: names of notebook variables that the cell does not have.

    Returns:
        The values of `outs`, by name.

    Raises:
        LaunchError: the cell did not define one of `outs`.
    """
    linecache.cache[file] = (len(cell), None, cell.splitlines(keepends=True), file)
    names = {"__name__": "__main__", **known, "ad": ad}
    try:
        exec(compile(cell, file, "exec", dont_inherit=True), names)  # noqa: S102 - it is what the user runs
    except NameError as error:
        if error.name in others:
            error.add_note(f"The notebook has {error.name}: %%autodist --in {error.name} copies it to the workers.")
        raise
    missing = [name for name in outs if name not in names]
    if missing:
        raise LaunchError(f"--out names {', '.join(missing)}, which the cell did not define.")
    return {name: names[name] for name in outs}
