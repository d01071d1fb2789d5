"""The GPUs that TensorFlow sees, and why it sees fewer than the YAML lists."""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from importlib import metadata

import tensorflow as tf

_HIDING = "CUDA_VISIBLE_DEVICES"
_NAMES = ("tensorflow", "tensorflow-cpu", "tf-nightly")


def count_gpus() -> int:
    """Returns the number of GPUs that TensorFlow sees."""
    return len(tf.config.list_physical_devices("GPU"))


@dataclass(frozen=True)
class GPUSupport:
    """Prerequisites for GPUs in this process.

    Attributes:
        visible: CUDA_VISIBLE_DEVICES; None if it is not set.
        package: name of the installed TensorFlow package, and its version.
        is_built: True if that TensorFlow is built for CUDA.
        has_driver: True if NVIDIA's driver is installed.
        has_libraries: True if CUDA's libraries are installed, as Python packages or in the system.
    """

    visible: str | None
    package: tuple[str, str]
    is_built: bool
    has_driver: bool
    has_libraries: bool

    @staticmethod
    def of_this_process() -> GPUSupport:
        built = tf.sysconfig.get_build_info()
        name = next(filter(_is_installed, _NAMES), _NAMES[0])
        system = (
            f"libcudart.so.{str(built.get('cuda_version', '')).split('.')[0]}",
            f"libcudnn.so.{built.get('cudnn_version', '')}",
        )
        return GPUSupport(
            os.environ.get(_HIDING),
            (name, tf.version.VERSION),
            bool(built.get("is_cuda_build")),
            _can_load("libcuda.so.1"),
            all(map(_is_installed, _packages_for_gpus(name))) or all(map(_can_load, system)),
        )

    def why_too_few(self, present: int) -> str:
        """Returns the causes that are found, each with its fix; if there are none, hints for finding them.

        Args:
            present: number of GPUs that TensorFlow sees; if it sees some, only CUDA_VISIBLE_DEVICES is a cause.
        """
        causes = []
        if self.visible is not None:
            hidden = "all others" if self.visible[:1].isalnum() else "all of them"
            causes.append(f"{_HIDING} is {self.visible!r}, which hides {hidden} (unset it)")
        if present:
            return "".join(causes)
        name, version = self.package
        install = f"pip install 'tensorflow[and-cuda]=={version}'"
        if not self.is_built:
            remove = f"pip uninstall {name}; " if name != _NAMES[0] else ""
            causes.append(f"the installed {name} is built without CUDA (`{remove}{install}`)")
        elif not self.has_libraries:
            causes.append(f"CUDA's libraries are not installed (`{install}`)")
        if not self.has_driver:
            causes.append(
                "NVIDIA's driver is missing: libcuda.so.1 cannot be loaded (install it, and check that `nvidia-smi` "
                "lists the GPUs; a container needs `--gpus all`)"
            )
        return "; ".join(causes) or (
            f"`nvidia-smi` shows whether the driver works and sees the GPUs, `{install}` installs CUDA's libraries, "
            "and AUTODIST_LOG_LEVEL=DEBUG shows TensorFlow's own messages about them"
        )


def _is_installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _packages_for_gpus(package: str) -> list[str]:
    """Returns the packages that `tensorflow[and-cuda]` installs; at least one name."""
    required = metadata.requires(package) or [] if _is_installed(package) else []
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in required if "and-cuda" in line.partition(";")[2]]
    return names or ["nvidia-cudnn-cu12"]


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
