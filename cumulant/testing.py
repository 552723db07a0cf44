"""The laws every measure obeys, as checks a user can run on a measure of their own.

>>> import torch
>>> from cumulant import Sphere
>>> report = check_measure(Sphere(3))
>>> report["mean is the gradient of G"] < 1e-12
True

Each law takes a `Measure` and queries η in float64 inside its domain and returns an error that should stay below
the law's tolerance. `check_measure` runs them all and raises one `AssertionError` that lists every law broken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.geometry import fenchel_young
from cumulant.measures import Measure

STEP = 1e-5  # of central differences


class Law(NamedTuple):
    """error(measure, eta) ≤ tolerance, in words."""

    statement: str
    tolerance: float
    error: Callable[[Measure, Tensor], float]


def check_measure(
    measure: Measure,
    eta: Tensor | None = None,
    *,
    draws: int = 20_000,
    seed: int = 0,
    skip: tuple[str, ...] = (),
) -> dict[str, float]:
    """Run every law on a measure and return the error of each; raise if one exceeds its tolerance.

    eta    (q, d) queries inside the natural domain; by default five of size about ½, smaller if need be
    draws  samples per query for the law of `sample`; that law is left out for a measure without `sample`, and with 0
    skip   statements of `LAWS` to leave out

    >>> from cumulant import Sphere
    >>> errors = check_measure(Sphere(3))
    >>> errors["G is convex"] <= 1e-12
    True
    """
    for name in skip:
        if name not in (known := [law.statement for law in LAWS]):
            expected = f"statements among {known}"
            raise ValueError(sentence("check_measure.skip", expected, repr(name), "Copy one exactly."))
    exact = measure.to(torch.float64)
    if eta is None:
        generator = torch.Generator().manual_seed(seed)
        eta = 0.5 * torch.randn(5, measure.dim, generator=generator, dtype=torch.float64)
        eta = eta.to(exact.empty_tensor().device)
        while not exact.log_normalizer(eta).isfinite().all() and eta.abs().max() > 1e-6:
            eta = eta / 2
    eta = eta.double()
    if not torch.isfinite(exact.log_normalizer(eta)).all():
        got = "an η with infinite G"
        raise ValueError(sentence("check_measure.eta", "queries inside the natural domain", got, "Pass eta yourself."))
    laws = [law for law in LAWS if law.statement not in skip]
    if draws and type(measure).sample is not Measure.sample:
        laws.append(sampling_law(draws, seed))
    report = {law.statement: law.error(exact, eta) for law in laws}
    broken = [
        f"{law.statement}: error {report[law.statement]:.2e} > {law.tolerance:.0e}"
        for law in laws
        if not report[law.statement] <= law.tolerance  # NaN is a failure too
    ]
    if broken:
        raise AssertionError(f"{type(measure).__name__} breaks {len(broken)} law(s):\n  " + "\n  ".join(broken))
    return report


def _gap(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the size of the numbers, at least 1."""
    if a.shape != b.shape:
        return torch.inf
    if a.numel() == 0:
        return 0.0
    return float(torch.where(a == b, 0, (a - b).abs() / b.abs().clamp_min(1)).max())


def _mean_is_gradient(h: Measure, eta: Tensor) -> float:
    return _gap(h.mean(eta), Measure.mean(h, eta))


def _mean_is_difference_quotient(h: Measure, eta: Tensor) -> float:
    quotients = []
    for e in STEP * torch.eye(h.dim, dtype=eta.dtype, device=eta.device):
        quotients.append((h.log_normalizer(eta + e) - h.log_normalizer(eta - e)) / (2 * STEP))
    return _gap(torch.stack(quotients, -1), h.mean(eta))


def _fisher_is_hessian(h: Measure, eta: Tensor) -> float:
    columns = []
    for e in torch.eye(h.dim, dtype=eta.dtype, device=eta.device):
        columns.append(torch.func.grad(lambda x, e=e: (h.mean(x) * e).sum())(eta))
    return _gap(h.fisher(eta), torch.stack(columns, -1))


def _fisher_is_symmetric(h: Measure, eta: Tensor) -> float:
    fisher = h.fisher(eta)
    return _gap(fisher, fisher.mT)


def _fisher_is_positive(h: Measure, eta: Tensor) -> float:
    fisher = h.fisher(eta)
    values = torch.linalg.eigvalsh((fisher + fisher.mT) / 2)
    return float((-values[..., 0] / values[..., -1].clamp_min(1)).clamp_min(0).max())


def _fisher_mv_is_product(h: Measure, eta: Tensor) -> float:
    v = torch.cos(torch.arange(eta.numel(), dtype=eta.dtype, device=eta.device)).reshape(eta.shape)
    return _gap(h.fisher_mv(eta, v), (h.fisher(eta) @ v[..., None])[..., 0])


def _convex(h: Measure, eta: Tensor) -> float:
    other = eta.flip(-2)
    middle = h.log_normalizer((eta + other) / 2)
    excess = middle - (h.log_normalizer(eta) + h.log_normalizer(other)) / 2
    return float((excess / middle.abs().clamp_min(1)).clamp_min(0).max())


