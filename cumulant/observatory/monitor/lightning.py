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

    Penalties of the monitor belong to the loss that the module returns:

        def training_step(self, batch, index):
            return self.loss(batch) + self.monitor.penalty()

    Of several optimizers reactions and ``QKClip(momentum="scale")`` get the first. Checkpoints have
    `Monitor.state_dict`, and other settings are warned of on resuming. Where a reaction stops the training, so does the
    Trainer. When training ends the monitor lets go of the model and keeps its history.
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
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        parts = {"optimizer": next(iter(trainer.optimizers), None), "scheduler": next(iter(schedules), None)}
        check = self.monitor.step(trainer.global_step, **parts)
        if self.log and check is not None:
            for logger in trainer.loggers:
                logger.log_metrics(check.scalars(), step=check.step)
        if self.monitor.should_stop:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        return self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.monitor.load_state_dict(state_dict)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.monitor.close()
