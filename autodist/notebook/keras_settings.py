"""What a script has told Keras for all that it makes: as it is in one process, for another."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KerasSettings:
    """Settings of `keras.config` by which the same code makes and computes something else.

    Attributes:
        floatx: the type of floats, by name.
        epsilon: the small number that Keras divides by in place of 0.
        image_data_format: where images have their channels.
        dtype_policy: as Keras serializes it; None: nobody has asked for one, so it goes by `floatx`.
    """

    floatx: str
    epsilon: float
    image_data_format: str
    dtype_policy: dict[str, Any] | None

    @staticmethod
    def of_this_process() -> KerasSettings | None:
        """None: Keras is not in use here."""
        if "keras" not in sys.modules:
            return None
        import keras
        from keras.src.backend.common import global_state

        policy = global_state.get_global_attribute("dtype_policy")  # asked by its function, Keras would settle it
        told = None if policy is None else keras.dtype_policies.serialize(policy)
        own = keras.config
        return KerasSettings(own.floatx(), own.epsilon(), own.image_data_format(), told)

    def apply(self) -> None:
        """Makes them those of this process."""
        import keras

        keras.config.set_floatx(self.floatx)
        keras.config.set_epsilon(self.epsilon)
        keras.config.set_image_data_format(self.image_data_format)
        if self.dtype_policy is not None:
            keras.config.set_dtype_policy(keras.dtype_policies.deserialize(self.dtype_policy))
