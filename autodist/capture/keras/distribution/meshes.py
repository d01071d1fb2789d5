"""Meshes of Keras's devices: meshes of a run that is not known yet, and the mesh of places that each stands for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from autodist.capture.keras.distribution.run_settings import RunSettings, current_run
from autodist.errors import StrategyError
from autodist.logs.formatting import capitalised, counted, listed, some_of
from autodist.sharding import Mesh

_STAND_IN = "place:"
"""Prefix of the devices of a mesh that was made before the run was known; "place:2" is the third place of the run."""

_lines: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The line of the script that made each mesh."""

_early: WeakSet[Any] = WeakSet()
"""The meshes that were made before the script created an AutoDist."""


class EarlyDevices(list[str]):
    """The devices of this machine, listed before the places of the run are known."""


def make_mesh(
    plain: Callable[..., None],
    mesh: Any,
    shape: Sequence[int],
    axis_names: Sequence[str],
    devices: Any = None,
) -> None:
    """Wraps the constructor of `DeviceMesh`: a mesh without devices is one of all places, known or not known yet."""
    from autodist.capture.local_steps import line_of_script  # imports Keras, which may not be complete yet

    run = current_run()
    if (devices is None or isinstance(devices, EarlyDevices)) and shape and min(shape) > 0:
        stand_ins = tuple(f"{_STAND_IN}{index}" for index in range(math.prod(shape)))
        devices = run.devices if run is not None and len(run.devices) == len(stand_ins) else stand_ins
    plain(mesh, shape, axis_names, devices)
    _lines[mesh] = line_of_script()
    if run is None:
        _early.add(mesh)


def check_early_meshes(run: RunSettings) -> None:
    """Checks the meshes that the script has made before its AutoDist, each of them once.

    A mesh of one axis with devices of the script is not checked: it may belong to a `DataParallel`, which trains on the
    places of the run instead.

    Raises:
        StrategyError: a mesh does not arrange the places of the run.
    """
    meshes = [*_early]
    _early.clear()
    for mesh in meshes:
        if len(mesh.shape) > 1 or _is_stand_in(mesh):
            mesh_of(mesh, run)


def mesh_of(device_mesh: Any, run: RunSettings | None) -> Mesh:
    """Returns the mesh of places that a `DeviceMesh` stands for.

    Args:
        device_mesh: the mesh of a script.
        run: the settings of the run; None: the places are not checked.

    Raises:
        StrategyError: an axis or a device is named twice, or the mesh does not arrange all places of the run.
    """
    _early.discard(device_mesh)  # checked here: an exception may keep it until the script makes its next AutoDist
    names = [str(name) for name in device_mesh.axis_names]
    devices = [str(device) for device in device_mesh.devices.flatten()]
    described = capitalised(describe_mesh(device_mesh))
    for name in _repeated(names):
        raise StrategyError(f"{described} has two axes with the name {name!r}. Rename one of them.")
    for device in _repeated(devices):
        raise StrategyError(f"{described} lists the device {device} twice. List each place of the run once.")
    sizes = dict(zip(names, map(int, np.shape(device_mesh.devices)), strict=True))
    if run is None:
        return Mesh.of(sizes)
    _require_size(len(devices), described, run)
    positions = {f"{_STAND_IN}{index}": index for index in range(len(run.devices))}
    positions |= {name: index for index, name in enumerate(run.devices)}
    unknown = [device for device in devices if device not in positions]
    if unknown:
        raise StrategyError(
            f"{described} lists {some_of(unknown)}, and the places of the run ({run.machines}) are "
            f"{listed(run.devices)}. Leave `devices` out, or pass keras.distribution.list_devices(), called after "
            "AutoDist(…)."
        )
    return Mesh.of(sizes, [positions[device] for device in devices])


def describe_mesh(device_mesh: Any) -> str:
    """Returns a mesh for messages: "the DeviceMesh {batch: 2, model: 4} (train.py:7)"."""
    axes = ", ".join(f"{name}: {size}" for name, size in zip(device_mesh.axis_names, device_mesh.shape, strict=True))
    line = _lines.get(device_mesh, "")
    return f"the DeviceMesh {{{axes}}}" + (f" ({line})" if line else "")


def _require_size(size: int, described: str, run: RunSettings) -> None:
    places = len(run.devices)
    if size == places:
        return
    part = "only " if size < places else ""
    raise StrategyError(
        f"{described} has {part}{counted(size, 'place')}, and the run has {places} ({run.machines}): "
        f"{some_of(run.devices)}. A mesh arranges all places of the run: change its shape, or the machines."
    )


def _is_stand_in(mesh: Any) -> bool:
    return str(mesh.devices.flat[0]).startswith(_STAND_IN) if mesh.devices.size else False


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]
