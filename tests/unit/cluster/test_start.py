"""Settings corrected by the import of AutoDist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TELLS = """
import autodist, os, sys
pipe = os.pipe()
with open(sys.argv[1], "w") as told:
    print([os.path.samestat(os.stat(number), os.stat(os.devnull)) for number in range(3)], min(pipe) > 2, file=told)
"""


@pytest.mark.parametrize(
    ("closed", "said"),
    [
        ("<&- >&- 2>&-", "[True, True, True] True"),
        (">&- 2>&-", "[True, True, True] True"),
        ("", "[True, False, False]"),
    ],
)
def test_a_closed_standard_stream_gives_its_number_to_no_file_that_is_opened_later(
    closed: str, said: str, tmp_path: Path
) -> None:
    command = ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", TELLS, str(tmp_path / "told")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "told").read_text().startswith(said)
