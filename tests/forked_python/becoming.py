"""Turns a forked process into the process that `python …` would have started.

Its number, parent, session, streams, inherited descriptors, signals, environment, directory, arguments and `__main__`
are those of a started process. The differences: modules that were imported before, the seed of `hash`, memory
addresses, `sys.flags`, and the command that the system shows.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import importlib.machinery
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType
from typing import Any

MARK = "AUTODIST_TEST_RUN"
"""Same value as in `tests.cluster.runs`, whose import would load too much here."""

_ABOVE_ALL = 1000
"""Descriptors from here on are unused."""

_MOST = 1 << 18
_SEEN_BY_NO_START = {signal.SIGPIPE, signal.SIGXFSZ}
"""Signals that Python itself ignores; `subprocess` restores their defaults in new processes."""


@dataclass(frozen=True)
class Start:
    """The start of a process.

    Attributes:
        line: the command line after the interpreter.
        environment: all variables.
        directory: None: the starting process's.
        numbers: descriptors of the process, in the order in which they are sent.
        new_session: True if it begins a session.
        ignored: signals that the starting process ignores.
        blocked: signals that the starting process has blocked.
        mark: of its run.
        chains: number of times that it may start those of `of`.
        of: a key of `CHAINS`.
    """

    line: tuple[str, ...]
    environment: dict[bytes, bytes]
    directory: bytes | str | None
    numbers: tuple[int, ...]
    new_session: bool
    ignored: frozenset[int]
    blocked: frozenset[int]
    mark: str = ""
    chains: int = 0
    of: str = "worker"


def of_this_process(**others: Any) -> Start:
    """A start by this process, as it is now."""
    ignored = {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return Start(ignored=frozenset(ignored - _SEEN_BY_NO_START), blocked=frozenset(blocked), **others)


def send(channel: socket.socket, start: Start, descriptors: Sequence[int]) -> None:
    told = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    channel.sendmsg([pickle.dumps(asdict(start))], told)


def receive(channel: socket.socket) -> tuple[Start, list[int]] | None:
    """A start with its descriptors; None: nobody is left to send any."""
    said, about, _, _ = channel.recvmsg(_MOST, socket.CMSG_SPACE(64 * 4))
    descriptors = array.array("i")
    for level, kind, content in about:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content)
    return (Start(**pickle.loads(said)), list(descriptors)) if said else None


_environment = ctypes.CDLL(None)
_environment.getenv.restype = ctypes.c_void_p
_marked_at = _environment.getenv(MARK.encode())
"""Address at which the system reads the initial environment of the process."""


def write_mark(mark: str) -> None:
    """Writes a run's mark into the environment that the system shows for this process and its forks."""
    assert _marked_at is not None and len(mark) == len(ctypes.string_at(_marked_at)), mark
    ctypes.memmove(_marked_at, mark.encode(), len(mark))


def become(start: Start, descriptors: Sequence[int], waiting: Sequence[Waiting] = ()) -> CodeType:
    """Turns this process into the started one, and returns the code to run as `__main__`.

    Args:
        start: of the process.
        descriptors: of the process, for the numbers in `start`.
        waiting: forked processes that it may start.
    """
    _take_descriptors(start.numbers, descriptors, [one.channel.fileno() for one in waiting])
    if start.new_session:
        os.setsid()
    if start.directory is not None:
        os.chdir(start.directory)
    os.environ.clear()
    os.environb.update(start.environment)
    _make_streams(is_unbuffered=bool(start.environment.get(b"PYTHONUNBUFFERED")))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # a fork reseeds Python's own
    code = prepare_main(start.line)
    _take_signals(start)
    return code


def _take_descriptors(numbers: Sequence[int], descriptors: Sequence[int], kept: Sequence[int]) -> None:
    moved = [fcntl.fcntl(given, fcntl.F_DUPFD, _ABOVE_ALL) for given in descriptors]
    _close_all_but([*moved, *kept])
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _close_all_but(kept: Sequence[int]) -> None:
    """Closes all descriptors of this process except its streams and `kept`."""
    for number in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *kept}:
        with contextlib.suppress(OSError):  # the descriptor that listed the folder
            os.close(number)


def _make_streams(is_unbuffered: bool) -> None:
    if not is_unbuffered:
        return
    for number, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        raw = io.FileIO(number, "wb", closefd=False)
        made = io.TextIOWrapper(raw, before.encoding, before.errors, write_through=True)
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)


def _take_signals(start: Start) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)  # discards signals from before the start
        if number in start.ignored or number in _SEEN_BY_NO_START:
            handler: Any = signal.SIG_IGN
        else:
            handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, start.blocked)


_paths: list[str] = []


def prepare_main(line: Sequence[str]) -> CodeType:
    """Prepares `__main__` for a command line of `python`, and returns its code."""
    _paths[:] = _paths or sys.path
    sys.path[:] = _paths
    sys.orig_argv = [sys.executable, *line]
    main = sys.modules["__main__"].__dict__
    kept = {name: main[name] for name in ("__name__", "__doc__", "__package__", "__spec__", "__builtins__")}
    main.clear()
    main.update(kept | {"__doc__": None, "__loader__": None, "__annotations__": {}})
    if line[:2] == ("-P", "-m") or line[:1] == ("-m",):
        at = line.index("-m") + 1
        sys.argv = ["-m", *line[at + 1 :]]
        if line[0] != "-P":
            sys.path.insert(0, os.getcwd())
        return compile(f"import runpy\nrunpy._run_module_as_main({line[at]!r})", "<frozen runpy>", "exec")
    file = line[0]
    assert not file.startswith("-"), line
    sys.argv = list(line)
    sys.path.insert(0, os.path.dirname(os.path.realpath(file)))
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    main.update(__file__=file, __cached__=None, __loader__=loader)
    with open(file, "rb") as opened:
        return compile(opened.read(), file, "exec", dont_inherit=True)


