"""The registry of user-defined kernels and rules, and of their positions in the pipeline."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from autodist.errors import StrategyError
from autodist.graph.step import CapturedStep, Step
from autodist.kernels.base import AnyKernel, Kernel, phase_after
from autodist.logs.formatting import did_you_mean, listed
from autodist.options.registry import Registry

KernelClass = TypeVar("KernelClass", bound=type[AnyKernel])
RuleClass = TypeVar("RuleClass", bound=type[Kernel[CapturedStep, CapturedStep]])

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def register_kernel(*, after: str) -> Callable[[KernelClass], KernelClass]:
    """Adds a user-defined kernel to the pipeline that rewrites steps; a decorator.

        @register_kernel(after="prune")
        @dataclass(frozen=True)
        class CountMultiplications(Kernel):
            name: ClassVar[str] = "count-multiplications"

            def apply(self, step: Step, context: Context) -> Step:
                log.info("worker %d multiplies %d times", context.worker, len(step.graph_index.of_op("MatMul")))
                return step

    The kernel rewrites each step built from then on, for training or evaluation, on every worker. Steps that only set
    variables are left out. `apply` receives the step and the context of the worker, must not modify them, and returns
    the same step or a new one: edit it with `autodist.graph.step_editor.StepEditor(step)` and return its `to_step()`.
    The phase of the step depends on the position. Before `assign-owners` it is a `CapturedStep`, then a `PlacedStep`:
    the kernel must produce the same result on all workers, and added nodes are copied for each replica if they depend
    on the batch. From `replicate` on it is a `ReplicatedStep`, the step of one worker: a copy of the compute part for
    each of its replicas, with pending reductions between them and the update (`reductions`, `stages`).
    `reduce-by-shuffle` and similar kernels replace these by communication. From `place-on-devices` on each new node
    needs a device. A kernel returns a step of the phase that it receives. If it derives from
    `Kernel[ReplicatedStep, ReplicatedStep]`, its position is checked.

    Kernels registered after the same kernel run in order of registration. Every worker runs the script and must
    register the same kernels with the same options. `AUTODIST_DUMP` also writes and verifies the step after them.

    Args:
        after: the name of the kernel after which this one runs: a built-in one (`autodist.kernels.KERNELS`) or a
            user-defined one that is already registered. Former names of built-in kernels still work.

    Raises:
        StrategyError: `after` names no kernel, the decorated object is not a kernel, its name is taken, or it takes
            steps of another phase than those at its position.
    """

    def register(kernel: KernelClass) -> KernelClass:
        name: Any = getattr(kernel, "name", None)
        names = _KERNELS.names()
        earlier = _FORMER_NAMES.get(after, after)
        if earlier not in names or (name in _registered and name in _chain(earlier)):
            raise StrategyError(
                f"The kernel {name} is to run after {after}, but no kernel of that name is registered before it."
                f"{did_you_mean(after, names)} There are {listed(names)}."
            )
        decorated: object = kernel  # of any kind: the registry refuses what is not a kernel
        if isinstance(decorated, type) and issubclass(decorated, Kernel):
            _require_phase(decorated, earlier)
        _KERNELS.register(kernel, name)
        _registered[kernel.name] = (earlier, kernel())
        return kernel

    return register


def register_rule(*, group: str) -> Callable[[RuleClass], RuleClass]:
    """Adds a user-defined rule to a kernel that applies rules until none changes the step; a decorator.

        @register_rule(group="rewrite-rows")
        @dataclass(frozen=True)
        class DoubleNegatives(Rule):
            name: ClassVar[str] = "double-negatives"
            ops: ClassVar[tuple[str, ...]] = ("Neg",)

            def match(self, facts: Facts, node: NodeDef) -> Rewrite | Refusal | None:
                ...

    `match` inspects a node and returns a function that rewrites it, or a `Refusal` with the reason, which is logged. It
    reads the graph from `facts.editor`, and shares analyses with other rules by `facts.once(find)`. The rewrite edits
    the graph by `facts.editor`. It may also add state to the step: `facts.editor.initialize` adds nodes that run before
    the first step, and `facts.change(…)` sets other fields, whose values are `facts.current(…)`. A rule that `match`
    cannot express derives from `Kernel[CapturedStep, CapturedStep]` instead; its `apply` returns the step that it
    receives if it changes nothing.

    The rules of a group are applied in turn, those of scripts last in the order of registration. If two rules undo each
    other's rewrites, an error names them. Every worker must register the same rules with the same options.

    Args:
        group: the name of the kernel, such as "rewrite-rows" or "apply-constraints".

    Raises:
        StrategyError: `group` names no kernel with rules, the decorated object is not a rule, or its name is taken.
    """

    def register(rule: RuleClass) -> RuleClass:
        groups = [kernel.name for kernel in _ours() if hasattr(kernel, "rules")]
        if group not in groups:
            raise StrategyError(
                f"The rule {getattr(rule, 'name', None)} is to join the group {group}, but no kernel of that name has "
                f"rules.{did_you_mean(group, groups)} There are {listed(groups)}."
            )
        _RULES.register(rule, getattr(rule, "name", None))
        if not issubclass(CapturedStep, rule.takes):
            raise StrategyError(
                f"The rule {rule.name} takes a {rule.takes.__name__}, but the kernel {group} rewrites a CapturedStep. "
                "Derive it from Rule or from Kernel[CapturedStep, CapturedStep]."
            )
        _registered_rules[rule.name] = (group, rule())
        return rule

    return register


def registered_rules(group: str) -> tuple[Kernel[CapturedStep, CapturedStep], ...]:
    """Returns the user-defined rules of a group, in order of registration."""
    return tuple(rule for of, rule in _registered_rules.values() if of == group)


def _require_phase(kernel: type[AnyKernel], after: str) -> None:
    """Checks that a kernel keeps the phase of a step, and takes the phase of the steps at its position."""
    phase: type[Step] = CapturedStep
    for earlier in with_registered(_ours()):
        phase = phase_after(earlier, phase)
        if earlier.name == after:
            break
    if kernel.makes is not kernel.takes:
        raise StrategyError(
            f"The kernel {kernel.name} takes a {kernel.takes.__name__} and returns a {kernel.makes.__name__}, but a "
            "registered kernel returns a step of the phase that it receives: name the same phase twice."
        )
    if not issubclass(phase, kernel.takes):
        raise StrategyError(
            f"The kernel {kernel.name} takes a {kernel.takes.__name__}, but the step after {after} is a "
            f"{phase.__name__}. Register it after another kernel, or derive it from Kernel[{phase.__name__}, "
            f"{phase.__name__}]."
        )


def with_registered(kernels: Sequence[AnyKernel]) -> tuple[AnyKernel, ...]:
    """Returns the kernels, each followed by its user-defined kernels; unchanged if they do not replicate the step."""
    if not any(kernel.name == "replicate" for kernel in kernels):
        return tuple(kernels)
    return tuple(one for kernel in kernels for one in (kernel, *_kernels_after(kernel.name)))


def registered_kernels() -> tuple[str, ...]:
    """Returns the user-defined kernels and rules with options and positions, for comparison between workers."""
    kernels = (f"{name} after {after}: {kernel!r}" for name, (after, kernel) in _registered.items())
    rules = (f"{name} in {group}: {rule!r}" for name, (group, rule) in _registered_rules.items())
    return (*kernels, *rules)


_FORMER_NAMES = {
    "advance-alike": "advance-generators",
    "leave-out-compute": "remove-compute",
    "read-far-variables": "read-remote-variables",
    "read-proxies": "read-cached-copies",
    "set-pace": "set-sync-mode",
    "tell-table-writes": "report-table-writes",
    "whole-cotangents": "reduce-before-postprocessing",
}
"""Names that a script may still use for the position of its kernel."""

_registered: dict[str, tuple[str, AnyKernel]] = {}
"""Maps each name to the kernel and the name of the one that it runs after; in order of registration."""


_registered_rules: dict[str, tuple[str, Kernel[CapturedStep, CapturedStep]]] = {}
"""Maps each name to the group and the rule; in order of registration."""


def _chain(name: str) -> Iterator[str]:
    """Yields a kernel's name, and the names of those after which it directly or indirectly runs."""
    yield name
    if name in _registered:
        yield from _chain(_registered[name][0])


