"""A function as a worker: its process belongs to another program, such as Ray, Dask or `multiprocessing`.

Nothing is started again, and signals stay with that program. The end of the function is the end of the worker.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from autodist.cluster.script import Script
from autodist.cluster.start import content_digest
from autodist.cluster.worker_client import WorkerClient
from autodist.errors import ClusterError


@dataclass
class FunctionEnd:
    """Records whether a function succeeds; takes the place of `ScriptEnd`, whose attributes have the same meaning.

    Attributes:
        raised: the first error of the function, or of the run; None if there is none.
    """

    raised: BaseException | None = None
    uncaught: list[BaseException] = field(default_factory=list)
    interrupted_at: float | None = None
    is_terminated: bool = False

    @property
    def is_bad(self) -> bool:
        """True if the function, or the run, has failed."""
        return self.raised is not None

    @property
    def is_held(self) -> bool:
        """False: the process goes on after the function in any case."""
        return False

    def note(self, error: BaseException) -> None:
        """Records an error, unless there was one before."""
        self.raised = self.raised or error

    def end_by(self, number: signal.Signals) -> None:
        """Does nothing: signals belong to the program that calls the function."""


@dataclass
class HostedFunction:
    """The function that takes part in a run in this process.

    Attributes:
        script: describes the function in place of a script.
        client: the worker client; None on the chief.
        end: the end of the function.
        at_the_end: called when the function ends, once its AutoDist exists; may raise an error of the run.
        has_autodist: True if the function has its AutoDist.
    """

    script: Script
    client: WorkerClient | None = None
    end: FunctionEnd = field(default_factory=FunctionEnd)
    at_the_end: Callable[[], None] = lambda: None
    has_autodist: bool = False

    def take(self) -> None:
        """Records that the function has its AutoDist.

        Raises:
            ClusterError: it has one already.
        """
        if self.has_autodist:
            raise ClusterError(
                f"The function {self.script.function} makes a second AutoDist, but a worker takes part in one run. Use "
                "the one of `with autodist.join(…) as ad:`, and open its scope() again."
            )
        self.has_autodist = True


_hosted: list[HostedFunction] = []
"""The function that takes part in a run, while it does; at most one."""


def hosted_function() -> HostedFunction | None:
    """Returns the function that takes part in a run in this process; None in the process of a script."""
    return _hosted[-1] if _hosted else None


def enter(function: HostedFunction) -> None:
    """Makes the function this process's worker; `leave` ends that."""
    _hosted[:] = [function]


def leave() -> None:
    """Makes this process one without a run again."""
    _hosted.clear()


def describe(frame: FrameType) -> Script:
    """Returns a description of the function that runs in a frame, by which the workers compare their code.

    The digest is that of the file, if the function was imported from it. A function that was pickled has only its own
    code, without line numbers.
    """
    code = frame.f_code
    module = sys.modules.get(str(frame.f_globals.get("__name__")))
    is_imported = getattr(module, "__file__", None) == code.co_filename
    digest = content_digest(code.co_filename) if is_imported else None
    if digest is None:
        digest = hashlib.sha256(repr(_content(code)).encode()).hexdigest()
    name = f"{code.co_qualname.removeprefix('<locals>.')} ({code.co_filename})"
    return Script((), os.getcwd(), None, digest, function=name)


def _content(value: Any) -> Any:
    """Returns the content of a code object or of one of its constants, equal in all processes of one Python."""
    if isinstance(value, CodeType):
        return value.co_name, value.co_code, value.co_names, value.co_varnames, [_content(v) for v in value.co_consts]
    if isinstance(value, frozenset):
        return sorted(repr(_content(one)) for one in value)
    if isinstance(value, tuple):
        return [_content(one) for one in value]
    return repr(value)
