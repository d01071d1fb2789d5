"""The reasons for missing GPUs, determined from a machine's state, which tests simulate."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import tensorflow as tf

from autodist import AutoDist, ResourceSpec
from autodist.errors import ResourceSpecError
from autodist.runtime import gpus
from autodist.runtime.gpus import GPUSupport

FIT = GPUSupport(None, ("tensorflow", "2.21.0"), is_built=True, has_driver=True, has_libraries=True)
BARE = GPUSupport("-1", ("tensorflow", "2.21.0"), is_built=True, has_driver=False, has_libraries=False)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (replace(FIT, visible=""), "^CUDA_VISIBLE_DEVICES is '', which hides all of them .unset it.$"),
        (replace(FIT, visible="-1"), "^CUDA_VISIBLE_DEVICES is '-1', which hides all of them .unset it.$"),
        (replace(FIT, visible="3"), "^CUDA_VISIBLE_DEVICES is '3', which hides all others .unset it.$"),
        (replace(FIT, has_libraries=False), r"^CUDA's libraries .*`pip install 'tensorflow\[and-cuda\]==2.21.0'`.$"),
        (replace(FIT, has_driver=False), "^NVIDIA's driver is missing: .*`nvidia-smi`"),
        (
            replace(FIT, package=("tensorflow-cpu", "2.21.0"), is_built=False, has_libraries=False),
            r"^the installed tensorflow-cpu is built without CUDA .`pip uninstall tensorflow-cpu; pip install "
            r"'tensorflow\[and-cuda\]==2.21.0'`.$",
        ),
        (FIT, "^`nvidia-smi` shows whether .* installs CUDA's libraries, and AUTODIST_LOG_LEVEL=DEBUG shows"),
    ],
)
def test_each_cause_has_its_mend(found: GPUSupport, said: str) -> None:
    assert re.search(said, found.why_too_few(0))


def test_all_causes_are_told() -> None:
    causes = BARE.why_too_few(0).split("; ", 2)
    assert [cause.split()[0] for cause in causes] == ["CUDA_VISIBLE_DEVICES", "CUDA's", "NVIDIA's"]


def test_the_reason_for_hidden_gpus_is_reported_if_some_are_visible() -> None:
    assert BARE.why_too_few(1).startswith("CUDA_VISIBLE_DEVICES is '-1'") and "driver" not in BARE.why_too_few(1)
    assert replace(BARE, visible=None).why_too_few(1) == ""


def test_facts_about_gpus_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    installed = {"tensorflow", "nvidia-cudnn-cu12"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(gpus, "_is_installed", installed.__contains__)
    monkeypatch.setattr(gpus, "_can_load", lambda library: asked.append(library) or library == "libcuda.so.1")
    monkeypatch.setattr(
        tf.sysconfig,
        "get_build_info",
        lambda: {"is_cuda_build": True, "cuda_version": "12.5.1", "cudnn_version": "9"},
    )
    found = GPUSupport.of_this_process()
    assert (found.visible, found.is_built, found.has_driver, found.has_libraries) == ("0", True, True, False)
    assert found.package == ("tensorflow", tf.version.VERSION)
    assert asked == ["libcuda.so.1", "libcudart.so.12"]
    installed |= set(gpus._packages_for_gpus("tensorflow"))
    assert GPUSupport.of_this_process().has_libraries


def test_the_metadata_of_tensorflow_lists_the_packages_for_gpus() -> None:
    assert {"nvidia-cudnn-cu12", "nvidia-nccl-cu12"} <= set(gpus._packages_for_gpus("tensorflow"))
    assert gpus._packages_for_gpus("no-such-package") == ["nvidia-cudnn-cu12"]


def test_a_yaml_with_gpus_that_are_not_there_names_the_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *kind: [])
    monkeypatch.setattr(GPUSupport, "of_this_process", staticmethod(lambda: BARE))
    with pytest.raises(
        ResourceSpecError, match=r"nodes\[0\].gpus\[0\]: localhost has no GPU 0, .*CUDA_VISIBLE_DEVICES"
    ):
        AutoDist(resource_spec=ResourceSpec.from_dict({"nodes": [{"address": "localhost", "gpus": [0]}]}))
