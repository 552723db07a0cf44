"""The plain iteration and its damped form."""

from dataclasses import dataclass

from torch import Tensor

from cumulant.checks import sentence


@dataclass(frozen=True)
class Picard:
    """x⁺ = f(x)."""

    def init(self, x: Tensor) -> None:
        return None

    def step(self, state: None, x: Tensor, fx: Tensor) -> tuple[None, Tensor]:
        return None, fx


@dataclass(frozen=True)
class Damped:
    """x⁺ = (1 − g) x + g f(x)."""

    gate: float = 0.5

    def __post_init__(self):
        if not 0 < self.gate < 2:
            raise ValueError(sentence("Damped.gate", "0 < gate < 2", self.gate, "1 is Picard, 0.5 halves every step."))

    def init(self, x: Tensor) -> None:
        return None

    def step(self, state: None, x: Tensor, fx: Tensor) -> tuple[None, Tensor]:
        return None, x + self.gate * (fx - x)
