"""Names that compressors had in AutoDist of 2021."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

log = logging.getLogger("autodist")

OLDER_NAMES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "NoneCompressor": {"kind": "NONE"},
        "HorovodCompressor": {"kind": "FLOAT16"},
        "HorovodCompressorEF": {"kind": "FLOAT16", "error_feedback": True},
    }
)


def in_current_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a compressor's options with an older name replaced by the current one; logs each older name once."""
    kind = options.get("kind")
    if not isinstance(kind, str) or kind not in OLDER_NAMES:
        return dict(options)
    _warn(kind)
    return {**OLDER_NAMES[kind], **{name: value for name, value in options.items() if name != "kind"}}


@functools.cache
def _warn(kind: str) -> None:
    current = dict(OLDER_NAMES[kind])
    written = current["kind"] if len(current) == 1 else json.dumps(current)
    log.warning(
        "%s is the name that AutoDist of 2021 had for the compressor %s and is deprecated; write `compressor: %s`.",
        kind, current["kind"], written,
    )  # fmt: skip
