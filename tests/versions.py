"""Marks of tests of features that older supported versions of packages lack."""

from __future__ import annotations

import pytest

from autodist.versions import has_package


def since_keras(version: str, feature: str) -> pytest.MarkDecorator:
    """Returns a mark that skips a test if the installed Keras is older than a version."""
    return pytest.mark.skipif(not has_package("keras", version), reason=f"Keras has {feature} since {version}")
