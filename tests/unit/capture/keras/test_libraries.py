"""The two versions of Keras, one of which may not be installed."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from autodist.capture.keras.libraries import uses_legacy_keras


@pytest.mark.parametrize("is_installed", [True, False])
def test_tf_keras_is_used_only_where_it_is_installed(is_installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's trainer sets the variable in any case."""
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    monkeypatch.delitem(sys.modules, "tf_keras", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if is_installed else None)
    assert uses_legacy_keras() is is_installed
