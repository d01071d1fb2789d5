"""The Keras callback that saves a `fit`, and resumes it at the epoch and batch of the last checkpoint."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from autodist.capture.keras.model_state import BEFORE_STEP
from autodist.capture.keras.skipped_batches import skip_batches
from autodist.checkpoint.checkpoints import Checkpoints
from autodist.checkpoint.content import Content
from autodist.checkpoint.extra_state import ExtraState
from autodist.checkpoint.fit_state import FitDraws, arrays_in, set_states, states_of, without_arrays, writer_of
from autodist.checkpoint.folder import Folder
from autodist.checkpoint.read import read_about, require_seen
from autodist.checkpoint.save_schedule import Schedule
from autodist.errors import CheckpointError
from autodist.logs.terminal import ALIKE_EVERYWHERE
from autodist.reading.file_sharding import sharding_changed
from autodist.runs.run import Run
from autodist.runtime.draws import Draws

log = logging.getLogger("autodist")

FIT = "fit"
"""Value of `made_by` in the side file of a checkpoint that a `fit` saved."""

_SUFFIX = ".callbacks.npz"
_SEARCH = "the search for a checkpoint of fit"


class CheckpointCallback(keras.callbacks.Callback):
    """Saves the model, its optimizer and the position in `fit`; created by `AutoDist.checkpoint_callback`.

    It saves before a batch, after all callbacks of the previous batch, and at the end of `fit`.

    Args:
        run: the run that trains the model.
        folder: the folder of the checkpoints.
        keep: the number of checkpoints to keep.
        every_steps: saves after this many steps; None: steps do not count.
        every_minutes: saves after this many minutes; None: time does not count.
        on_preempt: True if SIGTERM requests a save, so that neither of these is needed.

    Attributes:
        others: the other callbacks of the `fit`, whose states are saved; the history is always saved.
    """

    def __init__(
        self,
        run: Run,
        folder: str | os.PathLike[str],
        keep: int,
        every_steps: int | None,
        every_minutes: float | None,
        on_preempt: bool = False,
    ) -> None:
        super().__init__()
        if every_steps is None and every_minutes is None and not on_preempt:
            raise ValueError("neither every_steps nor every_minutes is set; pass one, or both.")
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"every_steps is {every_steps!r}; it must be a number of training steps, at least 1.")
        if every_minutes is not None and not every_minutes > 0:
            raise ValueError(f"every_minutes is {every_minutes!r}; it must be a number of minutes above 0.")
        if keep < 1:
            raise ValueError(f"keep is {keep!r}; it must be the number of checkpoints to keep, at least 1.")
        self._run, self.folder, self._keep = run, os.path.abspath(os.path.expanduser(folder)), keep
        self._every_steps, self._every_minutes = every_steps, every_minutes
        self.others: list[keras.callbacks.Callback] = []
        self.schedule: Schedule | None = None
        self._checkpoints: Checkpoints | None = None
        self._fitted_model: keras.Model | None = None
        self._fit = -1
        self._epoch = 0
        self._first_epoch: int | None = None
        self._resumed: Mapping[str, Any] = {}
        self._arrays: Mapping[str, np.ndarray] = {}
        self._over: list[list[Any]] = []
        self._has_position = False
        self._draws = FitDraws()

    def before_fit(self, epochs: int) -> None:
        """Called before Keras inspects the data of a `fit`; every worker calls it.

        Args:
            epochs: the number of the last epoch, from 1.
        """
        self._find_position()
        if self.restores and self._lacks_epochs(epochs):
            self._resumed = {**self._resumed, "is_over": False, "epoch": self._resumed["epoch"] + 1, "batch": 0}
            self._draws.go_on()
        if self.restores and not self._resumed["is_over"]:
            self._draws.begin_again()
        else:
            self._draws.begin_fit()

    def _lacks_epochs(self, epochs: int) -> bool:
        """Returns True if the `fit` of the earlier run made all of its epochs, and more are requested now."""
        made = self._resumed["epoch"] + 1
        return bool(self._resumed["is_over"] and self._resumed.get("epochs") == made < epochs)

    @property
    def restores(self) -> bool:
        """True if the next `fit` restores the values of an earlier run."""
        return self._fit + 1 == self._resumed.get(FIT, -1)

    # -- called by Keras -------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        model = self.model
        if self._fitted_model is not None and self._fitted_model is not model:
            raise CheckpointError(
                f"{model.name} is fitted with the checkpoints of {self._fitted_model.name} in {self.folder}, and a "
                "folder holds those of one model. Create a callback for each: ad.checkpoint_callback(folder, "
                "every_minutes=10)."
            )
        self._fit += 1
        if self._checkpoints is None or not self._has_same_optimizer():
            self._fitted_model, self._optimizer = model, model.optimizer
            self._checkpoints = Checkpoints(
                self._run, self.folder, self._keep, {"model": model, "optimizer": model.optimizer}
            )
        self._checkpoints.claim()
        self._find_position()
        at = self._resumed.get(FIT, -1)
        if self._fit == at:
            self._restore(self._checkpoints)
        if self.schedule is None:
            self.schedule = Schedule(
                self._run.index == 0,
                lambda decision: self._run.coordination.share_text(decision, "a batch of fit"),
                self._every_steps,
                self._every_minutes,
                self._run.step,
            )
            self._run.observer.on_schedule(self.schedule)
        self._epochs_before = model._initial_epoch
        self._first_epoch = None
        if self._fit < at or (self._fit == at and self._resumed["is_over"]):
            model._initial_epoch = self.params.get("epochs", 0) or 1  # all of them are done
        elif self._fit == at:
            model._initial_epoch = self._resumed["epoch"]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._fit == self._resumed.get(FIT) and epoch == self._resumed["epoch"] and not self._resumed["is_over"]:
            resumed, self._resumed = self._resumed, {}
            set_states(self._with_history(), resumed["callbacks"], self._arrays)
            taken = resumed["batch"]
            if taken and resumed.get("dealt", []) != self._replica_workers():
                log.warning("%s", sharding_changed(taken), extra=ALIKE_EVERYWHERE)
                taken = 0
            else:
                self._give_back_metrics(resumed["metrics"])
            skip_batches(epoch - resumed["first_epoch"], taken, self._draws)
            self._first_epoch = resumed["first_epoch"]
        else:
            if self._first_epoch is None:
                self._first_epoch = epoch
            self._draws.begin_epoch()
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._draws.after_batch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._draws.end_epoch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.schedule is not None and self.schedule.is_due(self._run.step):
            self._save(batch, is_over=False, background=True)

    def on_train_end(self, logs: Any = None) -> None:
        if self._fit <= self._resumed.get(FIT, -1):  # it was over in the earlier run, and did no step now
            set_states(self._with_history(), self._resumed["fits"][self._fit], {})
            self._draws.pass_fit()
        else:
            self._draws.end_fit()
            self._save(0, is_over=True, background=False)
        self._over.append(without_arrays(states_of(self._with_history())[0]))
        self.model._initial_epoch = self._epochs_before

    # --------------------------------------------------------------------------------------------------------------

    def _replica_workers(self) -> list[int]:
        """Returns the reading worker of each replica if files are sharded, else an empty list."""
        return list(self._run.spec.replica_workers) if self._run.shards_files else []

    def _has_same_optimizer(self) -> bool:
        return self._optimizer is self.model.optimizer  # compiling again replaces it

    def _with_history(self) -> list[keras.callbacks.Callback]:
        return [*self.others, self.model.history]

    def _find_position(self) -> None:
        """Reads the position of an earlier run; its finished fits are not repeated. Values are restored later."""
        if self._has_position:
            return
        self._has_position = True
        position: dict[str, Any] = {}
        prefix = Folder(self.folder).latest() if self._run.index == 0 else None
        if prefix is not None:
            about = read_about(prefix)
            if about.get("made_by") != FIT:
                raise CheckpointError(
                    f"{prefix} was not saved by a `fit`, so it has no epoch to resume at. Name another folder, or "
                    "restore it with ad.checkpoint before `fit`."
                )
            position = {**about[FIT], "prefix": prefix, "step": about["step"]}
        self._resumed = json.loads(self._run.coordination.share_text(json.dumps(position), _SEARCH))
        if self._resumed:
            prefix = self._resumed["prefix"]
            require_seen(self._run.index, prefix)
            self._draws.resume(ExtraState(self._run).script(prefix, read_about(prefix)))

    def _restore(self, checkpoints: Checkpoints) -> None:
        resumed, draws = self._resumed, Draws.now()
        checkpoints.restore(resumed["prefix"])
        draws.resume()  # skipped batches come first
        self._run.step = resumed["step"]
        self._arrays = arrays_in(resumed["prefix"] + _SUFFIX)
        where = (
            "was over" if resumed["is_over"] else f"goes on at batch {resumed['batch']} of epoch {resumed['epoch'] + 1}"
        )
        log.info("fit %s, after %d steps, by %s.", where, resumed["step"], resumed["prefix"])

    def _save(self, batch: int, is_over: bool, background: bool) -> None:
        assert self._checkpoints is not None and self.schedule is not None, "`fit` has begun"
        step = self._run.step
        self._checkpoints.save_with(
            lambda: self._position(batch, is_over), step, background, is_certain=True, script_state=self._draws.state
        )
        self.schedule.saved(step)

    def _position(self, batch: int, is_over: bool) -> Content:
        """Returns the position of `fit`, on the chief."""
        callbacks, arrays = states_of(self._with_history())
        state = {
            FIT: self._fit,
            "first_epoch": self._first_epoch,
            "epoch": self._epoch,
            "epochs": self.params.get("epochs"),
            "batch": batch,
            "is_over": is_over,
            "callbacks": callbacks,
            "fits": [*self._over, without_arrays(callbacks)],
            "metrics": self._metrics() if batch else [],
            "dealt": self._replica_workers(),
        }
        return Content(about={"made_by": FIT, FIT: state}, files={_SUFFIX: writer_of(arrays)})

    def _metrics(self) -> list[Any]:
        """Returns the values of the metrics in the current epoch."""
        found = []
        for variable in self.model.metrics_variables:
            tracked = self._run.tracker.of(variable.value)
            if tracked is not None and tracked.may_be_behind:
                self._run.guard(self._run.variable_slices.pull, [tracked])
            found.append(np.asarray(variable.value).tolist())
        return found

    def _give_back_metrics(self, values: list[Any]) -> None:
        """Restores the metrics with the first step; before it they may have no variables."""
        model: Any = self.model

        def give_back() -> None:
            variables = model.metrics_variables
            if len(variables) != len(values):
                log.warning(
                    "the metrics of this epoch cover its remaining batches only: %s had %d variables of metrics when "
                    "it was saved, and has %d before its first step.", model.name, len(values), len(variables),
                )  # fmt: skip
                return
            for variable, value in zip(variables, values, strict=True):
                variable.assign(tf.constant(value, variable.dtype))

        if values:
            vars(model)[BEFORE_STEP] = give_back
