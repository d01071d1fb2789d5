"""Classification of the lines that TensorFlow logs when it starts and ends a session."""

from __future__ import annotations

import os
import re
import select

# TensorFlow's C++ code starts a line with the level, the date (zeros before its log is set up), the time and the
# thread; releases before 2.20 with the date, the time and the level.
_PREFIX = (
    r"(?:[IWEF]\d{4} \d\d:\d\d:\d+\.\d+ +\d+ |\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWEF] )"
    r"(?:[\w.-]+/)*(?P<file>[\w.-]+):\d+\] (?P<message>.*)"
)
_LINE = re.compile(_PREFIX)

_WITHOUT_FILE = (
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR",
    r"To enable the following instructions: [\w ,.]+, in other operations, rebuild TensorFlow with the appropriate "
    r"compiler flags\.",
    # Second line of the end of a loop that brings messages.
    r"\t \[\[\{\{node autodist_inbox_\d+/\w+\}\}\]\](?: \[type\.googleapis\.com/tensorflow\.DerivedStatus=''\])?",
    # Second and third line about a call to the server of a worker that has ended.
    r"Additional GRPC error information from remote target /job:worker/replica:0/task:\d+ while calling "
    r"/tensorflow\.WorkerService/\w+:",
    r":UNKNOWN:Error received from peer  "
    r'\{(?:grpc_message:"[^"]*", grpc_status:14|grpc_status:14, grpc_message:"[^"]*")\}',
    # The third line in earlier releases.
    r':\{"created":"@[\d.]+","description":"Error received from peer [^"]*",.*"grpc_status":14\}',
)

# By the file that logs them. A failed start of CUDA is hidden only without a driver (303) or a GPU (100): then nobody
# requested one, or AutoDist reports the cause.
_BY_FILE = {
    "port.cc": r"oneDNN custom operations are on\. You may see slightly different numerical results due to .*",
    "cudart_stub.cc": r"Could not find cuda drivers on your machine, GPU will not be used\.",
    "cpu_feature_guard.cc": r"This TensorFlow binary is optimized to use available CPU instructions in .*",
    "cuda_platform.cc": r"failed call to cuInit: .*(?:UNKNOWN ERROR \(303\)|CUDA_ERROR_NO_DEVICE.*)",
    "cuda_fft.cc": r"Unable to register cuFFT factory: .* has already been registered",
    "cuda_dnn.cc": r"Unable to register cuDNN factory: .* has already been registered",
    "cuda_blas.cc": r"Unable to register cuBLAS factory: .* has already been registered",
    "computation_placer.cc": r"computation placer already registered\. Please check linkage and avoid linking .*",
    "grpc_server_lib.cc": r"Started server with target: grpc://.*",
    "master.cc": r"Scanning workers for devices: \d+ total workers",
    "master_session.cc": r"Cleanup partition error: UNAVAILABLE: .*",
    "mlir_graph_optimization_pass.cc": r"MLIR V1 optimization pass is not enabled",
    "coordination_service.cc": r"Initializing CoordinationService",
    "local_rendezvous.cc": r"Local rendezvous is aborting with status: (?:OUT_OF_RANGE: End of sequence|ABORTED: "
    r"(?:Cleanup \d+|Step \d+ cancelled|Stopping remaining executors)|(?:CANCELLED|UNAVAILABLE): ).*|"
    r"Local rendezvous (?:recv|send) item cancelled\. Key hash: \d+",
    # The loops that bring messages are cancelled at the end of a run.
    "grpc_worker_service.cc": r"RecvTensor cancelled for \d+",
    "worker.cc": r"Cancellation requested for RunGraph\.",
    "queue_base.cc": r"[^:]+: Skipping cancelled (?:dequeue|enqueue) attempt with queue not closed",
    # An attribute that TensorFlow's server adds to the op and its own runtime does not know.
    "node_def_util.cc": r"NodeDef mentions attribute keep_dims which is not in the op definition: "
    r"Op<name=Arg(?:Max|Min);.* Unknown attributes will be ignored\. NodeDef: .*",
    # The check of dtypes that oneDNN supports, for each fusion of a graph in float64.
    "util.cc": r"Not handling type DT_\w+",
    "service.cc": r"XLA service 0x\w+ initialized for platform Host .*|"
    r"  StreamExecutor (?:device \(\d+\)|\[\d+\]): Host, .*",
    "profiler_session.cc": r"Profiler session (?:initializing|started|collecting data|tear down)\.",
    "xplane_to_step_stats.cc": r"GPU trace was not collected\.",
    "device_compiler.h": r"Compiled cluster using XLA!  This line is logged at most once for the lifetime of the .*",
}
_PLAIN_LINE = re.compile("|".join(_WITHOUT_FILE))
_MESSAGES = {file: re.compile(message) for file, message in _BY_FILE.items()}


