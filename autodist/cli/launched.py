"""`python -m autodist.cli.launched [-m] SCRIPT ARGS…`: what `autodist run` becomes; runs the script as Python would.

Signals, exit status, standard input and terminal are the script's own: this is the process that the user started. A
script that trains nothing on the machines which were asked for ends with status 2.
"""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from autodist.errors import BAD_INPUT, AutoDistError, MisusedError
from autodist.runs.cli_overrides import named_builder, take_over


def main() -> None:
    asked = take_over()
    is_module = sys.argv[1] == "-m"
    name, *rest = sys.argv[1 + is_module :]
    sys.argv = [name, *rest]
    # In place of what Python has put there for this module.
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(name))
    if asked.strategy is not None:
        _require_strategy(asked.strategy)  # now: a builder of the user's may stand beside the script
    sys.excepthook = functools.partial(_without_our_frames, sys.excepthook, asked.traceback)
    try:
        _run(name, is_module)
    except MisusedError as error:
        _refuse(str(error))
    _require_training(name)


def _require_strategy(name: str) -> None:
    """Passes one that there is, before the script does anything."""
    try:
        named_builder(name)
    except AutoDistError as error:
        _refuse(str(error))


def _run(name: str, is_module: bool) -> None:
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise


def _require_training(name: str) -> None:
    """Passes a script that has ended well if something of it ran on the machines."""
    api = sys.modules.get("autodist.api")
    if api is None or not api.made():
        _refuse(
            f"{name} made no AutoDist and ran on one device, as without `autodist run`. Wrap its training in `ad = "
            "AutoDist()` and `with ad.scope():`, as README.md shows."
        )
    elif not any(one.has_worked for one in api.made()):
        _refuse(
            f"{name} ended before a step of its AutoDist. What it trains has to be built in `with ad.scope():`, a step "
            "of its own needs @ad.function, and a graph ad.create_distributed_session()."
        )


def _refuse(problem: str) -> None:
    _tell(problem)
    sys.exit(BAD_INPUT)


def _tell(problem: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # nobody is told
            sys.stderr.write(f"autodist: error: {problem}\n")
            sys.stderr.flush()


def _without_our_frames(
    otherwise: Callable[[type[BaseException], BaseException, TracebackType | None], Any],
    shows_all: bool,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Shows what a script raised from the script on; of AutoDist's own errors the words, which say it all.

    Args:
        otherwise: shows an exception.
        shows_all: whether AutoDist's own are shown as others are.
        kind: of the exception.
        error: the exception.
        trace: where it came from.
    """
    if isinstance(error, AutoDistError) and not shows_all:
        lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace) if _is_script_s(frame)]
        _tell(str(error) + "".join(f" ({file}:{line})" for file, line in lines[-1:]))
        return
    ours = (__file__, "<frozen runpy>")
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    otherwise(kind, error.with_traceback(trace), trace)


def _is_script_s(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_filename != __file__


if __name__ == "__main__":
    main()
