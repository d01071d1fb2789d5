"""`python -m autodist.notebook.launched`: calls a launched function, on the chief and on every other worker.

The chief reads the function from a file descriptor passed by its parent, and writes the outcome into another. The other
workers receive the function from the chief.
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import traceback
from types import TracebackType
from typing import Any

from autodist.cluster.script import send_with_script
from autodist.cluster.script_client import ScriptClient
from autodist.errors import LaunchError
from autodist.logs.formatting import without_callers
from autodist.notebook.process import FILES
from autodist.resources import ResourceSpec
from autodist.runs.cli_overrides import take_over


def main() -> None:
    sys.excepthook = _print_error
    worker_client = ScriptClient.from_environment()
    if worker_client is not None:
        _call(worker_client.pickled_code)
        return
    # Both stay open for a re-exec of this process (`max_restarts`), which needs them again.
    ordered, outcome = map(int, os.environ.pop(FILES).split(","))
    order = os.pread(ordered, os.fstat(ordered).st_size, 0)
    # Line buffering, since other workers' lines come in between. Without a terminal, Python would buffer much more.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]  # it is Python's own
    send_with_script(order)
    _call_as_chief(order, _Report(outcome))


_CALLERS = (__file__, "<frozen runpy>")


class _Report:
    """The outcome of the call on the chief; written at the end of the run, which may fail, too."""

    def __init__(self, file: int) -> None:
        from autodist.notebook.call import Outcome

        self._file, self.outcome = file, Outcome()
        os.ftruncate(file, 0)  # drops the outcome of an earlier start
        atexit.register(self._write)  # before an AutoDist exists, so that this runs after its end

    def _write(self) -> None:
        from autodist.api import made
        from autodist.notebook.call import Outcome

        failed = next((run.end.error for run in made() if run.end.error is not None), None)
        if failed is not None and self.outcome.value is not None:
            self.outcome = Outcome.of_error(failed)
        with os.fdopen(self._file, "wb", closefd=False) as file:
            file.seek(0)
            pickle.dump(self.outcome, file)


def _call_as_chief(order: bytes, report: _Report) -> None:
    from autodist.notebook.call import RETURNS, Outcome
    from autodist.notebook.pickled import pack

    try:
        returned = _call(order)
        report.outcome = Outcome(pack(returned, f"the result of the function, a {type(returned).__name__},", RETURNS))
    except SystemExit as ended:
        is_bad = ended.code not in (None, 0)
        error = LaunchError(f"the function ended by sys.exit({ended.code!r}).")
        report.outcome = Outcome.of_error(error) if is_bad else Outcome(pack(None, "None", ""))
        raise
    except BaseException as error:
        report.outcome = Outcome.of_error(error.with_traceback(without_callers(error.__traceback__, _CALLERS)))
        sys.excepthook = _print_nothing  # `launch` raises the exception in the parent
        raise


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints an exception as Python does, with lines of notebook cells, which are in no file."""
    traceback.print_exception(kind, error, without_callers(trace, _CALLERS))


def _print_nothing(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None: ...


def _call(order: bytes) -> Any:
    from autodist import AutoDist  # before TensorFlow, which the function imports
    from autodist.logs.quiet import quiet_tensorflow
    from autodist.notebook.call import LaunchedCall
    from autodist.notebook.pickled import unpack

    with quiet_tensorflow():  # unpickling may be the first use of TensorFlow in this process
        call: LaunchedCall = unpack(order, takes_settings=True)
    if call.overrides.is_set:
        os.environ |= call.overrides.environment()
        take_over()
    spec = None if call.spec is None else ResourceSpec.from_payload(call.spec)
    ad = AutoDist(resource_spec=spec, strategy=call.builder)
    return call.function(ad, *call.args)


if __name__ == "__main__":
    main()
