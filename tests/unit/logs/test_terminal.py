"""AutoDist's messages on the terminal, and the workers that print them."""

import logging

import pytest

from autodist.errors import AutoDistError
from autodist.logs.terminal import ALIKE_EVERYWHERE, LEVEL_VARIABLE, log_to_the_terminal


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


@pytest.mark.parametrize(("said", "level"), [("", logging.INFO), ("debug", logging.DEBUG), ("loud", None)])
def test_the_environment_names_a_level_or_is_refused(
    said: str, level: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("autodist")
    for name in ("propagate", "level"):
        monkeypatch.setattr(logger, name, getattr(logger, name))
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setenv(LEVEL_VARIABLE, said)
    if level is None:
        with pytest.raises(
            AutoDistError, match="AUTODIST_LOG_LEVEL is LOUD, which is not a level; allowed: DEBUG, INFO"
        ):
            log_to_the_terminal(is_chief=True)
    else:
        log_to_the_terminal(is_chief=True)
        assert logger.level == level
