"""`python -m autodist.cli.checking.seen_gpus`: prints how many GPUs TensorFlow sees, and why not more."""

from __future__ import annotations

import ctypes
import signal
import sys

from autodist.cli.checking.messages import SeenGPUs
from autodist.cluster.protocol import encode

_PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # ends with the probe
    from autodist.runtime.gpus import GPUSupport, count_gpus

    count = count_gpus()
    seen = SeenGPUs(count=count, reason=GPUSupport.of_this_process().why_too_few(count))
    sys.stdout.write(f"\n{encode(seen).decode()}")


if __name__ == "__main__":
    main()
