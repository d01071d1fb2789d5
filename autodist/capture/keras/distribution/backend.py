"""Functions of `keras.distribution` that Keras's TensorFlow backend lacks, or for which it starts TensorFlow's runtime.

A script for the JAX backend then runs on TensorFlow up to its `AutoDist(…)`, and afterwards lists the run's places.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from autodist.capture.keras.distribution.meshes import EarlyDevices, make_mesh
from autodist.capture.keras.distribution.run_settings import current_run
from autodist.errors import StrategyError
from autodist.tf_compat.patches import BACKEND_DEVICES, MESH_INIT, VARIABLE_INITIALIZE, install, put

log = logging.getLogger("autodist")


def complete_backend() -> None:
    """Adds the functions to Keras's TensorFlow backend for the rest of the process; other backends do not change."""
    from keras.src.backend.config import backend  # `keras` itself may not be complete yet

    if backend() != "tensorflow":
        return
    functions: dict[str, Callable[..., Any]] = {
        "list_devices": list_devices,
        "get_device_count": get_device_count,
        "initialize": initialize,
        "distribute_tensor": distribute_tensor,
        "num_processes": lambda: 1,  # AutoDist divides the data among its workers, and Keras must not
        "process_id": lambda: 0,
    }
    for name, function in functions.items():
        put(BACKEND_DEVICES[name], function)
    from autodist.capture.keras.distribution.variables import make_variable

    install(MESH_INIT, make_mesh)
    install(VARIABLE_INITIALIZE, make_variable)


def list_devices(device_type: str | None = None) -> list[str]:
    """Returns the places of the run in their order, or before `AutoDist(…)` the devices of this machine.

    Args:
        device_type: "cpu", "gpu" or "tpu"; None: all places of the run, or this machine's GPUs or TPUs if it has any.
    """
    run = current_run()
    if run is not None:
        return [name for name in run.devices if device_type is None or name.startswith(f"{device_type.lower()}:")]
    kinds = _physical_devices()
    kind = next((kind for kind in ("gpu", "tpu") if kinds[kind]), "cpu") if device_type is None else device_type.lower()
    return EarlyDevices(f"{kind}:{index}" for index in range(kinds[kind]))


def get_device_count(device_type: str | None = None) -> int:
    """Returns the number of devices that `list_devices` returns."""
    return len(list_devices(device_type))


def initialize(job_addresses: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Does nothing: `AutoDist(…)` starts the processes of the run and connects them."""
    passed = {"job_addresses": job_addresses, "num_processes": num_processes, "process_id": process_id}
    unused = [f"{name}={value!r}" for name, value in passed.items() if value is not None]
    if unused:
        log.warning(
            "keras.distribution.initialize: %s has no effect, since AutoDist starts the processes on the machines of "
            "its YAML file. Remove it, or the environment variables KERAS_DISTRIBUTION_….",
            ", ".join(unused),
        )


def distribute_tensor(tensor: Any, layout: Any) -> Any:
    """Returns the tensor: in a distributed step with the layout, which its gradient has too.

    Raises:
        StrategyError: the layout is not possible, or no `ModelParallel` is set.
    """
    # Imported here: the modules use Keras, which may not be complete yet when this one is imported.
    import tensorflow as tf

    from autodist.capture.keras.distribution.checks import is_in_distributed_graph, sharding_distribution
    from autodist.capture.keras.distribution.layouts import constraint_of_output
    from autodist.capture.keras.distribution.outputs import constrained
    from autodist.capture.local_steps import line_of_script
    from autodist.capture.training_hooks import is_distributing

    run = current_run()
    if not is_in_distributed_graph() or (run is not None and run.is_reference):
        return tensor
    line, distribution = line_of_script(), sharding_distribution(None)
    if isinstance(tensor, tf.Tensor) and tensor.shape.rank is not None and is_distributing() and distribution:
        return constrained(tensor, constraint_of_output(distribution, run, layout, line, tensor.shape.rank))
    described = (
        f"the tensor {tensor.name}" if hasattr(tensor, "name") else f"an output that is a {type(tensor).__name__}"
    )
    raise StrategyError(
        f"keras.distribution.distribute_tensor{f' ({line})' if line else ''} requests the layout "
        f"{getattr(layout, 'axes', layout)} for {described} of a distributed step. AutoDist supports layouts of dense "
        "tensors of known rank, in a step that is traced while a keras.distribution.ModelParallel is set, and not in "
        "sessions of TensorFlow 1. Remove the call, or the key of the LayoutMap that ends in /output."
    )


def _physical_devices() -> Counter[str]:
    """Returns the number of devices of each kind on this machine, without starting TensorFlow's runtime."""
    import tensorflow as tf  # Keras has imported it; this module is also imported if Keras has another backend

    counts: Counter[str] = Counter()
    for device in tf.config.list_physical_devices():
        split = tf.config.get_logical_device_configuration(device)
        counts[device.device_type.lower()] += 1 if split is None else len(split)
    return counts
