"""Warning about initial values drawn before AutoDist(...), which differ from the chief's."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from autodist.runtime.early_values import EarlyValues
from autodist.runtime.seeds import is_seeded_by_script

log = logging.getLogger("autodist")

_NAMED = 5
"""Variables that a warning names."""


class EarlyValueWarning:
    """Warns if this worker computes locally with initial values that differ from the chief's.

    Args:
        is_shared: True if there are other workers.
        chiefs: the `told` of the chief; empty on the chief.
    """

    def __init__(self, is_shared: bool, chiefs: Mapping[str, str]) -> None:
        is_drawn = is_shared and not is_seeded_by_script()
        self._early = EarlyValues.now() if is_drawn else EarlyValues({})
        self._chiefs = chiefs
        self._has_warned = False

    def told(self) -> dict[str, str]:
        """Returns the chief's values in the form that the other workers compare with theirs."""
        return self._early.told()

    def warn(self, what: str, variables: Sequence[Any]) -> None:
        """Warns, once, if some of the values are not the chief's.

        Args:
            what: the local computation.
            variables: the variables that it uses.
        """
        names = [] if self._has_warned else self._early.differing(self._chiefs, variables)
        if names:
            self._has_warned = True
            rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            log.warning(
                "%s computes on this worker with its own initial values of %s%s: they were drawn before AutoDist(...) "
                "without a seed, and training uses the chief's values. Build the model after AutoDist(...), or call "
                "keras.utils.set_random_seed before it.",
                what, ", ".join(names[:_NAMED]), rest,
            )  # fmt: skip
