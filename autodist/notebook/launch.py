"""`autodist.launch`: trains a function on several workers, and returns its result."""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autodist.cluster.command_line import Main
from autodist.cluster.failure import exit_reason
from autodist.cluster.script_client import CONTROL_VARIABLE
from autodist.errors import LaunchError
from autodist.logs.terminal import log_to_the_terminal
from autodist.notebook.call import LaunchedCall, Outcome, name_of
from autodist.notebook.pickled import LARGEST, pack
from autodist.notebook.process import Ended, run_module
from autodist.notebook.uses import find_unpicklable, sets, uses
from autodist.resources import ResourceSpec, Timeouts
from autodist.runs.cli_overrides import CliOverrides, named_builder

if TYPE_CHECKING:
    from autodist.strategies import BuildsStrategy

_log = logging.getLogger("autodist")

_MODULE = "autodist.notebook.launched"

_TRAINED = {"keras": "Layer", "tensorflow": "Variable"}
"""By module, the class of objects that a function may train."""

_TAKES = (
    "Let the function import or create objects that belong to one process (data sets, sessions, locks, open "
    "files), and pass it plain values: arrays, numbers, file names."
)


def launch(
    function: Callable[..., Any],
    *args: Any,
    cluster: str | os.PathLike[str] | ResourceSpec | Mapping[str, Any] | None = None,
    strategy: str | BuildsStrategy | Mapping[str, Any] | None = None,
    workers: int | None = None,
    replicas: int | None = None,
) -> Any:
    """Calls `function(ad, *args)` on every worker, each in a new process, and returns the chief's result.

    For notebooks and prompts, which have no script that other workers could run. `ad` is the AutoDist; the function
    trains within `ad.scope()` like a script. The workers, on this machine and on others, receive copies of the function
    and of the notebook's objects that it uses. The output of all workers is printed here as it comes. An exception of
    the function is raised here, with its traceback. An interrupt, or the end of this process, ends the run.

    Args:
        function: the function that every worker calls.
        args: the arguments of the function, after `ad`.
        cluster: the YAML of the machines, or a mapping with its content; None: this machine.
        strategy: the name of a builder, a builder, a value of the YAML's `strategy`, or a YAML file with that section;
            None: the strategy of the cluster's YAML.
        workers: number of workers on this machine, instead of a cluster.
        replicas: number of replicas of each of these workers.

    Returns:
        The result of the function on the chief, if it can be pickled: arrays, numbers, or containers of them. A Keras
        model returns with its weights and its optimizer's state.

    Raises:
        LaunchError: the function, its arguments or its result cannot be pickled, or the chief's process was killed.
        ResourceSpecError, StrategyError: the machines or the strategy cannot be used.
        Exception: the exception of the function on the chief.
        WorkerFailedError: another worker failed.
    """
    _require_outside_of_a_run()
    _require_callable(function, args)
    spec = _read_cluster(cluster, workers, replicas)
    builder = _read_strategy(strategy)
    payload = None if spec is None else spec.to_payload()
    call = LaunchedCall(function, args, payload, CliOverrides(workers=workers, replicas=replicas), builder)
    name = name_of(function)
    order = _packed(call, name)
    log_to_the_terminal(is_chief=True)
    _warn_of_assigned_globals(function, name)
    returned = _result(run_module(_MODULE, order, (spec or Timeouts()).stop_timeout), name)
    if returned is None:
        _warn_of_copies(function, args, name)
    return returned


def _require_outside_of_a_run() -> None:
    api = sys.modules.get("autodist.runs.dry_run")
    if api is not None and api.active_dry_run() is not None:
        raise LaunchError(
            "launch() starts processes of its own, which `autodist plan` and `autodist verify` cannot analyze. Pass "
            "them a script that calls the function itself: `function(AutoDist())`."
        )
    if CONTROL_VARIABLE in os.environ or Main.of_this_process().is_module(_MODULE):
        raise LaunchError(
            "launch() is called within a run, on one of its workers, and would start another run. Call the function "
            "itself there, or launch it from the notebook or the script."
        )


