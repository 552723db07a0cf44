"""The plain iteration and its damped form."""

from dataclasses import dataclass

from torch import Tensor

from cumulant.checks import sentence


@dataclass(frozen=True)
class Picard:
    """x⁺ = f(x).

    >>> import torch
    >>> from cumulant import fixed_point
    >>> fixed_point(torch.cos, torch.ones(1), solver=Picard()).value
    tensor([0.7391])
    """

    def init(self, x: Tensor) -> None:
        return None

    def step(self, state: None, x: Tensor, fx: Tensor) -> tuple[None, Tensor]:
        return None, fx


@dataclass(frozen=True)
class Damped:
    """x⁺ = (1 − g) x + g f(x).

    >>> import torch
    >>> from cumulant import fixed_point
    >>> fixed_point(lambda x: 3 - 2 * x, torch.zeros(1), solver=Damped(0.5)).value           # where x⁺ = f(x) diverges
    tensor([1.0000])
    """

    gate: float = 0.5

    def __post_init__(self):
        if not 0 < self.gate < 2:
            raise ValueError(sentence("Damped.gate", "0 < gate < 2", self.gate, "1 is Picard, 0.5 halves every step."))

    def init(self, x: Tensor) -> None:
        return None

    def step(self, state: None, x: Tensor, fx: Tensor) -> tuple[None, Tensor]:
        return None, x + self.gate * (fx - x)
