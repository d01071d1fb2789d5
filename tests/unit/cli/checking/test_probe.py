"""The probe of `autodist check`: an error in an answer reaches the chief at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autodist.cli.checking.messages import TimeRequest
from autodist.cluster.protocol import encode

FAILS = """
import sys
from autodist.cli.checking import probe

probe.Probe.answer = lambda self, question: 1 / 0
sys.argv = ["probe", "60"]
sys.exit(probe.main())
"""


@pytest.mark.processes
def test_an_error_in_an_answer_ends_the_output_so_that_nobody_waits():
    command = [sys.executable, "-c", FAILS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as probe:
        assert probe.stdin and probe.stdout and probe.stderr
        probe.stdin.write(encode(TimeRequest()))
        probe.stdin.flush()
        assert probe.stdout.read().strip() == b""  # ends, though standard input is open
        while b"ZeroDivisionError" not in (line := probe.stderr.readline()):  # written after the output has ended
            assert line
        probe.stdin.close()
        assert probe.wait(30) == 0