def _kernels_after(name: str) -> Iterator[AnyKernel]:
    for after, kernel in _registered.values():
        if after == name:
            yield kernel
            yield from _kernels_after(kernel.name)


def _fault(found: Any) -> str | None:
    wanted = "a kernel is a frozen dataclass that derives from autodist.kernels.Kernel and has apply(step, context)."
    if not isinstance(found, type) or not issubclass(found, Kernel):
        return f"a {'class that is none' if isinstance(found, type) else type(found).__name__}; {wanted}"
    if not dataclasses.is_dataclass(found) or inspect.isabstract(found):
        return f"a class that is {'no dataclass' if not inspect.isabstract(found) else 'without apply'}; {wanted}"
    if not isinstance(name := getattr(found, "name", None), str) or not _NAME.fullmatch(name):
        return f"named {name!r}; set a class variable name of small letters, digits and dashes between them."
    needed = [f.name for f in dataclasses.fields(found) if f.init and not _has_default(f)]
    return f"one that cannot be made without {listed(needed)}; set a default for each field." if needed else None


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _ours() -> tuple[AnyKernel, ...]:
    kernels: tuple[AnyKernel, ...] = importlib.import_module("autodist.kernels.pipeline").KERNELS
    return kernels


def _load_ours() -> None:
    for kernel in _ours():
        _KERNELS.register(type(kernel), kernel.name)


def _load_our_rules() -> None:
    for kernel in _ours():
        for rule in getattr(kernel, "rules", ()):
            _RULES.register(type(rule), rule.name)


_KERNELS = Registry("kernel", "my_package.MyKernel", _fault, _load_ours)
_RULES = Registry("rule", "my_package.MyRule", _fault, _load_our_rules)
