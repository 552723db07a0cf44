"""The numbers of a monitor in the trackers of Hugging Face's accelerate."""

from __future__ import annotations

from typing import Any

from cumulant.checks import sentence
from cumulant.observatory.monitor.history import Check
from cumulant.observatory.monitor.writers import CheckWriter


class AccelerateWriter(CheckWriter):
    """A writer for `Monitor`: `Check.scalars` at the step of the check, in every tracker of ``accelerator``.

        accelerator = Accelerator(log_with="wandb")
        accelerator.init_trackers("run")
        monitor = Monitor(model, every=50, writer=AccelerateWriter(accelerator))

    ``writer=accelerator.log`` writes the same numbers and leaves the axis of steps to the tracker.
    """

    def __init__(self, accelerator: Any):
        if not callable(getattr(accelerator, "log", None)):
            got, advice = type(accelerator).__name__, "Pass the Accelerator that prepares the model."
            raise TypeError(sentence("AccelerateWriter.accelerator", "an accelerate.Accelerator", got, advice))
        self.accelerator = accelerator

    def __call__(self, check: Check) -> None:
        self.accelerator.log(check.scalars(), step=check.step)