def is_routine_line(line: str) -> bool:
    """Returns True for a line without information, which TensorFlow logs in every run.

    Only exact forms match.
    """
    line = line.rstrip()
    if _PLAIN_LINE.fullmatch(line):
        return True
    match = _LINE.fullmatch(line)
    known = _MESSAGES.get(match["file"]) if match else None
    return bool(match and known and known.fullmatch(match["message"]))


_INFORMS = re.compile(r"(?:I\d{4} |\d{4}-\S+ \S+: I ).*")
_CANCELLED_WAIT = re.compile(r"\t \[\[\{\{node .*\}\}\]\] \[type\.googleapis\.com/tensorflow\.DerivedStatus=''\]")


def is_no_failure(line: str) -> bool:
    """Returns True for a line of TensorFlow's C++ log that cannot explain why a process ended.

    These are informational lines and lines about a cancelled wait for another worker. Other or unknown warnings may be
    the reason.
    """
    line = line.rstrip()
    match = _LINE.fullmatch(line)
    informs = match is not None and match["file"].endswith((".cc", ".h")) and _INFORMS.fullmatch(line) is not None
    return informs or is_routine_line(line) or _CANCELLED_WAIT.fullmatch(line) is not None


# Start of a line that may be removed; other output passes at once, such as a progress bar without a line end.
_MAY_MATCH = re.compile(r"$|[IWEF](?:$|\d)|\d|\t|WARNING: All|To enable|Additional GRPC|:UNKNOWN|:\{")
LINE_TIMEOUT = 0.2
"""Seconds to wait for the rest of a line."""


class RoutineLineFilter:
    """Removes routine lines from output that arrives in pieces.

    Attributes:
        held: start of a line that may be removed, until its rest arrives or `take_held` is called.
    """

    def __init__(self) -> None:
        self.held = b""

    def filter(self, piece: bytes) -> bytes:
        """Returns the output to show now; an empty piece ends the output."""
        *lines, self.held = (self.held + piece).split(b"\n")
        shown = b"".join(line + b"\n" for line in lines if not is_routine_line(line.decode(errors="replace")))
        if not piece or not _MAY_MATCH.match(self.held.decode(errors="replace")):
            shown += self.take_held()
        return shown

    def take_held(self) -> bytes:
        held, self.held = self.held, b""
        return held


def pass_on(source: int, target: int) -> None:
    """Copies input until its end, without the lines that carry no information.

    Args:
        source: file descriptor to read from.
        target: file descriptor to write to.
    """
    output = RoutineLineFilter()
    while True:
        if output.held and not select.select([source], [], [], LINE_TIMEOUT)[0]:
            _write(target, output.take_held())
        more = os.read(source, 1 << 16)
        _write(target, output.filter(more))
        if not more:
            return


def _write(target: int, content: bytes) -> None:
    try:
        while content:
            select.select([], [target], [])  # the parent process may have made its output non-blocking
            content = content[os.write(target, content[: select.PIPE_BUF]) :]
    except OSError:
        return  # no reader, or disk full: reading goes on, or the writers would fail


if __name__ == "__main__":
    pass_on(0, 2)
