"""What AutoDist tells on the terminal, and on which worker."""

import logging

import pytest

from autodist.messages import ALIKE_EVERYWHERE, log_to_the_terminal


@pytest.mark.parametrize("is_chief", [True, False])
def test_what_all_workers_would_tell_alike_is_told_by_the_chief(
    is_chief: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("autodist")
    for name in ("propagate", "level"):
        monkeypatch.setattr(logger, name, getattr(logger, name))  # are set back afterwards
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a script that sets up no logging
    log_to_the_terminal(is_chief)
    logger.info("of the chief")
    logger.warning("of this worker")
    logger.warning("of the step", extra=ALIKE_EVERYWHERE)
    lines = ["of the chief", "of this worker", "of the step"] if is_chief else ["of this worker"]
    assert capsys.readouterr().err.splitlines() == [f"autodist: {line}" for line in lines]
