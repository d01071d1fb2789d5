"""The base class of kernels (graph-to-graph passes), and their application in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_origin

from autodist.errors import RewriteError
from autodist.graph.origins import origins_in
from autodist.graph.step import CapturedStep, Step
from autodist.kernels.context import Context

__all__ = ["AnyKernel", "Context", "Kernel", "Watcher", "in_order", "phase_after", "run_pipeline"]

In_contra = TypeVar("In_contra", bound=Step, contravariant=True)
"""The phase of the steps that a kernel takes."""
Out_co = TypeVar("Out_co", bound=Step, covariant=True)
"""The phase of the steps that a kernel returns. If it is the one that it takes, a step keeps its own."""


class Kernel(ABC, Generic[In_contra, Out_co]):
    """A pass from a valid graph to a valid graph, which does not modify its input.

    A kernel is a frozen dataclass; its fields are its options. `Kernel[PlacedStep, ReplicatedStep]` takes steps of one
    phase and returns steps of another. A kernel without phases takes every step, and keeps its phase.

    Attributes:
        name: the unique name of the kernel.
        after: maps the name of each kernel that must run before this one to the reason.
        takes: the phase of the steps that it takes.
        makes: the phase of the steps that it returns.
    """

    name: ClassVar[str]
    after: ClassVar[Mapping[str, str]] = {}
    takes: ClassVar[type[Step]] = Step
    makes: ClassVar[type[Step]] = Step

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for base in getattr(cls, "__orig_bases__", ()):
            origin, phases = get_origin(base), get_args(base)
            if isinstance(origin, type) and issubclass(origin, Kernel) and not isinstance(phases[0], TypeVar):
                cls.takes, cls.makes = phases

    @abstractmethod
    def apply(self, step: In_contra, context: Context) -> Out_co:
        """Returns the rewritten step.

        Raises:
            StrategyError: the strategy requires something that this kernel does not support.
            RewriteError: the step cannot be rewritten without changing the training result.
        """


AnyKernel = Kernel[Any, Any]

Watcher = Callable[[str, Step], None]


def phase_after(kernel: AnyKernel, phase: type[Step]) -> type[Step]:
    """Returns the phase of a step of this phase after a kernel.

    Raises:
        TypeError: the kernel does not take steps of this phase.
    """
    if not issubclass(phase, kernel.takes):
        raise TypeError(
            f"the kernel {kernel.name} takes a {kernel.takes.__name__}, and gets a {phase.__name__}: run it after the "
            f"kernel that returns a {kernel.takes.__name__}"
        )
    return phase if kernel.makes is kernel.takes else kernel.makes


def in_order(*kernels: AnyKernel) -> tuple[AnyKernel, ...]:
    """Returns the kernels after two checks: each takes the phase that it gets, and runs after the kernels in `after`.

    Raises:
        TypeError: a kernel does not take the phase of a step after the kernels before it.
        ValueError: a kernel runs before one that is in its `after`.
    """
    phase: type[Step] = CapturedStep
    for k, kernel in enumerate(kernels):
        phase = phase_after(kernel, phase)
        for later in kernels[k:]:
            if later.name in kernel.after:
                raise ValueError(f"{kernel.name} must run after {later.name}: {kernel.after[later.name]}")
    return kernels


def _checked(made: object, phase: type[Step]) -> Step:
    """Returns the result of a kernel, which must be a step of this phase."""
    if isinstance(made, phase):
        return made
    if isinstance(made, Step):
        raise RewriteError(f"apply returned a {type(made).__name__}: return a {phase.__name__}, made from its argument")
    raise RewriteError(
        f"apply returned {made!r} and no step: return the step that it received, or the result of to_step() of a "
        "StepEditor"
    )


def run_pipeline(kernels: Sequence[AnyKernel], step: Step, context: Context, watch: Watcher | None = None) -> Step:
    """Applies the kernels in order; `watch(name, step)` is called with the captured step and after each kernel.

    An exception gets notes with the kernel that raised it and the script lines that created the nodes named in it.
    """
    if watch:
        watch("captured", step)
    for kernel in kernels:
        try:
            phase = phase_after(kernel, type(step))
            step = _checked(kernel.apply(step, context), phase)
        except Exception as error:
            for note in origins_in(str(error), step.origin_of):
                error.add_note(note)
            error.add_note(f"in the kernel {kernel.name}, for worker {context.worker}")
            raise
        if watch:
            watch(kernel.name, step)
    return step
