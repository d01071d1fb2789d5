"""The table of TensorFlow and Keras methods that AutoDist wraps, and the functions that install the wrappers.

A new patch is a row of this table, and at its use a `with patched({ROW: wrapper})`, or an `install(ROW, wrapper)` if no
context ends it. A replacement that calls no plain method, or is called for each operation, is `put(ROW, replacement)`.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from autodist.versions import has_package, require_package


@dataclass(frozen=True)
class Patch:
    """A row of the table: a method of a class, or a function of a module, that is wrapped.

    Attributes:
        path: the class or module, as `pkgutil.resolve_name` takes it. Imported when the patch is installed.
        method: the name of the method. If the class inherits it, the class that defines it is patched.
        versions: the package, and the lowest version in which the method means what its wrapper expects. If it is above
            the lowest supported version, callers look at `exists`.
        reason: the purpose of the wrapper.
    """

    path: str
    method: str
    versions: tuple[str, str]
    reason: str

    @property
    def exists(self) -> bool:
        """True if the installed version of the package has the method."""
        return has_package(*self.versions)

    def owner(self) -> Any:
        """Imports and returns the class that defines the method, or its module.

        Raises:
            UnsupportedVersionError: the package is too old.
        """
        require_package(*self.versions)
        owner = pkgutil.resolve_name(self.path)
        return definer_of(owner, self.method) if isinstance(owner, type) else owner

    def plain(self) -> Any:
        """Returns the method as its owner stores it, unbound."""
        return vars(self.owner())[self.method]

    def wrapped(self, wrapper: Callable[..., Any]) -> Any:
        """Returns the replacement of the method: calls of `method(*args)` become `wrapper(method, *args)`."""
        return _around(self.plain(), wrapper)


def _around(plain: Any, wrapper: Callable[..., Any]) -> Any:
    if isinstance(plain, classmethod):
        return classmethod(_around(plain.__func__, wrapper))

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return wrapper(plain, *args, **kwargs)
        except BaseException as error:
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this frame
            raise

    return call


@contextmanager
def patched(wrappers: Mapping[Patch, Callable[..., Any]]) -> Iterator[None]:
    """Wraps methods while the context is open: calls of `method(*args)` become `wrapper(method, *args)`.

    Raises:
        UnsupportedVersionError: a package is older than a row requires.
    """
    with ExitStack() as opened:
        for row, wrapper in wrappers.items():
            opened.enter_context(replaced(row.owner(), row.method, row.wrapped(wrapper)))
        yield


@dataclass(frozen=True)
class Installed:
    """A wrapper that stays installed until it is removed."""

    owner: Any
    method: str
    plain: Any
    replacement: Any

    @property
    def is_current(self) -> bool:
        """True if nothing else has replaced the method since."""
        return vars(self.owner)[self.method] is self.replacement

    def remove(self) -> None:
        """Restores the plain method."""
        setattr(self.owner, self.method, self.plain)


def install(row: Patch, wrapper: Callable[..., Any]) -> Installed:
    """Wraps a method, as `patched` does, until the result is removed."""
    installed = Installed(row.owner(), row.method, row.plain(), row.wrapped(wrapper))
    put(row, installed.replacement)
    return installed


def put(row: Patch, replacement: Any) -> None:
    """Replaces a method for the rest of the process, without the cost of a wrapper's call."""
    setattr(row.owner(), row.method, replacement)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute of an object, class or module while the context is open."""
    plain = vars(owner).get(name, getattr(owner, name))  # a method as its class stores it, unbound
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def definer_of(kind: type[Any], name: str) -> Any:
    """Returns the class from which `kind` inherits an attribute; a patch of it acts on all subclasses.

    If no class has it, since it is an attribute of instances, `kind` itself is returned.
    """
    return next((base for base in kind.__mro__ if name in vars(base)), kind)


_TENSORFLOW, _KERAS, _TF_KERAS = ("tensorflow", "2.18"), ("keras", "3.8"), ("tf_keras", "2.18")

# -- gradients -------------------------------------------------------------------------------------------------------

_TF = "tensorflow.python"
_OPS = f"{_TF}.ops"
_TAPE, _FORWARD = "tensorflow:GradientTape", f"{_TF}.eager.forwardprop"

TAPE_GRADIENT = Patch(_TAPE, "gradient", _TENSORFLOW, "records gradients")
TAPE_JACOBIAN = Patch(_TAPE, "jacobian", _TENSORFLOW, "records jacobians")
TAPE_BATCH_JACOBIAN = Patch(_TAPE, "batch_jacobian", _TENSORFLOW, "records jacobians")
TAPE_PUSH = Patch(_TAPE, "_push_tape", _TENSORFLOW, "lets a tape differentiate again, and notes when it records")
TAPE_POP = Patch(_TAPE, "_pop_tape", _TENSORFLOW, "lets a tape differentiate again, and notes when it records")
TAPE_FUNCTION = Patch(
    f"{_OPS}.control_flow_util_v2", "run_as_function_for_tape_gradients", _TENSORFLOW,
    "keeps conditionals and loops in the graph",
)  # fmt: skip
GRAPH_GRADIENTS = Patch(
    f"{_OPS}.gradients_util",
    "_GradientsHelper",
    _TENSORFLOW,
    "records gradients of graphs: all functions for them call it",
)
VECTORIZED = Patch(
    f"{_OPS}.parallel_for.control_flow_ops", "_pfor_impl", _TENSORFLOW, "leaves gradients of one example out"
)
FORWARD_DERIVATIVE = Patch(
    _FORWARD, "_jvp_helper", _TENSORFLOW, "leaves gradients out that a forward derivative is made of"
)
FORWARD_PUSH = Patch(f"{_FORWARD}:ForwardAccumulator", "_push_accumulator", _TENSORFLOW, "lists open accumulators")
FORWARD_POP = Patch(f"{_FORWARD}:ForwardAccumulator", "_pop_accumulator", _TENSORFLOW, "lists open accumulators")
SECOND_BATCH_NORM_GRADIENT = Patch(
    f"{_OPS}.nn_fused_batch_norm_grad", "_FusedBatchNormGradGrad", _TENSORFLOW, "detects second derivatives"
)

# -- functions and ops -----------------------------------------------------------------------------------------------

_FUNC_GRAPH = "tensorflow:__internal__.FuncGraph"

FUNCTION_CALL = Patch(
    f"{_TF}.eager.polymorphic_function.polymorphic_function:Function", "__call__", _TENSORFLOW,
    "traces nested functions inline; detects local training",
)  # fmt: skip
CAPTURE = Patch(_FUNC_GRAPH, "capture", _TENSORFLOW, "names captured tensors alike on all workers")
CREATE_OP = Patch(_FUNC_GRAPH, "_create_op_internal", _TENSORFLOW, "replaces inputs by values of the whole batch")
LOAD_SOURCE = Patch(
    f"{_TF}.autograph.pyct.loader", "load_source", _TENSORFLOW, "keeps converted functions out of the file system"
)
EXECUTES = [  # every eager operation and function goes through one of them
    Patch(f"{_TF}.pywrap_tfe", name, _TENSORFLOW, "detects uses of variables")
    for name in ("TFE_Py_FastPathExecute", "TFE_Py_Execute", "TFE_Py_ExecuteCancelable")
]
OPERATION_SEED = Patch(  # every random operation, also of datasets, gets its seeds there
    f"{_TF}.framework.random_seed", "get_seed", _TENSORFLOW, "leaves the seeds of operations as they are without ours"
)
COND = Patch(f"{_OPS}.cond_v2", "cond_v2", _TENSORFLOW, "traces both branches into the graph")
MOMENTS = Patch("tensorflow:nn", "moments", _TENSORFLOW, "fuses batch normalization")
NORMALIZE = Patch("tensorflow:nn", "batch_normalization", _TENSORFLOW, "fuses batch normalization")
SPARSE_LOOKUPS = [
    Patch(f"{_OPS}.embedding_ops", name, _TENSORFLOW, "gives weights the length of the ids")
    for name in ("safe_embedding_lookup_sparse", "embedding_lookup_sparse")
]
SPARSE_RETAINS = [
    Patch(owner, name, _TENSORFLOW, "gives masks the length of the entries")
    for owner, name in ((f"{_OPS}.sparse_ops", "sparse_retain"), ("tensorflow:sparse", "retain"))
]
SPARSE_PLACEHOLDERS = [
    Patch(owner, "sparse_placeholder", _TENSORFLOW, "feeds a row for each example")
    for owner in (f"{_OPS}.array_ops", "tensorflow:compat.v1")
]
FROM_ROW_IDS = Patch(
    f"{_OPS}.ragged.row_partition:RowPartition", "from_value_rowids", _TENSORFLOW, "keeps the row of each value"
)
RAGGED_REDUCE = Patch(
    f"{_OPS}.ragged.ragged_math_ops", "ragged_reduce_aggregate", _TENSORFLOW, "reduces by the row of each value"
)

# -- tf.distribute, sessions and optimizers --------------------------------------------------------------------------

_REPLICA_CONTEXT = "tensorflow:distribute.ReplicaContext"
_SESSION = f"{_TF}.client.session:BaseSession"

STRATEGY_SCOPE = Patch("tensorflow:distribute.Strategy", "scope", _TENSORFLOW, "rejects other strategies")
ALL_REDUCE = Patch(_REPLICA_CONTEXT, "all_reduce", _TENSORFLOW, "records in-step all-reduces")
ALL_GATHER = Patch(_REPLICA_CONTEXT, "all_gather", _TENSORFLOW, "records in-step all-gathers")
SESSION_RUN = Patch(_SESSION, "run", _TENSORFLOW, "detects local training")
SESSION_CALLABLE = Patch(_SESSION, "make_callable", _TENSORFLOW, "detects local training")
OPTIMIZER_V1_APPLY = Patch(
    "tensorflow:compat.v1.train.Optimizer", "apply_gradients", _TENSORFLOW, "detects local training"
)
OPTIMIZER_APPLY = Patch("keras:optimizers.Optimizer", "apply", _KERAS, "detects local training")
OPTIMIZER_ALL_REDUCE = Patch(
    "keras:Optimizer", "_all_reduce_sum_gradients", _KERAS, "leaves gradients to AutoDist's synchronizers"
)
OPTIMIZER_OVERWRITE = Patch(
    "keras:Optimizer", "_overwrite_variables_directly_with_gradients", _KERAS, "records overwritten variables (float8)"
)
LEGACY_OPTIMIZER_APPLIES = [
    Patch(f"tf_keras:optimizers.{name}", "apply_gradients", _TF_KERAS, "detects local training")
    for name in ("Optimizer", "legacy.Optimizer")
]

# -- layers of Keras -------------------------------------------------------------------------------------------------

_BATCH_NORM = "keras:layers.BatchNormalization"

BATCH_NORM_CALL = Patch(_BATCH_NORM, "call", _KERAS, "fuses batch normalization")
BATCH_NORM_MOMENTS = Patch(_BATCH_NORM, "_moments", _KERAS, "synchronizes moments under a mask")
BATCH_NORM_SUM = Patch("keras.src.ops", "sum", _KERAS, "synchronizes moments under a mask")
INITIALIZER_SEED = Patch(  # an attribute of instances, not of the class
    "keras.src.initializers.random_initializers:RandomInitializer",
    "seed",
    _KERAS,
    "draws the same seeds on all workers",
)
LAYER_INIT = Patch("keras:layers.Layer", "__init__", _KERAS, "records pipeline stages")
SYMBOLIC_CALLS = [  # layers inherit it before Keras 3.10
    Patch(owner, "symbolic_call", versions, "records pipeline stages")
    for owner, versions in (("keras:layers.Layer", ("keras", "3.10")), ("keras:Operation", _KERAS))
]

# -- models and callbacks of Keras -----------------------------------------------------------------------------------

_ADOPTED = ("__init__", "make_train_function", "fit", "evaluate", "predict")
_TRAINER = "keras.src.backend.tensorflow.trainer"


def _models(trainer: str, model: str, versions: tuple[str, str]) -> dict[str, Patch]:
    # In the class that defines them: Keras leaves a loaded model uncompiled if the `compile` of its class differs
    # from that of the base class of all models.
    owners = {"compile": model, **dict.fromkeys(_ADOPTED, trainer)}
    return {name: Patch(owner, name, versions, "adopts models") for name, owner in owners.items()}


MODELS = _models(f"{_TRAINER}:TensorFlowTrainer", "keras:Model", _KERAS)
LEGACY_MODELS = _models("tf_keras:Model", "tf_keras:Model", _TF_KERAS)
EPOCH_ITERATOR = Patch(_TRAINER, "TFEpochIterator", _KERAS, "reads this worker's part of the batches of `fit`")
EPOCH_BATCHES = Patch(
    "keras.src.trainers.epoch_iterator:EpochIterator", "_enumerate_iterator", _KERAS, "skips batches of an earlier run"
)
EPOCH_DATA = Patch(
    f"{_TRAINER}:TensorFlowTrainer", "_maybe_symbolic_build", _KERAS, "builds a model before its values are restored"
)
PROGRESS, LEGACY_PROGRESS = (
    Patch(f"{package[0]}:callbacks.ProgbarLogger", "on_train_batch_end", package, "excludes the start from epoch times")
    for package in (_KERAS, _TF_KERAS)
)
_DISTRIBUTION = "keras.src.distribution.distribution_lib"
SET_DISTRIBUTIONS = [  # scripts call the first, and `Distribution.scope` the second
    Patch(owner, "set_distribution", _KERAS, "rejects model parallelism")
    for owner in ("keras:distribution", _DISTRIBUTION)
]
BACKEND_DEVICES = {  # the backend lacks all but the first, which starts TensorFlow's runtime
    name: Patch("keras.src.backend.tensorflow.distribution_lib", name, _KERAS, "lists the places of the run")
    for name in (
        "list_devices", "get_device_count", "initialize", "distribute_tensor", "num_processes", "process_id",
    )
}  # fmt: skip
MESH_INIT = Patch(f"{_DISTRIBUTION}:DeviceMesh", "__init__", _KERAS, "allows meshes of a run that is not known yet")
VARIABLE_INITIALIZE = Patch(
    "keras.src.backend:Variable", "_initialize", _KERAS, "notes variables that a distribution shards"
)
VARIABLE_INITIALIZER = Patch(
    "keras.src.backend:Variable", "_initialize_with_initializer", _KERAS, "defers initial values"
)
VARIABLE_ASSIGN = Patch("keras.src.backend:Variable", "assign", _KERAS, "leaves loaded weights in their file")
_WEIGHTS_STORE = "keras.src.saving.saving_lib:H5IOStore"
STORED_WEIGHT = Patch(_WEIGHTS_STORE, "__getitem__", ("keras", "3.11"), "notes the file of weights that are loaded")
WEIGHTS_FILE = Patch(_WEIGHTS_STORE, "_get_h5_file", ("keras", "3.11"), "reads weights before their file is written")
BACKUPS = [
    Patch("keras:callbacks.BackupAndRestore", name, _KERAS, "leaves backups to the chief")
    for name in ("_load_model", "_save_model", "on_train_end")
]
LEGACY_BACKUPS = [
    Patch(
        "tf_keras.src.distribute.worker_training_state:WorkerTrainingState", name, _TF_KERAS,
        "leaves backups to the chief",
    )
    for name in ("back_up", "restore", "delete_backup", "backup_if_preempted")
]  # fmt: skip

# -- files that a script saves ---------------------------------------------------------------------------------------


def _saves(package: tuple[str, str], names: dict[str, str]) -> list[Patch]:
    return [
        Patch(owner, name, package, "leaves files that all workers write alike to one of them")
        for owner, methods in names.items() for name in methods.split()
    ]  # fmt: skip


[CHECKPOINT_SAVE] = _saves(_TENSORFLOW, {"tensorflow:train.Checkpoint": "_write"})  # called by `save` and `write`
MANAGER_FILES = [
    Patch("tensorflow.python.checkpoint.checkpoint_management" + owner, name, _TENSORFLOW, "leaves files to the writer")
    for owner, name in ((":CheckpointManager", "_record_state"), ("", "_delete_file_if_exists"))
]
[SAVER_SAVE] = _saves(_TENSORFLOW, {"tensorflow:compat.v1.train.Saver": "save"})
[SAVED_MODEL_SAVE] = _saves(_TENSORFLOW, {f"{_TF}.saved_model.save": "save"})
SAVES = _saves(_KERAS, {
    "keras:Model": "save save_weights export",
    # These implement keras.saving.save_model and save_weights, which scripts may have imported by name.
    "keras.src.saving.saving_lib": "save_model save_weights_only",
    "keras.src.legacy.saving.legacy_h5_format": "save_model_to_hdf5",
})  # fmt: skip
LEGACY_SAVES = _saves(_TF_KERAS, {
    "tf_keras:Model": "save save_weights export",
    "tf_keras.src.saving.saving_lib": "save_model save_weights_only",  # called by tf_keras.models.save_model, and so on
    "tf_keras.src.saving.legacy.save": "save_model save_weights",
})  # fmt: skip