def _require_callable(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if not callable(function):
        raise LaunchError(f"launch takes a function, but got {function!r:.80}.")
    name = name_of(function)
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise LaunchError(f"{name} does not run when it is called (async, or yield); pass a function that trains.")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # for example a C function, which has no signature
    try:
        signature.bind(None, *args)
    except TypeError as error:
        raise LaunchError(
            f"{name}{signature} cannot be called with an AutoDist and {len(args)} arguments ({error}). Write `def "
            f"{name}(ad, …)`, and pass launch the arguments after `ad`."
        ) from None


def _packed(call: LaunchedCall, name: str) -> bytes:
    label = f"{name}, with its arguments and all that it uses,"
    try:
        order = pack(call, label, _TAKES)
    except LaunchError as error:
        way, value = find_unpicklable(call.function, call.args, lambda one: _why_it_stays(one) is None)
        named = _why_it_stays(value, f"{name} → {way}, a {type(value).__name__},") if way else None
        raise named or error from None
    if len(order) > LARGEST:
        raise LaunchError(
            f"{label} has {len(order) >> 20} MiB, {_largest(call)}and each worker would receive them; the limit is "
            f"{LARGEST >> 20} MiB. Let the function read its data itself, from files that every machine has."
        )
    return order


def _why_it_stays(value: object, what: str = "") -> LaunchError | None:
    """Returns the error of pickling a value; None if it can be pickled."""
    try:
        pack(value, what, _TAKES)
    except LaunchError as error:
        return error
    return None


def _largest(call: LaunchedCall) -> str:
    sizes = {name: len(pack(value, name, "")) for name, value in uses(call.function, call.args).items()}
    name = max(sizes, key=lambda one: sizes[one], default="")
    return f"of which `{name}` has {sizes[name] >> 20}, " if name else ""


def _warn_of_assigned_globals(function: Callable[..., Any], name: str) -> None:
    if names := ", ".join(sets(function)):
        _log.warning(
            "%s assigns %s (`global`) only in the workers' processes; here they do not change. Return them instead.",
            name, names,
        )  # fmt: skip


def _warn_of_copies(function: Callable[..., Any], args: tuple[Any, ...], name: str) -> None:
    kinds = tuple(getattr(sys.modules[m], kind) for m, kind in _TRAINED.items() if m in sys.modules)
    copies = ", ".join(name for name, value in uses(function, args).items() if isinstance(value, kinds))
    if copies:
        _log.warning(
            "%s returned nothing, and its workers had copies of %s, which is unchanged here. To get the trained "
            "values, return it, or its weights.", name, copies,
        )  # fmt: skip


def _read_cluster(cluster: object, workers: int | None, replicas: int | None) -> ResourceSpec | None:
    if cluster is None:
        return None
    if workers is not None or replicas is not None:
        raise LaunchError("pass launch a cluster, or workers and replicas on this machine, not both.")
    if isinstance(cluster, ResourceSpec):
        spec = cluster
    elif isinstance(cluster, Mapping):
        spec = ResourceSpec.from_dict(cluster)
    elif isinstance(cluster, str | os.PathLike):
        spec = ResourceSpec.from_file(cluster)
    else:
        raise LaunchError(
            f"cluster is a {type(cluster).__name__}; pass the path of a YAML file, a mapping or a ResourceSpec."
        )
    if spec.is_given:
        raise LaunchError(
            "launch starts the workers itself, but the cluster has `nodes: given`, for which a scheduler does. Name "
            "the machines."
        )
    return spec


def _read_strategy(strategy: str | BuildsStrategy | Mapping[str, Any] | None) -> BuildsStrategy | None:
    from autodist.strategies import chosen_builder

    if strategy is None:
        return None
    return named_builder(strategy) if isinstance(strategy, str) else chosen_builder(strategy, None)


def _result(ended: Ended, name: str) -> Any:
    if ended.interrupt is not None and ended.status != 0:
        raise ended.interrupt
    if not ended.outcome:
        reason = exit_reason(ended.status, joined=True, done=False)
        raise LaunchError(
            f"{name}: the chief's process {reason}; its last output may show why (a system that is out of memory "
            "ends processes by SIGKILL)."
        )
    outcome: Outcome = pickle.loads(ended.outcome)
    if outcome.value is not None and ended.status != 0:
        reason = exit_reason(ended.status, joined=True, done=False)
        raise LaunchError(f"{name} returned, and then the chief's process {reason}; its last output may show why.")
    return outcome.result()
