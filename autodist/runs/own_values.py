"""OwnValues: initial values that this worker has drawn before AutoDist(...), and the chief has drawn otherwise."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from autodist.runtime.early_values import EarlyValues
from autodist.runtime.seeds import is_seeded_by_script

log = logging.getLogger("autodist")

_NAMED = 5
"""Variables that a warning names."""


class OwnValues:
    """Warns of them, where this worker computes with them by itself.

    Args:
        is_shared: whether there are other workers.
        chiefs: what the chief has `told`; empty on the chief.
    """

    def __init__(self, is_shared: bool, chiefs: Mapping[str, str]) -> None:
        is_drawn = is_shared and not is_seeded_by_script()
        self._early = EarlyValues.now() if is_drawn else EarlyValues({})
        self._chiefs = chiefs
        self._has_warned = False

    def told(self) -> dict[str, str]:
        """What the others compare their own values with."""
        return self._early.told()

    def warn(self, what: str, variables: Sequence[Any]) -> None:
        """Warns, once, if some of the values are not the chief's.

        Args:
            what: this worker computes by itself.
            variables: with which.
        """
        names = [] if self._has_warned else self._early.differing(self._chiefs, variables)
        if names:
            self._has_warned = True
            rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            log.warning(
                "%s computes on this worker with its own initial values of %s%s: they were made before AutoDist(...) "
                "without a seed, and the chief has drawn others, with which all train. Build the model after "
                "AutoDist(...), or call keras.utils.set_random_seed before it.",
                what, ", ".join(names[:_NAMED]), rest,
            )  # fmt: skip
