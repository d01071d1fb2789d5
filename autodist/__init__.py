"""AutoDist: train a TensorFlow script written for one device on many devices and many machines."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from autodist.versions import VERSION, check_versions

if TYPE_CHECKING:
    from autodist.api import AutoDist
    from autodist.engines.join import join
    from autodist.notebook.launch import launch
    from autodist.notebook.magic import load_ipython_extension
    from autodist.resources import ResourceSpec

__version__ = VERSION
__all__ = ["AutoDist", "ResourceSpec", "join", "launch", "load_ipython_extension"]

check_versions()

from autodist.cluster.start import fill_standard_descriptors, noted_start  # noqa: E402  # needs a supported Python
from autodist.tf_compat.import_hooks import once_imported  # noqa: E402

fill_standard_descriptors()  # now: before this process opens many files
noted_start()  # now: the script may change its directory and arguments before it creates an AutoDist


def _complete_keras() -> None:
    from autodist.capture.keras.distribution.backend import complete_backend

    complete_backend()


once_imported("keras.src.distribution.distribution_lib", _complete_keras)  # now: meshes come before AutoDist(…)

if os.environ.get("AUTODIST_EARLY_LAUNCH"):  # now: the script may need seconds for other imports
    from autodist.runs.early_launch import launch_early

    launch_early()

_WHERE = {
    "AutoDist": "autodist.api",
    "ResourceSpec": "autodist.resources",
    "join": "autodist.engines.join",
    "launch": "autodist.notebook.launch",
    "load_ipython_extension": "autodist.notebook.magic",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first access, because an agent on another machine does not need TensorFlow."""
    if name not in _WHERE:
        raise AttributeError(f"module 'autodist' has no attribute {name!r}")
    from autodist.tf_compat.importing import import_lazily, importing_tensorflow

    with importing_tensorflow():
        return getattr(import_lazily(_WHERE[name]), name)
