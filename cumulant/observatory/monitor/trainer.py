"""The monitor as a callback of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cumulant.checks import sentence
from cumulant.extras import missing_package
from cumulant.observatory.monitor.monitor import Monitor

try:
    from transformers import TrainerCallback
except ModuleNotFoundError:
    raise missing_package("The callback of Trainer", "transformers", "hf") from None

STATE = "cumulant.Monitor"  # its name in trainer_state.json of a checkpoint


class MonitorCallback(TrainerCallback):
    """Counts the steps of a Trainer for a `Monitor`, and goes on with it where a checkpoint is resumed.

        trainer = Trainer(model, arguments, callbacks=[MonitorCallback(Monitor(model, every=50))])

    log      gets `Check.scalars` of every check; ``trainer.log`` puts them into the log history of the Trainer and
             hands them to all that it reports to
    trainer  the Trainer, to whose loss the penalties of the monitor are added while it trains: `EntropyFloor` and
             `ZLoss` need it

    For either the Trainer has to be there first:

        trainer = Trainer(model, arguments)
        trainer.add_callback(MonitorCallback(monitor, log=trainer.log, trainer=trainer))

    The first forward pass of a step is observed, so that accumulated gradients cost nothing more; the penalties are the
    mean over the passes of a step. A checkpoint has `Monitor.state_dict`, and other settings are warned of on resuming.
    When training ends the monitor lets go of the model and keeps its history.
    """

    def __init__(
        self, monitor: Monitor, *, log: Callable[[dict[str, float]], object] | None = None, trainer: Any = None
    ):
        if not isinstance(monitor, Monitor):
            got, advice = type(monitor).__name__, "Make it with Monitor(model, every=50)."
            raise TypeError(sentence("MonitorCallback.monitor", "a Monitor", got, advice))
        if log is not None and not callable(log):
            advice = "A callback cannot reach the Trainer: make it first, then trainer.add_callback(...)."
            raise TypeError(sentence("MonitorCallback.log", "a function such as trainer.log", repr(log), advice))
        if trainer is not None and not callable(getattr(trainer, "compute_loss", None)):
            got, advice = type(trainer).__name__, "Make it first, then trainer.add_callback(...)."
            raise TypeError(sentence("MonitorCallback.trainer", "the Trainer", got, advice))
        self.monitor, self.log, self.trainer = monitor, log, trainer
        self._before: dict[str, Any] | None = None  # attributes of the Trainer, while its loss is ours

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = state.stateful_callbacks.get(STATE) if state.global_step else None
        if saved is not None:
            self.monitor.load_state_dict(saved)
        self.monitor.start(state.global_step)
        if self.trainer is not None:
            if self._before is None:  # else a training was left by an exception
                self._before = dict(self.trainer.__dict__)
                self.trainer.compute_loss = _with_penalty(self.trainer, self.monitor)
        elif any(reaction.statistics for reaction in self.monitor.reactions):
            advice = "trainer.add_callback(MonitorCallback(monitor, trainer=trainer)) adds them to its loss."
            raise ValueError(sentence("MonitorCallback.trainer", "the Trainer, for penalties", None, advice))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        due = control.should_log  # of the loss: trainer.log takes it for done
        parts = {"optimizer": kwargs.get("optimizer"), "scheduler": kwargs.get("lr_scheduler")}
        check = self.monitor.step(state.global_step, **parts)
        state.stateful_callbacks[STATE] = self.monitor.state_dict()
        if self.log is not None and check is not None:
            self.log(check.scalars())
        control.should_log = due
        if self.monitor.should_stop:
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._before is not None:
            self.trainer.__dict__.pop("compute_loss")
            self.trainer.__dict__.update({k: v for k, v in self._before.items() if k == "compute_loss"})
            self._before = None
        self.monitor.close()


def _with_penalty(trainer: Any, monitor: Monitor) -> Callable:
    """The method ``compute_loss`` of a Trainer, with the penalties of this pass in the loss while it trains.

    Trainer divides a loss that is a mean over one pass by the number of passes in a step, and leaves one alone that is
    a part of the mean over all of them: there the penalty is divided here.
    """
    compute = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        result = compute(model, inputs, *args, **kwargs)
        if not (torch.is_grad_enabled() and model.training):
            return result
        penalty = monitor.penalty()
        count = kwargs.get("num_items_in_batch", args[1] if len(args) > 1 else None)
        if _is_scaled(trainer, count):
            penalty = penalty / trainer.current_gradient_accumulation_steps
        if isinstance(result, tuple):
            return (result[0] + penalty.to(result[0]), *result[1:])
        return result + penalty.to(result)

    return compute_loss


def _is_scaled(trainer: Any, count: object) -> bool:
    """Whether Trainer takes the loss for a part of the mean over all passes of a step, as it decides it itself."""
    own = getattr(trainer, "loss_is_scaled_for_ga", None)
    if own is not None:
        return own
    return (trainer.model_accepts_loss_kwargs and count is not None) or trainer.compute_loss_func is not None
