"""`autodist plan` of scripts with several training steps, none of which runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from autodist.cli.plans import Plans
from tests.unit.cli.planning import CALLS, GAN, HEAD, STEP, plan, plans_of, write


def tables_of_gan(*words: str) -> tuple[list[tuple[str, str, str | None]], str]:
    """Returns the name, the trained table and its owner for each step; and the note on the planned step."""
    result = plan("--json", "--workers", "2", "--strategy", "PSLoadBalancing", *words)
    assert result.exit_code == 0, result.stderr
    found = Plans.model_validate_json(result.stdout)
    return [(p.step, v.name, v.shards[0].owner) for p in found.plans for v in p.variables], found.note


CRITIC, MAKER = ("critic_step", "critic", "localhost:0"), ("maker_step", "maker", "localhost:1")


def test_both_steps_of_a_gan_are_planned_the_second_with_the_loads_of_the_first(tmp_path: Path) -> None:
    script = write(tmp_path, GAN + CALLS + "maker_step(ids, found['rows'])\nraise RuntimeError('it went on')")
    found, note = tables_of_gan(script)
    assert found == [CRITIC, MAKER]
    assert note.startswith("Planned: critic_step, maker_step. The script was ended there. Later steps")
    told = plan("--workers", "2", "--strategy", "PS", "--strategy", "AllReduce", script).stdout
    assert "variables of critic_step" in told and "variables of maker_step" in told and "Planned: critic_step" in told


def test_no_step_is_made_where_the_script_goes_on_to_its_end(tmp_path: Path) -> None:
    later = """
for _ in range(3): maker_step(ids, found['rows'])
assert not np.any(critic.numpy()) and not np.any(maker.numpy())
"""
    found, note = tables_of_gan("--calls", "9", write(tmp_path, GAN + CALLS + later))
    assert (found, note) == ([CRITIC, MAKER], "Planned: critic_step, maker_step. The script then ended.")


def test_a_script_whose_other_functions_train_nothing_is_ended_at_its_first_step(tmp_path: Path) -> None:
    text = STEP.replace(
        "@ad.function", "@ad.function\n    def test(ids): return tf.gather(table, ids)\n\n    @ad.function"
    )
    result = plan("--json", write(tmp_path, text))
    assert result.exit_code == 0, result.stderr
    found = Plans.model_validate_json(result.stdout)
    assert [one.step for one in found.plans] == ["step"]
    assert found.note.startswith("Planned: step. The script was ended there. Later steps are not shown")


@pytest.mark.parametrize(
    ("later", "end"),
    [
        (CALLS, "The script was ended when it called a step again, before maker_step."),
        ("1 / (float(found['loss']) - 1)", "After that, the script failed: ZeroDivisionError: "),
        ("", "The script then ended."),
    ],
)
def test_it_is_told_why_a_later_step_is_not_planned(tmp_path: Path, later: str, end: str) -> None:
    found, note = tables_of_gan(write(tmp_path, GAN + CALLS + later))
    assert found == [CRITIC]
    assert note.startswith(f"Planned: critic_step. {end}")


def test_a_step_behind_several_calls_of_another_is_planned_where_so_many_are_asked_for(tmp_path: Path) -> None:
    script = write(tmp_path, GAN + 3 * CALLS + "maker_step(ids, found['rows'])\nraise RuntimeError('it went on')")
    assert tables_of_gan(script)[0] == [CRITIC]
    found, note = tables_of_gan("--calls", "4", script)
    assert found == [CRITIC, MAKER]
    assert "The script was ended at call 4 of a training step." in note


def test_a_script_whose_step_returns_a_shape_that_a_run_shows_is_ended_there(tmp_path: Path) -> None:
    text = GAN.replace('"rows": rows}', '"rows": rows, "some": tf.boolean_mask(rows, rows[:, 0] > 0)}')
    found, note = tables_of_gan(write(tmp_path, text + CALLS + "maker_step(ids, found['rows'])"))
    assert found == [CRITIC]
    assert note.startswith(
        "Planned: critic_step. An output of that step has a shape that is known only after the step runs: "
    )


def test_a_step_that_is_part_of_another_is_not_waited_for(tmp_path: Path) -> None:
    text = """
@ad.function
def both(ids):
    critic_step(ids, tf.zeros((tf.shape(ids)[0], 2), tf.float64))
    maker_step(ids, tf.zeros((tf.shape(ids)[0], 2), tf.float64))
both(ids)
raise RuntimeError('it went on')
"""
    found, _ = tables_of_gan(write(tmp_path, GAN + text))
    assert found == [("both", "critic", "localhost:0"), ("both", "maker", "localhost:1")]


def test_fit_goes_on_with_made_up_logs_where_that_is_asked_for(tmp_path: Path) -> None:
    text = """
ad = AutoDist()
with ad.scope():
    for units in (5, 6):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units)])
        model.compile("sgd", "mse", metrics=["mae"])
        print(model.fit(np.zeros((8, 6)), np.zeros((8, units)), batch_size=4, verbose=0).history)
"""
    script = write(tmp_path, HEAD + text)
    result = plan("--json", "--workers", "2", "--calls", "3", script)
    assert result.exit_code == 0, result.stderr
    found = Plans.model_validate_json(result.stdout).plans
    assert [(one.step, one.variables[0].shape) for one in found] == [
        ("train_step", (6, 5)),
        ("train_step (2)", (6, 6)),
    ]
    assert [one.step for one in plans_of("--workers", "2", script)] == ["train_step"]