def _fenchel_young(h: Measure, eta: Tensor) -> float:
    return _gap(fenchel_young(h, eta, h.mean(eta)), torch.zeros_like(h.log_normalizer(eta)))


def _round_trip(h: Measure, eta: Tensor) -> float:
    """natural∘mean = id modulo directions that h does not span: compared on means."""
    mean = h.mean(eta)
    solution = h.natural(mean)
    if not bool(solution.converged.all()):
        return torch.inf
    back = solution.value - eta
    return max(_gap(h.mean(solution.value), mean), _gap(h.fisher_mv(eta, back), torch.zeros_like(mean)))


def _kl_is_bregman(h: Measure, eta: Tensor) -> float:
    other = eta.roll(1, -2)
    kl = h.kl(eta, other)
    by_hand = h.log_normalizer(other) - h.log_normalizer(eta) - (h.mean(eta) * (other - eta)).sum(-1)
    return max(_gap(kl, by_hand), float((-kl).clamp_min(0).max()))


def _batched_is_looped(h: Measure, eta: Tensor) -> float:
    if h.query_rows is not None:
        return 0.0
    rows = range(eta.shape[-2])
    g = torch.stack([h.log_normalizer(eta[..., i, :]) for i in rows], -1) if eta.ndim == 2 else h.log_normalizer(eta)
    m = torch.stack([h.mean(eta[..., i, :]) for i in rows], -2) if eta.ndim == 2 else h.mean(eta)
    return max(_gap(g, h.log_normalizer(eta)), _gap(m, h.mean(eta)))


def _vmap_is_batch(h: Measure, eta: Tensor) -> float:
    stacked = torch.stack([eta, eta.flip(-2)])
    direct = [torch.stack([f(e) for e in stacked]) for f in (h.log_normalizer, h.mean)]
    mapped = [torch.func.vmap(f)(stacked) for f in (h.log_normalizer, h.mean)]
    return max(_gap(a, b) for a, b in zip(mapped, direct, strict=True))


def _dtype_is_kept(h: Measure, eta: Tensor) -> float:
    single, small = h.to(torch.float32), eta.float()
    answers = (single.log_normalizer(small), single.mean(small), single.fisher(small), h.mean(eta))
    kinds = [torch.float32] * 3 + [torch.float64]
    return (
        0.0 if all(a.dtype == k and a.device == eta.device for a, k in zip(answers, kinds, strict=True)) else torch.inf
    )


LAWS = [
    Law("mean is the gradient of G", 1e-12, _mean_is_gradient),
    Law("mean is the difference quotient of G", 1e-8, _mean_is_difference_quotient),
    Law("Fisher is the Hessian of G", 1e-12, _fisher_is_hessian),
    Law("Fisher is symmetric", 1e-12, _fisher_is_symmetric),
    Law("Fisher is positive semidefinite", 1e-12, _fisher_is_positive),
    Law("fisher_mv is Fisher times vector", 1e-12, _fisher_mv_is_product),
    Law("G is convex", 1e-12, _convex),
    Law("Fenchel-Young gap is zero at the mean", 1e-9, _fenchel_young),
    Law("natural inverts mean", 1e-8, _round_trip),
    Law("kl is the Bregman divergence and not negative", 1e-12, _kl_is_bregman),
    Law("a batch of queries equals a loop", 1e-12, _batched_is_looped),
    Law("vmap equals a batch", 1e-12, _vmap_is_batch),
    Law("dtype and device are kept", 0.0, _dtype_is_kept),
]


def sampling_law(draws: int, seed: int) -> Law:
    """Sample mean and covariance within 4.5 standard errors of ∇G and ∇²G; the error is in those units.

    >>> import torch
    >>> from cumulant import Sphere
    >>> law = sampling_law(draws=1000, seed=0)
    >>> law.error(Sphere(3), torch.zeros(1, 3).double()) < law.tolerance
    True
    """

    def error(h: Measure, eta: Tensor) -> float:
        generator = torch.Generator(device=eta.device).manual_seed(seed)
        with torch.no_grad():
            x = h.sample(eta, draws, generator=generator)
            mean, fisher = h.mean(eta), h.fisher(eta)
            if x.shape != (*mean.shape[:-1], draws, h.dim):
                return torch.inf
            centred = x - mean[..., None, :]
            square = centred[..., :, None] * centred[..., None, :] - fisher[..., None, :, :]
            return max(_z_score(centred, -2), _z_score(square, -3))

    return Law("sample moments match mean and Fisher", 4.5, error)


def _z_score(deviation: Tensor, axis: int) -> float:
    """|mean| over its standard error along an axis; a deviation that is constant must be rounding."""
    n = deviation.shape[axis]
    spread = deviation.std(axis) / n**0.5
    size = deviation.mean(axis).abs()
    return float(torch.where(spread > 1e-12, size / spread.clamp_min(1e-300), size * 1e9).max())
