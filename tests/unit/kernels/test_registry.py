"""Custom kernels of a script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf

from autodist.errors import CaptureMismatchError, RewriteError, StrategyError
from autodist.graph.editor import NodeDef
from autodist.graph.step import PlacedStep, ReplicatedStep, Step
from autodist.graph.step_editor import StepEditor
from autodist.kernels import (
    KERNELS,
    LOCAL_KERNELS,
    SETTING_KERNELS,
    Context,
    Facts,
    Kernel,
    Refusal,
    Rewrite,
    Rule,
    register_kernel,
    register_rule,
    registered_kernels,
    registry,
    rewrite,
)
from autodist.kernels.pipeline import DUMP_VARIABLE
from autodist.kernels.registry import with_registered
from autodist.kernels.rows.rewrite_rows import RewriteRows
from autodist.runs.fingerprint import Fingerprint, require_equal
from tests.unit.kernels.in_one_process import capture_one_weight, plan, train
from tests.unit.kernels.rewrites import step_of


@pytest.fixture(autouse=True)
def only_ours() -> Iterator[None]:
    registry._KERNELS.names()
    registry._RULES.names()
    known = [(one, dict(one._known)) for one in (registry._KERNELS, registry._RULES)]
    yield
    registry._registered.clear()
    registry._registered_rules.clear()
    for one, names in known:
        one._known.clear()
        one._known.update(names)


@dataclass(frozen=True)
class HalfSteps(Kernel):
    """A kernel that multiplies the amount subtracted from a variable by `factor`."""

    factor: float = 0.5
    name: ClassVar[str] = "half-steps"

    def apply(self, step: Step, context: Context) -> Step:
        editor = StepEditor(step)
        for node in step.graph_index.of_op("AssignSubVariableOp"):
            with editor.subgraph(f"half_steps/{node.name}") as f:
                half = f.input(node.input[1], tf.float64, [2]) * tf.constant(self.factor, tf.float64)
            editor.set_inputs(node.name, [node.input[0], f.name(half), *node.input[2:]])
        return editor.to_step()


@dataclass(frozen=True)
class Silent(Kernel):
    """Leaves the step as it is."""

    name: ClassVar[str] = "silent"

    def apply(self, step: Step, context: Context) -> Step:
        return step


def names_of(kernels):
    return [kernel.name for kernel in kernels]


@pytest.mark.parametrize("after", ["split-bundles", "replicate", "reduce-by-shuffle", "prune"])
def test_it_rewrites_the_step_of_every_worker_before_and_after_the_replicas_are_made(after):
    step, batch = capture_one_weight(), np.arange(8.0).reshape(4, 2)
    trained = []
    for kernel in (None, HalfSteps):
        if kernel is not None:
            register_kernel(after=after)(kernel)
        workers = train(step, plan(step.step, workers=2, replicas=2), [[batch]]).variables
        trained.append([values["weight"] for values in workers])
    whole, half = (1 - np.stack(one) for one in trained)
    np.testing.assert_allclose(whole[0], batch.mean(0) / 2, rtol=1e-13)
    np.testing.assert_allclose(half, whole / 2, rtol=1e-13)


def test_it_stands_behind_the_kernel_that_is_named_and_those_registered_before_it():
    register_kernel(after="replicate")(Silent)
    register_kernel(after="replicate")(HalfSteps)

    @register_kernel(after="silent")
    @dataclass(frozen=True)
    class BehindSilent(Silent):
        name: ClassVar[str] = "behind-silent"

    found = names_of(with_registered(KERNELS))
    at = found.index("replicate")
    assert found[at + 1 : at + 4] == ["silent", "behind-silent", "half-steps"]
    assert [name for name in found if name in names_of(KERNELS)] == names_of(KERNELS)


def test_runs_that_only_set_variables_or_concern_iterators_have_no_user_kernels():
    register_kernel(after="prune")(Silent)
    assert with_registered(SETTING_KERNELS) == SETTING_KERNELS and with_registered(LOCAL_KERNELS) == LOCAL_KERNELS


def test_an_error_in_it_says_its_name_and_the_worker():
    @register_kernel(after="replicate")
    @dataclass(frozen=True)
    class Fails(Silent):
        name: ClassVar[str] = "fails"

        def apply(self, item: Step, context: Context) -> Step:
            raise KeyError("some node")

    step = capture_one_weight()
    with pytest.raises(KeyError, match="some node") as error:
        rewrite(step.step, Context(plan(step.step, workers=2), 1))
    assert error.value.__notes__ == ["in the kernel fails, for worker 1"]


def test_a_kernel_has_to_return_a_step():
    @register_kernel(after="replicate")
    @dataclass(frozen=True)
    class Forgets(Silent):
        name: ClassVar[str] = "forgets"

        def apply(self, item: Step, context: Context) -> Step:
            return None  # type: ignore[return-value]

    step = capture_one_weight()
    with pytest.raises(RewriteError, match="returned None and no step: return the step") as error:
        rewrite(step.step, Context(plan(step.step), 0))
    assert error.value.__notes__ == ["in the kernel forgets, for worker 0"]


def test_its_step_is_dumped_and_verified_as_ours_are(tmp_path, monkeypatch):
    monkeypatch.setenv(DUMP_VARIABLE, str(tmp_path))
    register_kernel(after="replicate")(Silent)
    step = capture_one_weight()
    rewrite(step.step, Context(plan(step.step, replicas=2), 0), "some_step")
    assert [f.name for f in tmp_path.glob("some_step/worker_0/*_silent")] == [
        f"{names_of(KERNELS).index('replicate') + 2}_silent"
    ]

    @register_kernel(after="silent")
    @dataclass(frozen=True)
    class Breaks(Silent):
        name: ClassVar[str] = "breaks"

        def apply(self, item: Step, context: Context) -> Step:
            return replace(item, targets=(*item.targets, "no_such_node"))

    with pytest.raises(RewriteError, match="the target no_such_node is not in the step's graph"):
        rewrite(step.step, Context(plan(step.step, replicas=2), 0), "another_step")


def test_a_kernel_is_refused_at_a_position_where_steps_have_another_phase():
    @dataclass(frozen=True)
    class NeedsReplicas(Kernel[ReplicatedStep, ReplicatedStep]):
        name: ClassVar[str] = "needs-replicas"

        def apply(self, step, context):
            return step

    with pytest.raises(StrategyError, match="takes a ReplicatedStep, but the step after assign-owners is a PlacedStep"):
        register_kernel(after="assign-owners")(NeedsReplicas)
    register_kernel(after="replicate")(NeedsReplicas)  # the refused name is free


def test_a_kernel_that_returns_another_phase_is_refused():
    @dataclass(frozen=True)
    class Replicates(Kernel[PlacedStep, ReplicatedStep]):
        name: ClassVar[str] = "replicates"

        def apply(self, step, context):
            return ReplicatedStep.of(step)

    with pytest.raises(StrategyError, match="takes a PlacedStep and returns a ReplicatedStep.*name the same phase twi"):
        register_kernel(after="assign-owners")(Replicates)


def test_a_position_may_be_given_by_a_former_name():
    for former, name in registry._FORMER_NAMES.items():
        assert former not in registry._KERNELS.names() and name in registry._KERNELS.names()
    register_kernel(after="set-pace")(Silent)
    names = [kernel.name for kernel in with_registered(KERNELS)]
    assert names[names.index("silent") - 1] == "set-sync-mode"


@pytest.mark.parametrize("after, meant", [("replicat", "Did you mean replicate?"), ("silent", ""), ("xyz", "")])
def test_a_kernel_that_is_not_there_has_nothing_behind_it(after, meant):
    with pytest.raises(StrategyError, match=f"silent is to run after {after}, but no kernel .*{meant}.* There are "):
        register_kernel(after=after)(Silent)
    assert registered_kernels() == ()


def test_a_kernel_cannot_stand_behind_one_that_stands_behind_it():
    register_kernel(after="replicate")(Silent)
    register_kernel(after="silent")(HalfSteps)
    with pytest.raises(StrategyError, match="silent is to run after half-steps"):
        register_kernel(after="half-steps")(Silent)


@pytest.mark.parametrize("taken", ["replicate", "silent"])
def test_a_name_is_one_kernel_s(taken):
    register_kernel(after="replicate")(Silent)

    @dataclass(frozen=True)
    class Another(Silent):
        name: ClassVar[str] = taken

    with pytest.raises(StrategyError, match=f"A kernel named {taken} is registered already, from "):
        register_kernel(after="replicate")(Another)


class NoDataclass(Kernel):
    name: ClassVar[str] = "no-dataclass"

    def apply(self, step: Step, context: Context) -> Step:
        return step


@dataclass(frozen=True)
class WithoutApply(Kernel):
    name: ClassVar[str] = "without-apply"


@dataclass(frozen=True)
class Unnamed(Kernel):
    def apply(self, step: Step, context: Context) -> Step:
        return step


@dataclass(frozen=True)
class Needs(Silent):
    name: ClassVar[str] = "needs"
    factor: float


@pytest.mark.parametrize(
    "found, fault",
    [
        (lambda item, context: item, "is not a kernel but a function; a kernel is a frozen dataclass"),
        (dict, "dict is not a kernel but a class that is none; a kernel"),
        (NoDataclass, "a class that is no dataclass"),
        (WithoutApply, "a class that is without apply"),
        (Unnamed, "named None; set a class variable"),
        (Needs, "one that cannot be made without factor; set a default for each field"),
        (Silent(), "is not a kernel but a Silent"),
    ],
)
def test_an_object_that_is_no_kernel_is_refused_with_the_reason(found, fault):
    with pytest.raises(StrategyError, match=fault):
        register_kernel(after="replicate")(found)
    assert registered_kernels() == ()


def test_workers_that_register_other_kernels_are_told_which():
    step = capture_one_weight().step
    register_kernel(after="replicate")(HalfSteps)
    chief, _ = Fingerprint.unpack(Fingerprint.of(step, registered_kernels()).packed_with(b""))
    require_equal(chief, Fingerprint.of(step, registered_kernels()), "worker 1")
    told = (
        r"\n    chief:  half-steps after replicate: HalfSteps\(factor=0.5\)\n    here:   none\nThe script must register"
    )
    with pytest.raises(CaptureMismatchError, match=told):
        require_equal(chief, Fingerprint.of(step), "worker 1")


def test_a_rule_of_a_script_joins_a_group_and_may_add_state():
    @register_rule(group="rewrite-rows")
    @dataclass(frozen=True)
    class LogsOfRoots(Rule):
        name: ClassVar[str] = "logs-of-roots"
        ops: ClassVar[tuple[str, ...]] = ("Log",)

        def match(self, facts: Facts, node: NodeDef) -> Rewrite | Refusal | None:
            root = facts.editor[node.input[0]]
            if root.op != "Sqrt":
                return Refusal(f"{root.name} is no root")

            def rewrite() -> None:
                facts.editor.set_inputs(node.name, [root.input[0]])
                facts.editor.run(facts.current("targets") or [node.name])
                facts.change(is_whole=True, rows=(facts.current("rows") or 0) + 1)

            return rewrite

    step = step_of("a = Placeholder()\nr = Sqrt(a)\nl = Log(r)\nm = Log(r)\nn = Log(a)")
    made = RewriteRows().apply(step, Context(plan(step), 0))
    assert [list(made.graph_index.nodes[name].input) for name in "lmn"] == [["a"]] * 3
    assert made.is_whole and made.rows == 2 and made.targets
    assert registered_kernels() == ("logs-of-roots in rewrite-rows: " + repr(LogsOfRoots()),)


@pytest.mark.parametrize("group, message", [("rewrite-row", "Did you mean rewrite-rows"), ("prune", "There are")])
def test_a_rule_needs_a_group(group, message):
    with pytest.raises(StrategyError, match=f"is to join the group {group}, but no kernel.*{message}"):
        register_rule(group=group)(HalfSteps)


def test_a_rule_takes_captured_steps():
    @dataclass(frozen=True)
    class Late(Kernel[ReplicatedStep, ReplicatedStep]):
        name: ClassVar[str] = "late"

        def apply(self, step: ReplicatedStep, context: Context) -> ReplicatedStep:
            return step

    with pytest.raises(StrategyError, match="The rule late takes a ReplicatedStep, but the kernel rewrite-rows"):
        register_rule(group="rewrite-rows")(Late)
