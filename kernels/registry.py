"""Kernels of a script's own, and behind which of ours they stand."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from autodist.errors import StrategyError
from autodist.kernels.base import Kernel
from autodist.logs.formatting import did_you_mean, listed
from autodist.options.registry import Registry

KernelClass = TypeVar("KernelClass", bound=type[Kernel])

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def register_kernel(*, after: str) -> Callable[[KernelClass], KernelClass]:
    """Puts a kernel of a script's own into the pipeline that rewrites steps; a decorator.

        @register_kernel(after="prune")
        @dataclass(frozen=True)
        class CountMultiplications(Kernel):
            name: ClassVar[str] = "count-multiplications"

            def apply(self, item: Step, context: Context) -> Step:
                log.info("worker %d multiplies %d times", context.worker, len(item.wiring.of_op("MatMul")))
                return item

    It rewrites each step that is made from then on, training or evaluation, on every worker; what only sets variables
    it does not see. `apply` is given the step and for which worker it is rewritten, leaves both as they are and returns
    the step or another one: `autodist.graph.step_editor.StepEditor(item)` has the verbs, its `to_item()` the result.
    What a step has depends on the phase. Before `replicate` it is the captured step, which has to stay the same on all
    workers, and what is added is copied for each replica where it depends on the batch. From `replicate` on it is one
    worker's, with a copy of the compute part for each of its replicas and joins between them and the update (`joins`,
    `stages`), which `reduce-by-shuffle` and its like replace by communication; from `place-on-devices` on each
    new node needs a device.

    Kernels behind the same one stand in the order in which they are registered. Every worker runs the script and has to
    register the same, with the same options. `AUTODIST_DUMP` writes and verifies the step after it as after ours.

    Args:
        after: the name of the kernel behind which it stands, one of ours (`autodist.kernels.KERNELS`) or of the
            script's own that is registered already.

    Raises:
        StrategyError: `after` names no kernel, what is registered is none, or another kernel has its name.
    """

    def known(kernel: KernelClass) -> KernelClass:
        name: Any = getattr(kernel, "name", None)
        names = _KERNELS.names()
        if after not in names or (name in _own and name in _chain(after)):
            raise StrategyError(
                f"The kernel {name} is to stand after {after}, and there is none of that name before it."
                f"{did_you_mean(after, names)} There are {listed(names)}."
            )
        _KERNELS.register(kernel, name)
        _own[kernel.name] = (after, kernel())
        return kernel

    return known


def with_own(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """The kernels, each followed by the script's own that stand behind it; as they are if they replicate no step."""
    if not any(kernel.name == "replicate" for kernel in kernels):
        return tuple(kernels)
    return tuple(one for kernel in kernels for one in (kernel, *_behind(kernel.name)))


def own_kernels() -> tuple[str, ...]:
    """The script's own kernels, each with its options and behind which it stands, as workers compare them."""
    return tuple(f"{name} after {after}: {kernel!r}" for name, (after, kernel) in _own.items())


_own: dict[str, tuple[str, Kernel]] = {}
"""By name, behind which kernel it stands, in the order in which they were registered."""


def _chain(name: str) -> Iterator[str]:
    """A kernel's name, and the names of those that it directly and indirectly stands behind."""
    yield name
    if name in _own:
        yield from _chain(_own[name][0])


def _behind(name: str) -> Iterator[Kernel]:
    for after, kernel in _own.values():
        if after == name:
            yield kernel
            yield from _behind(kernel.name)


def _fault(found: Any) -> str | None:
    wanted = "a kernel is a frozen dataclass that derives from autodist.kernels.Kernel and has apply(item, context)."
    if not isinstance(found, type) or not issubclass(found, Kernel):
        return f"a {'class that is none' if isinstance(found, type) else type(found).__name__}; {wanted}"
    if not dataclasses.is_dataclass(found) or inspect.isabstract(found):
        return f"a class that is {'no dataclass' if not inspect.isabstract(found) else 'without apply'}; {wanted}"
    if not isinstance(name := getattr(found, "name", None), str) or not _NAME.fullmatch(name):
        return f"named {name!r}; give it a class variable name of small letters, digits and dashes between them."
    needed = [f.name for f in dataclasses.fields(found) if f.init and not _has_default(f)]
    return f"one that cannot be made without {listed(needed)}; give each field a default." if needed else None


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _load_ours() -> None:
    for kernel in importlib.import_module("autodist.kernels.pipeline").KERNELS:
        _KERNELS.register(type(kernel), kernel.name)


_KERNELS = Registry("kernel", "my_package.MyKernel", _fault, _load_ours)
