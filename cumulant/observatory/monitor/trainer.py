"""The monitor as a callback of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cumulant.checks import sentence
from cumulant.extras import missing_package
from cumulant.observatory.monitor.monitor import Monitor

try:
    from transformers import TrainerCallback
except ModuleNotFoundError:
    raise missing_package("The callback of Trainer", "transformers", "hf") from None


class MonitorCallback(TrainerCallback):
    """Counts the steps of a Trainer for a `Monitor`, resumed ones included.

        trainer = Trainer(model, arguments, callbacks=[MonitorCallback(Monitor(model, every=50))])

    log  gets `Check.scalars` of every check; ``trainer.log`` puts them into the log history of the Trainer and hands
         them to all that it reports to. The Trainer has to be there first:

        trainer = Trainer(model, arguments)
        trainer.add_callback(MonitorCallback(Monitor(model, every=50), log=trainer.log))

    The first forward pass of a step is observed, so that accumulated gradients cost nothing more. When training ends
    the monitor lets go of the model and keeps its history.
    """

    def __init__(self, monitor: Monitor, *, log: Callable[[dict[str, float]], object] | None = None):
        if not isinstance(monitor, Monitor):
            got, advice = type(monitor).__name__, "Make it with Monitor(model, every=50)."
            raise TypeError(sentence("MonitorCallback.monitor", "a Monitor", got, advice))
        if log is not None and not callable(log):
            advice = "A callback cannot reach the Trainer: make it first, then trainer.add_callback(...)."
            raise TypeError(sentence("MonitorCallback.log", "a function such as trainer.log", repr(log), advice))
        self.monitor, self.log = monitor, log

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.monitor.start(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due = control.should_log  # of the loss: trainer.log takes it for done
        check = self.monitor.step(state.global_step, optimizer=kwargs.get("optimizer"))
        if self.log is not None and check is not None:
            self.log(check.scalars())
        control.should_log = due
        if self.monitor.should_stop:
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.monitor.close()
