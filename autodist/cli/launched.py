"""`python -m autodist.cli.launched [-m] SCRIPT ARGS…`: `autodist run` executes it, and it runs the script like Python.

The script runs in the process that the user started, with its signals, standard input, terminal and exit status. A
script that trains nothing on the requested machines ends with status 2.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from autodist.errors import BAD_INPUT, AutoDistError, MisusedError
from autodist.logs.formatting import without_callers
from autodist.logs.terminal import print_message
from autodist.runs.cli_overrides import named_builder, take_over


def main() -> None:
    overrides = take_over()
    is_module = sys.argv[1] == "-m"
    name, *rest = sys.argv[1 + is_module :]
    sys.argv = [name, *rest]
    # Replaces the entry that Python added for this module.
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(name))
    if overrides.strategy is not None:
        _require_strategy(overrides.strategy)  # now: a custom builder may be defined next to the script
    sys.excepthook = functools.partial(_without_our_frames, sys.excepthook, overrides.traceback)
    try:
        _run(name, is_module)
    except MisusedError as error:
        _refuse(str(error))
    _require_training(name)


def _require_strategy(name: str) -> None:
    """Checks that a strategy exists, before the script does anything."""
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
    """Checks that a script which ended well ran something on the machines."""
    api = sys.modules.get("autodist.api")
    if api is None or not api.made():
        _refuse(
            f"{name} created no AutoDist and ran on one device, as without `autodist run`. Wrap its training in `ad = "
            "AutoDist()` and `with ad.scope():`, as README.md shows."
        )
    elif not any(one.has_worked for one in api.made()):
        _refuse(
            f"{name} ended before a step of its AutoDist. Build the training in `with ad.scope():`. A custom step "
            "needs @ad.function, and a graph needs ad.create_distributed_session()."
        )


def _refuse(problem: str) -> None:
    print_message(f"error: {problem}")
    sys.exit(BAD_INPUT)


def _without_our_frames(
    otherwise: Callable[[type[BaseException], BaseException, TracebackType | None], Any],
    shows_all: bool,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Shows a script's exception without frames outside the script, and AutoDist's own errors without a traceback.

    Args:
        otherwise: the previous exception hook, which shows all other exceptions.
        shows_all: True to show AutoDist's own errors with a traceback, too.
        kind: type of the exception.
        error: the exception.
        trace: its traceback.
    """
    if isinstance(error, AutoDistError) and not shows_all:
        lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace) if _is_script_s(frame)]
        print_message(f"error: {error}" + "".join(f" ({file}:{line})" for file, line in lines[-1:]))
        return
    trace = without_callers(trace, (__file__, "<frozen runpy>"))
    otherwise(kind, error.with_traceback(trace), trace)


def _is_script_s(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_filename != __file__


if __name__ == "__main__":
    main()
