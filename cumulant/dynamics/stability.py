"""Linear stability of equilibria: multipliers of cumulants and correlations per layer, growth rates on the sphere (§5).

    whitening   κ_n → λ_n κ_n,  λ_n = 1 + n v s^{n−1}/(1 + vs),  n ≥ 3                       at N(0, I)           (X-6)
    sphere      degree n grows at the rate  n(n+d−2)/β · I_{n+d/2−1}(β)/I_{d/2−1}(β)         at the uniform law   (X-7)
    diagonal    a correlation multiplies by  1 + 2a/(1+a),  a = vs                                                (F8)

v is the value (its sign is that of the step), s the logit scale of the whitened model z + v Σ_j a_ij z_j.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, permutations
from typing import overload

import torch
from torch import Tensor

from cumulant.checks import require_alike, require_float, sentence, shape
from cumulant.special import hyp0f1

ORDERS = range(3, 65)
LARGEST = 1 << 16  # entries of a cumulant tensor


@overload
def cumulant_multiplier(n: int, v: float, s: float) -> float: ...
@overload
def cumulant_multiplier(n: int, v: Tensor, s: Tensor) -> Tensor: ...
def cumulant_multiplier(n: int, v: float | Tensor, s: float | Tensor) -> float | Tensor:
    """The factor by which one layer with full whitening multiplies the n-th cumulant of a nearly Gaussian law (X-6).

        λ_n = 1 + n v s^{n−1}/(1 + vs)                              numbers
        eigenvalues of `cumulant_map`                               matrices

    To first order in κ_n, and up to terms of higher cumulants, which do not change the eigenvalues. Above 1 in modulus
    a perturbation of that order grows.

    v, s  numbers, or both matrices (d, d): values V z_j, logits z_iᵀ B z_j in coordinates where z is white. Then all
          eigenvalues of the map on symmetric tensors of order n are returned, by modulus

    >>> cumulant_multiplier(3, 1.0, 0.5), cumulant_multiplier(3, -0.5, 0.5)
    (1.5, 0.5)
    >>> import torch
    >>> eye = torch.eye(2, dtype=torch.float64)
    >>> cumulant_multiplier(3, eye, 0.5 * eye).real
    tensor([1.5000, 1.5000, 1.5000, 1.5000], dtype=torch.float64)
    """
    _require_order(n)
    if (isinstance(v, Tensor) and v.ndim) or (isinstance(s, Tensor) and s.ndim):
        return cumulant_map(n, *_matrices(v, s)).eigenvalues
    if isinstance(v, Tensor) or isinstance(s, Tensor):
        return 1 + n * v * s ** (n - 1) / (1 + v * s)
    if 1 + v * s == 0:
        advice = "The layer sends every particle to one point."
        raise ValueError(sentence("cumulant_multiplier", "1 + v s other than 0", f"v={v:g}, s={s:g}", advice))
    return 1 + _change(n, v, s)


@dataclass(frozen=True, eq=False)
class CumulantMap:
    """One layer with symmetric whitening as a linear map of cumulant tensors of order n, near a Gaussian (X-6).

        κ ↦ Q^{⊗n} (κ + Σ_k S_k κ),     S_k κ: L⁻¹V on slot k and B on the others;     L = I + VBᵀ,   Q = (LLᵀ)^{−½} L

    V_{ab} takes a key's coordinate b to the update's a; logits z_iᵀ B z_j, query i. Slots that stand in a monomial
    (Bᵀz)_c give B_{ac} z_a, hence B and not its transpose. To first order in κ, up to terms of higher cumulants.

    order n, moved L⁻¹V (d, d), bilinear B (d, d), rotation Q (d, d)
    """

    order: int
    moved: Tensor
    bilinear: Tensor
    rotation: Tensor

    def __call__(self, cumulant: Tensor) -> Tensor:
        """κ (d, …, d) of n axes → the same shape."""
        d, n = len(self.moved), self.order
        if require_float("CumulantMap.cumulant", cumulant).shape != (d,) * n:
            expected = f"n = {n} axes of length d = {d}"
            raise ValueError(sentence("CumulantMap.cumulant", expected, shape(cumulant), "One axis per slot."))
        require_alike("CumulantMap.cumulant", cumulant, "the matrices", self.moved)
        slots = [
            _apply_axes(cumulant, [self.moved if k == slot else self.bilinear for k in range(n)]) for slot in range(n)
        ]
        return _apply_axes(cumulant + torch.stack(slots).sum(0), [self.rotation] * n)

    @property
    def eigenvalues(self) -> Tensor:
        """On symmetric tensors, the largest modulus first; complex where the map rotates."""
        basis = _symmetric_basis(len(self.moved), self.order).to(self.moved)
        images = torch.stack([self(e.reshape((len(self.moved),) * self.order)).reshape(-1) for e in basis.mT], -1)
        values = torch.linalg.eigvals(basis.mT @ images)
        return values[values.abs().argsort(descending=True)]

    @property
    def spectral_radius(self) -> Tensor:
        """Above 1 a perturbation of this order grows."""
        return self.eigenvalues[0].abs()


def cumulant_map(n: int, value: Tensor, bilinear: Tensor) -> CumulantMap:
    """The layer z ↦ white(z + V Σ_j a_ij z_j), logits z_iᵀ B z_j, as a linear map of cumulants of order n ≥ 3 (X-6).

    value V (d, d), bilinear B (d, d), in coordinates where z is white; d^n ≤ 65536. I + VBᵀ must be invertible.

    >>> import torch
    >>> turn = cumulant_map(3, 0.5 * torch.eye(2), torch.tensor([[0.0, -1.0], [1.0, 0.0]]))
    >>> turn.spectral_radius                                                     # a rotation of keys against queries
    tensor(1.5232)
    """
    _require_order(n, "cumulant_map")
    value, bilinear = _matrices(value, bilinear, "cumulant_map")
    d = len(value)
    if d**n > LARGEST:
        raise ValueError(sentence("cumulant_map", f"d^n ≤ {LARGEST}", f"{d}^{n}", "Use component_multiplier."))
    gain = torch.eye(d, dtype=value.dtype, device=value.device) + value @ bilinear.mT
    u, spread, w = torch.linalg.svd(gain)
    if float(spread[-1]) <= d * torch.finfo(spread.dtype).eps * float(spread[0]):
        raise ValueError(sentence("cumulant_map", "I + VBᵀ invertible", "a singular one", "Change V or B."))
    return CumulantMap(n, torch.linalg.solve(gain, value), bilinear, u @ w)


def component_multiplier(components: Sequence[int], v: Tensor, s: float) -> Tensor:
    """λ of the cumulant of coordinates a_1 … a_n when values are diagonal and logits isotropic (X-6).

        λ = 1 + s^{n−1} Σ_k v_{a_k}/(1 + v_{a_k} s)

    S1-T1 is s = 1, v = eigenvalues of Σ.

    >>> import torch
    >>> component_multiplier((0, 0, 1), torch.tensor([0.7, 0.2], dtype=torch.float64), 0.6)
    tensor(1.4192, dtype=torch.float64)
    """
    _require_order(len(components))
    if require_float("component_multiplier.v", v).ndim != 1:
        raise ValueError(sentence("component_multiplier.v", "shape (d,)", shape(v), "One value per coordinate."))
    values = v[torch.as_tensor(list(components), device=v.device)]
    return 1 + s ** (len(components) - 1) * (values / (1 + values * s)).sum()


def attracting(v: float, s: float, orders: Sequence[int] = ORDERS) -> bool:
    """Whether |λ_n| < 1 for all these orders: small perturbations of a Gaussian decay, for infinitely many particles.

    Orders beyond 64 follow the last ones if |s| < 1. In clouds of some hundred particles it also takes s ≲ 0.7 (§5.5).

    >>> attracting(-0.5, 0.5), attracting(0.5, 0.5), attracting(-0.5, 1.2)
    (True, False, False)
    """
    if 1 + v * s <= 0:
        return False
    return all(-2 < _change(n, v, s) < 0 for n in orders)  # λ_n − 1, exact where λ_n would round to 1


def most_unstable_order(v: float, s: float, orders: Sequence[int] = ORDERS) -> int:
    """The n among these with the largest |λ_n|; about max(3, −1/ln s) for v > 0 and s < 1.

    >>> most_unstable_order(0.5, 0.5), most_unstable_order(0.5, 0.9)
    (3, 9)
    """
    return max(orders, key=lambda n: abs(cumulant_multiplier(n, v, s)))


def escape_time(particles: int, v: float, s: float) -> float:
    """Estimated number of layers until a Gaussian N-sample is no longer Gaussian, by the growth of its skewness (X-6).

        log √(N/6) / log λ_3;   +inf where |λ_3| ≤ 1

    An order of magnitude: single runs scatter by a factor of several.

    >>> round(escape_time(600, 0.5, 0.5), 1)
    8.8
    """
    if particles < 6:
        raise ValueError(sentence("escape_time.particles", "at least 6", particles, "Skewness needs some."))
    growth = abs(cumulant_multiplier(3, v, s))
    return math.log(math.sqrt(particles / 6)) / math.log(growth) if growth > 1 else math.inf


def sphere_rate(n: int, d: int, beta: float) -> float:
    """Rate at which a perturbation of degree n of the uniform law on S^{d−1} grows under ẋ = P_x m(x) (X-7).

        n(n+d−2)/β · I_{n+d/2−1}(β)/I_{d/2−1}(β) > 0;      n = 1 has the limit (d−1)/d at β = 0, others 0

    The opposite sign has the opposite rate: all degrees decay.

    >>> round(sphere_rate(2, 2, 4.0), 6), round(sphere_rate(1, 3, 0.0), 6)
    (0.568239, 0.666667)
    """
    if not isinstance(n, int) or n < 1 or not isinstance(d, int) or d < 2:
        raise ValueError(
            sentence("sphere_rate", "a degree n ≥ 1 and a dimension d ≥ 2", f"n={n}, d={d}", "Count them.")
        )
    if not beta >= 0 or not math.isfinite(beta):
        raise ValueError(sentence("sphere_rate.beta", "a number ≥ 0", beta, "For −β the rate has the sign (−1)ⁿ⁻¹."))
    if beta == 0:
        return (d - 1) / d if n == 1 else 0.0
    a, x = d / 2, torch.tensor(beta * beta / 4, dtype=torch.float64)
    log_ratio = hyp0f1(a + n, x).log - hyp0f1(a, x).log + n * math.log(beta / 2) + math.lgamma(a) - math.lgamma(a + n)
    return n * (n + d - 2) / beta * math.exp(float(log_ratio))


def correlation_multiplier(a: float) -> float:
    """The factor by which a layer with a diagonal norm multiplies small correlations, a = vs; > 1 for attention (F8).

    >>> correlation_multiplier(0.6)
    1.75
    """
    if not a > -1:
        raise ValueError(sentence("correlation_multiplier.a", "v s > −1", a, "Below it the step reverses orientation."))
    return 1 + 2 * a / (1 + a)


def _matrices(v: object, s: object, where: str = "cumulant_multiplier") -> tuple[Tensor, Tensor]:
    v, s = require_float(f"{where}.v", v), require_float(f"{where}.s", s)
    require_alike(f"{where}.s", s, "v", v)
    if v.ndim != 2 or v.shape[0] != v.shape[1] or s.shape != v.shape:
        expected, got = "two numbers or two matrices (d, d)", f"{shape(v)} and {shape(s)}"
        raise ValueError(sentence(where, expected, got, "Multiply a number by torch.eye(d)."))
    return v, s


def _apply_axes(tensor: Tensor, matrices: list[Tensor]) -> Tensor:
    """One matrix on each axis."""
    for axis, matrix in enumerate(matrices):
        tensor = (tensor.movedim(axis, -1) @ matrix.mT).movedim(-1, axis)
    return tensor


def _change(n: int, v: float, s: float) -> float:
    """λ_n − 1"""
    try:
        return n * v * s ** (n - 1) / (1 + v * s) if v else 0.0
    except OverflowError:
        turned = math.copysign(1, s) if n % 2 == 0 else 1
        return math.inf * turned * math.copysign(1, v) * math.copysign(1, 1 + v * s)


def _symmetric_basis(d: int, n: int) -> Tensor:
    """Orthonormal columns (d^n, (d+n−1 choose n)) of the symmetric tensors."""
    columns = []
    for indices in combinations_with_replacement(range(d), n):
        column = torch.zeros((d,) * n, dtype=torch.float64)
        for order in set(permutations(indices)):
            column[order] = 1
        columns.append(column.reshape(-1) / column.sum().sqrt())
    return torch.stack(columns, -1)


def _require_order(n: object, where: str = "cumulant_multiplier") -> None:
    if not isinstance(n, int) or isinstance(n, bool) or n < 3:
        advice = "Whitening holds the first two cumulants fixed."
        raise ValueError(sentence(f"{where}.n", "an order n ≥ 3", n, advice))
