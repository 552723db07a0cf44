"""The monitor as a callback of Lightning's Trainer."""

from __future__ import annotations

from typing import Any

from cumulant.checks import sentence
from cumulant.extras import missing_package
from cumulant.observatory.monitor.monitor import Monitor

try:
    from lightning.pytorch import Callback  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError:
    raise missing_package("The callback of Lightning", "lightning", "lightning") from None


class MonitorLightningCallback(Callback):
    """Counts the optimizer steps of a Lightning Trainer for a `Monitor`, resumed ones included.

        trainer = lightning.Trainer(callbacks=[MonitorLightningCallback(Monitor(module, every=50), log=True)])

    log  whether every logger of the Trainer gets `Check.scalars` at the step of the check

    When training ends the monitor lets go of the model and keeps its history.
    """

    def __init__(self, monitor: Monitor, *, log: bool = False):
        super().__init__()
        if not isinstance(monitor, Monitor):
            got, advice = type(monitor).__name__, "Make it with Monitor(module, every=50)."
            raise TypeError(sentence("MonitorLightningCallback.monitor", "a Monitor", got, advice))
        self.monitor, self.log = monitor, log

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.monitor.start(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *batch: Any) -> None:
        if trainer.global_step <= self.monitor.now:  # gradients are still being accumulated
            return
        check = self.monitor.step(trainer.global_step)
        if self.log and check is not None:
            for logger in trainer.loggers:
                logger.log_metrics(check.scalars(), step=check.step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.monitor.close()
