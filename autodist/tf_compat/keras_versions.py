"""Attributes of Keras that differ between the supported versions of Keras 3."""

from __future__ import annotations

import re
from typing import Any

from autodist.versions import has_package


def matches_layout_key(key: str, path: str) -> bool:
    """Returns True if a key of a `LayoutMap` matches a path: all of it, or before Keras 3.14 a part of it."""
    return bool((re.fullmatch if has_package("keras", "3.14") else re.search)(key, path))


def layout_of(variable: Any) -> Any:
    """Returns the layout with which a `keras.Variable` was made; None: it has none, as before Keras 3.15."""
    return getattr(variable, "_layout", None)


def shards_dataset(distribution: Any) -> bool:
    """Returns True if a `keras.distribution.Distribution` leaves the division of data sets to Keras."""
    # Public since Keras 3.11.
    return bool(getattr(distribution, "auto_shard_dataset", getattr(distribution, "_auto_shard_dataset", True)))
