"""Why TensorFlow sees fewer GPUs here than there are said to be."""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from importlib import metadata

import tensorflow as tf

_HIDING = "CUDA_VISIBLE_DEVICES"
_NAMES = ("tensorflow", "tensorflow-cpu", "tf-nightly")


@dataclass(frozen=True)
class GPUSupport:
    """What TensorFlow needs to see GPUs, as it is in this process.

    Attributes:
        visible: CUDA_VISIBLE_DEVICES; None if it is not set.
        package: the name by which TensorFlow is installed, and its version.
        is_built: whether that TensorFlow is built for CUDA.
        has_driver: whether NVIDIA's driver is there.
        has_libraries: whether CUDA's libraries are there, in packages of Python or the system's.
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
        """The causes that are found, each with its mend; if there are none, where to look for them.

        Args:
            present: how many GPUs TensorFlow sees; where it sees some, only what hides others is told, if anything.
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
                "NVIDIA's driver is not there: libcuda.so.1 cannot be loaded (install it, and see that `nvidia-smi` "
                "lists the GPUs; a container needs `--gpus all`)"
            )
        return "; ".join(causes) or (
            f"`nvidia-smi` says whether the driver works and sees the GPUs, `{install}` brings CUDA's libraries, and "
            "AUTODIST_LOG_LEVEL=DEBUG shows what TensorFlow itself says of them"
        )


def _is_installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _packages_for_gpus(package: str) -> list[str]:
    """What `tensorflow[and-cuda]` installs; at least one name."""
    required = metadata.requires(package) or [] if _is_installed(package) else []
    names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in required if "and-cuda" in line.partition(";")[2]]
    return names or ["nvidia-cudnn-cu12"]


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
