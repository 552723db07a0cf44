"""How the state of one mode moves over a gap of time: the motion library.

| motion                | state for each axis                                   | what is noise, and its numbers                                      |
|-----------------------|-------------------------------------------------------|---------------------------------------------------------------------|
| random-walk           | position                                              | the velocity: q in length²/time                                     |
| constant-velocity     | position, velocity                                    | the acceleration: q in length²/time³                                |
| constant-acceleration | position, velocity, acceleration                      | the jerk: q in length²/time⁵                                        |
| constant-jerk         | position, velocity, acceleration, jerk                | the rate of the jerk: q in length²/time⁷                            |
| singer                | position, velocity, acceleration                      | the acceleration: deviation σ in length/time², time_constant τ      |
| turn                  | position, velocity (2 or 3 axes)                      | the acceleration: q in length²/time³; rate in radians/time is known |
| estimated-turn        | position, velocity, and one turn_rate (2 or 3 axes)   | as turn; the rate: rate_q in radians²/time³                         |
| estimated-turn-3d     | position, velocity, turn_rate of 3 axes               | as turn; the three rates: rate_q in radians²/time³                  |

The first four are chains of n integrators driven by white noise. Over a gap Δ

    F_ij = Δ^{j−i} / (j−i)!            j ≥ i
    Q_ij = q Δ^{a+b+1} / (a! b! (a+b+1))       a = n−1−i, b = n−1−j

Two gaps in a row are one gap of their sum, F(Δ+Δ') = F(Δ')F(Δ): samples may come at any time. All but the estimated
turns are exact in mean and covariance; those are exact in the mean of a state without noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.checks import sentence, shape
from cumulant.filters.motion.linear import Chain, Discretized, Drift, Fixed, Motion, Singer, halve
from cumulant.filters.motion.turns import EstimatedTurn, Turn

ORDERS = {"random-walk": 1, "constant-velocity": 2, "constant-acceleration": 3, "constant-jerk": 4}


def random_walk(q: Tensor | float, axes: int = 2) -> Chain:
    """A random walk, dp = noise of spectral density q, length²/time: Q = q Δ.

    >>> random_walk(0.5, axes=1).over(torch.tensor([4.0]).double()).process_noise
    tensor([[[2.]]], dtype=torch.float64)
    """
    return Chain(1, _each("random_walk.q", q, axes))


def constant_velocity(q: Tensor | float, axes: int = 2) -> Chain:
    """Nearly constant velocity, dv = noise of spectral density q, length²/time³: Q = q [Δ³/3 Δ²/2; Δ²/2 Δ].

    >>> constant_velocity(3.0, axes=1).over(torch.tensor([2.0]).double()).process_noise
    tensor([[[8., 6.],
             [6., 6.]]], dtype=torch.float64)
    """
    return Chain(2, _each("constant_velocity.q", q, axes))


def constant_acceleration(q: Tensor | float, axes: int = 2) -> Chain:
    """Nearly constant acceleration, da = noise of spectral density q, length²/time⁵.

        p(Δ) = p + v Δ + a Δ²/2

    >>> constant_acceleration(1.0, axes=1).over(torch.tensor([2.0]).double()).dynamics[0, 0]
    tensor([1., 2., 2.], dtype=torch.float64)
    """
    return Chain(3, _each("constant_acceleration.q", q, axes))


def constant_jerk(q: Tensor | float, axes: int = 2) -> Chain:
    """Nearly constant jerk, dj = noise of spectral density q, length²/time⁷.

        p(Δ) = p + v Δ + a Δ²/2 + j Δ³/6

    >>> constant_jerk(1.0, axes=1).over(torch.tensor([3.0]).double()).dynamics[0, 0]
    tensor([1.0000, 3.0000, 4.5000, 4.5000], dtype=torch.float64)
    """
    return Chain(4, _each("constant_jerk.q", q, axes))


def singer(deviation: Tensor | float, time_constant: Tensor | float, axes: int = 2) -> Singer:
    """Singer's acceleration, da = −a/τ dt + noise of spectral density 2σ²/τ: correlated over a time τ.

    deviation σ in length/time², time_constant τ > 0; one for all axes, or one for each.

    >>> singer(2.0, 10.0, axes=1).over(torch.tensor([10.0]).double()).dynamics[0, 2, 2]                      # 1/e
    tensor(0.3679, dtype=torch.float64)
    """
    tau = _each("singer.time_constant", time_constant, axes)
    if not bool((tau > 0).all()):
        raise ValueError(sentence("singer.time_constant", "numbers > 0", tau.tolist(), "It is a time."))
    return Singer(_each("singer.deviation", deviation, axes), tau)


def turn(rate: Tensor | float, q: Tensor | float, axes: int = 2) -> Turn:
    """A coordinated turn at a known rate ω, radians/time, dv = ω × v dt + noise of spectral density q, length²/time³.

    >>> still = turn(0.0, 3.0).over(torch.tensor([2.0]).double())                        # straight: constant velocity
    >>> torch.equal(still.process_noise, constant_velocity(3.0).over(torch.tensor([2.0]).double()).process_noise)
    True
    """
    return Turn(torch.as_tensor(rate, dtype=torch.float64), torch.as_tensor(q, dtype=torch.float64), axes)


def estimated_turn(
    q: Tensor | float, rate_q: Tensor | float, axes: int = 2, *, free_axis: bool = False
) -> EstimatedTurn:
    """A coordinated turn whose rate is in the state, dω = noise of spectral density rate_q, radians²/time³.

        f(x, Δ) = (p + A(ω) v, R(ω) v, ω)

    >>> estimated_turn(0.1, 1e-4, axes=3).states(("x", "y", "z"))
    ('x', 'y', 'z', 'x_velocity', 'y_velocity', 'z_velocity', 'turn_rate')
    """
    return EstimatedTurn(
        _each("estimated_turn.q", q, axes), torch.as_tensor(rate_q, dtype=torch.float64), axes, free_axis
    )


def _each(where: str, value: Tensor | float, axes: int) -> Tensor:
    """(axes,) in double precision unless the tensor has another."""
    numbers = value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
    if numbers.shape not in ((), (axes,)):
        raise ValueError(sentence(where, f"a number, or one for each of {axes} axes", shape(numbers), "Set axes."))
    return numbers.expand(axes)


__all__ = [
    "ORDERS",
    "Chain",
    "Discretized",
    "Drift",
    "EstimatedTurn",
    "Fixed",
    "Motion",
    "Singer",
    "Turn",
    "constant_acceleration",
    "constant_jerk",
    "constant_velocity",
    "estimated_turn",
    "halve",
    "random_walk",
    "singer",
    "turn",
]