# -- whom the forked process starts --------------------------------------------------------------------------------

Fits = Callable[[Sequence[str]], bool]

_AGENT, _GUARD, _LAUNCHED = "autodist.cluster.agent", "autodist.cluster.guard", "autodist.notebook.launched"


def _is_module(name: str) -> Fits:
    return lambda line: tuple(word for word in line if word != "-P")[:2] == ("-m", name)


def _is_script(line: Sequence[str]) -> bool:
    return line[:1] == ("-m",) or (line[:1] != () and not line[0].startswith("-"))


CHAINS: dict[str, tuple[Fits, ...]] = {
    "worker": (_is_module(_AGENT), _is_module(_GUARD), _is_script),
    "agent": (_is_module(_GUARD), _is_script),
    "launch": tuple(_is_module(name) for name in (_GUARD, _LAUNCHED, _AGENT, _GUARD, _LAUNCHED)),
}
"""The processes that a chief starts for a worker: each starts the next, and the last is the script. Also the processes
of a waiting agent, and of `launch` for a run of two workers.
"""


class Waiting:
    """A child of this process that waits to become one which it starts, and has a child that does so in its turn."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.channel = socket.socket(fileno=fcntl.fcntl(channel, fcntl.F_DUPFD_CLOEXEC, _ABOVE_ALL))
        channel.close()


def forked_chain(levels: Sequence[Fits]) -> Waiting | CodeType:
    """Forks a child that waits, and returns it; in the child, once it has become another process, returns the code to
    run.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())  # signals from now on are for others
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return Waiting(pid, ours)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    ours.detach()
    _close_all_but([theirs.fileno()])
    below = []
    if levels[1:]:
        child = forked_chain(levels[1:])
        if isinstance(child, CodeType):
            theirs.detach()  # it is closed, and its number another one's
            return child
        below.append(child)
    told = receive(theirs)
    theirs.detach()
    if told is None:
        os._exit(0)
    _start_by(below, levels[1:])
    code = become(*told, below)
    _stay_so_anew(len(below), levels[1:])
    return code


def fork_chains(count: int, of: str, above: int = 0) -> CodeType | None:
    """Forks the processes that this one is going to start; in those, returns the code to run.

    Args:
        count: number of starts.
        of: a key of `CHAINS`.
        above: depth of this process in that chain.
    """
    waiting, levels = [], CHAINS[of][above:]
    for _ in range(count):
        child = forked_chain(levels)
        if isinstance(child, CodeType):
            for other in waiting:
                other.channel.detach()
            return child
        waiting.append(child)
    _start_by(waiting, levels)
    _stay_so_anew(count, levels)
    return None


_ANEW = "import sys; sys.path[0] = {folder!r}; from serve import begin_anew; exec(begin_anew{chains!r})"


def _stay_so_anew(count: int, levels: Sequence[Fits]) -> None:
    """Keeps forking the processes that this one starts after its re-exec, although an `exec` would lose the imports.

    The product then reads its environment from the system, which shows that of the forking process.
    """
    if not count:
        return
    chains = next((count, of, all_.index(levels[0])) for of, all_ in CHAINS.items() if all_[-len(levels) :] == levels)
    code = _ANEW.format(folder=os.path.dirname(__file__), chains=chains)
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    shown = {name: value for name, _, value in (entry.partition(b"=") for entry in entries if b"=" in entry)}
    execute, environment, python = os.execve, dict(os.environb), sys.executable

    def begin(path: str, command: Sequence[str], given: dict[bytes, bytes]) -> None:
        """At the very end of Python, when names of modules are gone."""
        if path == python and shown.items() <= given.items():
            told = {name: value for name, value in given.items() if shown.get(name) != value}
            execute(path, [path, "-c", code, *command[1:]], environment | told)
        execute(path, command, given)

    os.execve = begin  # type: ignore[assignment]


_SHELL = ("/bin/sh", "-c", 'exec "$0" "$@"')


def _start_by(waiting: list[Waiting], levels: Sequence[Fits]) -> None:
    """Starts processes by the waiting forks, as long as there are any and the start matches theirs."""
    if not waiting:
        return
    fork_exec = subprocess._fork_exec

    def started(*given: Any) -> int:
        command, _, _, kept, directory, environment = given[:6]
        stdin, _, _, stdout, _, stderr, _, told_at = given[6:14]
        words = tuple(os.fsdecode(word) for word in command)
        words = words[len(_SHELL) :] if words[: len(_SHELL)] == _SHELL else words
        if not waiting or words[0] != sys.executable or not levels[0](words[1:]):
            return int(fork_exec(*given))
        streams = {number: number if at == -1 else at for number, at in enumerate((stdin, stdout, stderr))}
        inherited = streams | {number: number for number in kept if number != told_at}
        pairs = dict(os.environb) if environment is None else dict(entry.split(b"=", 1) for entry in environment)
        start = of_this_process(
            line=words[1:],
            environment=pairs,
            directory=os.getcwd() if directory is None else directory,
            numbers=tuple(inherited),
            new_session=bool(given[15]),
        )
        process = waiting.pop()
        send(process.channel, start, list(inherited.values()))
        process.channel.close()
        return process.pid

    subprocess._fork_exec = started
