"""What a script has told Keras for all that it makes: as it is in one process, for another."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KerasSettings:
    """Settings of one Keras by which the same code makes and computes something else.

    Attributes:
        floatx: the type of floats, by name.
        epsilon: the small number that Keras divides by in place of 0.
        image_data_format: where images have their channels.
        dtype_policy: as Keras serializes it; None: nobody has asked for one, so it goes by `floatx`.
        library: the module of that Keras, `keras` or `tf_keras`.
    """

    floatx: str
    epsilon: float
    image_data_format: str
    dtype_policy: dict[str, Any] | str | None
    library: str = "keras"

    @staticmethod
    def of_this_process() -> tuple[KerasSettings, ...]:
        """The settings of each Keras that is in use here."""
        found = []
        for library, policies in _LIBRARIES.items():
            if hasattr(sys.modules.get(library), "Model"):  # else it is being imported, or is not in use
                own = sys.modules[library].backend
                told = policies.asked_for()
                found.append(KerasSettings(own.floatx(), own.epsilon(), own.image_data_format(), told, library))
        return tuple(found)

    def apply(self) -> None:
        """Makes them those of this process."""
        own = importlib.import_module(self.library).backend
        own.set_floatx(self.floatx)
        own.set_epsilon(self.epsilon)
        own.set_image_data_format(self.image_data_format)
        if self.dtype_policy is not None:
            _LIBRARIES[self.library].ask_for(self.dtype_policy)


class _Policies:
    """The dtype policy that Keras 3 gives to all layers."""

    @staticmethod
    def asked_for() -> Any:
        """The policy as Keras serializes it; None where nobody has set one. Keras's own function would settle it."""
        import keras
        from keras.src.backend.common import global_state

        policy = global_state.get_global_attribute("dtype_policy")
        return None if policy is None else keras.dtype_policies.serialize(policy)

    @staticmethod
    def ask_for(told: Any) -> None:
        import keras

        keras.config.set_dtype_policy(keras.dtype_policies.deserialize(told))


class _LegacyPolicies:
    """The dtype policy that tf_keras gives to all layers."""

    @staticmethod
    def asked_for() -> Any:
        from tf_keras.src.mixed_precision import policy

        return None if policy._global_policy is None else policy.serialize(policy._global_policy)

    @staticmethod
    def ask_for(told: Any) -> None:
        from tf_keras.src.mixed_precision import policy

        policy.set_global_policy(policy.deserialize(told))


_LIBRARIES: dict[str, type[_Policies] | type[_LegacyPolicies]] = {"keras": _Policies, "tf_keras": _LegacyPolicies}
