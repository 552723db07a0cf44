"""The monitor as a callback of transformers' Trainer."""

from __future__ import annotations

from typing import Any

try:
    from transformers import TrainerCallback
except ModuleNotFoundError:
    raise ModuleNotFoundError("The callback of Trainer needs transformers: install cumulant[hf].") from None

from cumulant.checks import sentence
from cumulant.observatory.monitor.monitor import Monitor


class MonitorCallback(TrainerCallback):
    """Counts the steps of a Trainer for a `Monitor`, resumed ones included.

        trainer = Trainer(model, arguments, callbacks=[MonitorCallback(Monitor(model, every=50))])

    The first forward pass of a step is observed, so that accumulated gradients cost nothing more. When training ends
    the monitor lets go of the model and keeps its history.
    """

    def __init__(self, monitor: Monitor):
        if not isinstance(monitor, Monitor):
            got, advice = type(monitor).__name__, "Make it with Monitor(model, every=50)."
            raise TypeError(sentence("MonitorCallback.monitor", "a Monitor", got, advice))
        self.monitor = monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.monitor.start(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.monitor.step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.monitor.close()
