"""The residual attention step of a cloud of particles: gradient ascent (or descent) on the log-normalizer (§2).

    T(x_i) = x_i ± γ M m_i,      m_i = ∇G(s x_i) = Σ_j a_ij k_j,      a_ij = softmax_j(s ⟨x_i,k_j⟩)       (S0-C4, S1-A1)

The keys k are the particles themselves (self-attention: they move with the queries), a fixed set, or a law: with a
`Gaussian` key law the step is the mean field of infinitely many particles. The whitened model z + v Σ_j a_ij z_j of §5
has v = sign · step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from cumulant.checks import broadcast, require_alike, require_finite, require_float, sentence, shape
from cumulant.dynamics.checks import require_positive_definite
from cumulant.kernels import Moments, moments
from cumulant.measures import Measure
from cumulant.typing import Flags, PerQuery, Queries


@dataclass(frozen=True, kw_only=True, eq=False)
class Ascend:
    """The residual step of every particle of a cloud x (*batch, n, d); leading axes are independent clouds.

    step       γ ≥ 0
    scale      s, the logit scale; negative turns attention away from similar particles
    metric     M (d, d), symmetric positive definite, applied to the mean; the identity if None
    sign       +1 ascends G (attention), −1 descends it (contrastive losses)
    keys       None: the particles are the keys. A tensor (m, d) or (*batch, m, d), or a `Measure`: fixed keys
    causal     particle i attends to particles j ≤ i; with moving keys only
    mask       Boolean, broadcastable to (*batch, n, n), or (*batch, n, m) with fixed keys; True = attend
    self_term  False: no particle attends to itself; with moving keys only

    A particle without keys does not move. Memory is linear in n; differentiable in x, keys and metric.

    >>> import torch
    >>> Ascend()(torch.tensor([[1.0], [-1.0]]))                                        # 1 + tanh 1
    tensor([[ 1.7616],
            [-1.7616]])
    """

    step: float = 1.0
    scale: float = 1.0
    metric: Tensor | None = None
    sign: int = 1
    keys: Tensor | Measure | None = None
    causal: bool = False
    mask: Tensor | None = None
    self_term: bool = True

    def __post_init__(self):
        if not _number(self.step) or self.step < 0:
            raise ValueError(sentence("Ascend.step", "a number ≥ 0", self.step, "Descend with sign=-1."))
        if not _number(self.scale):
            raise ValueError(sentence("Ascend.scale", "a finite number", self.scale, "It multiplies the logits."))
        if self.sign not in (1, -1):
            raise ValueError(sentence("Ascend.sign", "+1 or -1", self.sign, "The length of the step is `step`."))
        if self.metric is not None:
            require_positive_definite("Ascend.metric", self.metric)
        self._check_keys()

    def _check_keys(self) -> None:
        if self.keys is None:
            return
        if not isinstance(self.keys, Measure):
            if require_float("Ascend.keys", self.keys).ndim < 2:
                raise ValueError(sentence("Ascend.keys", "shape (m, d)", shape(self.keys), "Add the key axis."))
            require_finite("Ascend.keys", self.keys)
        elif self.mask is not None:
            advice = "Give an Empirical log_weights of -inf instead."
            raise ValueError(sentence("Ascend.mask", "None with a measure as keys", "a mask", advice))
        for name, unusual in (("causal", self.causal), ("self_term", not self.self_term)):
            if unusual:
                expected, advice = (
                    "its default with fixed keys",
                    "Only particles that are keys have an order or a self.",
                )
                raise ValueError(sentence(f"Ascend.{name}", expected, getattr(self, name), advice))

    def __call__(self, x: Queries) -> Queries:
        """x ± γ M m(x):  (*batch, n, d) → (*batch, n, d)."""
        return x + self.displacement(x)

    def displacement(self, x: Queries) -> Queries:
        """± γ M m(x), what the step adds:  (*batch, n, d) → (*batch, n, d)."""
        mean = self.mean(x)
        return self.sign * self.step * (mean if self.metric is None else mean @ self.metric)

    def mean(self, x: Queries) -> Queries:
        """m(x) = ∇G(s x), the tilted mean of the keys; 0 where there is no key:  (*batch, n, d) → (*batch, n, d)."""
        self._check(x)
        if isinstance(self.keys, Measure):
            return self.keys.mean(self.scale * x)
        return self._attend(x).mean.to(x.dtype)

    def log_normalizer(self, x: Queries) -> PerQuery:
        """G(s x); −inf where there is no key:  (*batch, n, d) → (*batch, n)."""
        self._check(x)
        if isinstance(self.keys, Measure):
            return self.keys.log_normalizer(self.scale * x)
        return self._attend(x).log_normalizer.to(x.dtype)

    def log_volume(self, x: Queries) -> PerQuery:
        """log|det(I ± γ s M C_i)|: how the step expands volume at each particle, the keys frozen (X-1).

        C_i is the covariance of the keys under a_i. Not negative for an ascent with s ≥ 0; −inf where a descent
        is singular. With moving keys the whole map has another determinant (X-3). Memory n d².

        (*batch, n, d) → (*batch, n)

        >>> import torch
        >>> Ascend(step=0.5).log_volume(torch.tensor([[0.0], [2.0], [-2.0]]))             # C = 8/3 at 0
        tensor([0.8473, 0.0372, 0.0372])
        """
        change = self.sign * self.step * self.scale * self._spectrum(x)
        # log|1 + t|, with 1 + t = −(1 + (−2 − t)) where t < −1
        return torch.log1p(torch.where(change < -1, -2 - change, change)).sum(-1)

    def invertible(self, x: Queries) -> Flags:
        """Whether the step with the keys frozen keeps orientation at each particle:  γ |s| λ_max(M^½ C_i M^½) < 1.

        Always True for an ascent (sign · s > 0), which is injective. A descent is injective on any convex region where
        this holds throughout. (*batch, n, d) → (*batch, n)

        >>> import torch
        >>> Ascend(sign=-1).invertible(torch.tensor([[0.0], [2.0], [-2.0]]))
        tensor([False,  True,  True])
        """
        change = self.sign * self.step * self.scale * self._spectrum(x)
        return (change > -1).all(-1)

    def _spectrum(self, x: Tensor) -> Tensor:
        """Eigenvalues of M^½ C_i M^½ (*batch, n, d), ascending; rounding below 0 is cut."""
        self._check(x)
        covariance = self._covariance(x)
        if self.metric is not None:
            root = torch.linalg.cholesky(self.metric)
            covariance = root.mT @ covariance @ root
        return torch.linalg.eigvalsh(covariance).clamp_min(0)

    def _covariance(self, x: Tensor) -> Tensor:
        """C_i (*batch, n, d, d), from first and second moments about the centre of the keys, in one pass."""
        if isinstance(self.keys, Measure):
            return self.keys.fisher(self.scale * x)
        points, d = x if self.keys is None else self.keys, x.shape[-1]
        if points.shape[-2] == 0:
            return x.new_zeros(*x.shape, d)
        away = points - points.mean(-2, keepdim=True)
        row, column = torch.triu_indices(d, d, device=x.device)
        pair_moments = self._attend(x, torch.cat([away, away[..., row] * away[..., column]], -1)).mean
        entry = torch.empty(d, d, dtype=torch.int64, device=x.device)
        entry[row, column] = entry[column, row] = torch.arange(len(row), device=x.device)
        first, second = pair_moments[..., :d].to(x.dtype), pair_moments[..., d:].to(x.dtype)
        return second[..., entry] - first[..., :, None] * first[..., None, :]

    def _attend(self, x: Tensor, values: Tensor | None = None) -> Moments:
        """G and the mean of the values (of the keys if None) for every particle."""
        eta, statistics = self.scale * x, ("mean",)
        if isinstance(self.keys, Tensor):
            return moments(eta, self.keys, values, mask=self.mask, statistics=statistics)
        if self.self_term or x.shape[-2] == 0:
            return moments(eta, x, values, mask=self.mask, causal=self.causal, statistics=statistics)
        if self.mask is not None:
            others = self.mask & ~torch.eye(x.shape[-2], dtype=torch.bool, device=x.device)
            return moments(eta, x, values, mask=others, causal=self.causal, statistics=statistics)
        values = x if values is None else values
        before = _earlier(eta, x, values)
        if self.causal:
            return before
        after = _earlier(eta.flip(-2), x.flip(-2), values.flip(-2))
        return before.merge(Moments(after.log_normalizer.flip(-1), {"mean": after.mean.flip(-2)}))

    def _check(self, x: object) -> None:
        x = require_float("Ascend.x", x)
        if x.ndim < 2 or x.shape[-1] == 0:
            raise ValueError(sentence("Ascend.x", "a cloud (*batch, n, d), d ≥ 1", shape(x), "Add the particle axis."))
        require_finite("Ascend.x", x)
        d = x.shape[-1]
        if self.metric is not None:
            require_alike("Ascend.metric", self.metric, "x", x)
            if self.metric.shape != (d, d):
                raise ValueError(sentence("Ascend.metric", f"shape (d={d}, d={d})", shape(self.metric), "Match x."))
        if self.keys is None:
            return
        if isinstance(self.keys, Tensor):
            require_alike("Ascend.keys", self.keys, "x", x)
            if self.keys.shape[-1] != d:
                expected = f"shape (*batch, m, d={d})"
                raise ValueError(sentence("Ascend.keys", expected, shape(self.keys), "Match the last axis of x."))
        lead = self.keys.shape[:-2] if isinstance(self.keys, Tensor) else self.keys.batch_shape
        # the kernels would share keys among groups of heads; clouds are independent
        if broadcast("Ascend.keys", x.shape[:-2], lead) != x.shape[:-2]:
            expected, got = f"batch axes within those of x {tuple(x.shape[:-2])}", tuple(lead)
            raise ValueError(sentence("Ascend.keys", expected, got, "Expand x to one cloud per set of keys."))


def _earlier(eta: Tensor, x: Tensor, values: Tensor) -> Moments:
    """Attention of each particle to those before it: a causal sum over keys shifted by one. The first has no keys.

    Two such sums, forward and backward, leave out the diagonal exactly and without a mask.
    """
    keys, values_before = x[..., :-1, :], None if values is x else values[..., :-1, :]
    result = moments(eta[..., 1:, :], keys, values_before, causal=True, offset=0, statistics=("mean",))
    return Moments(pad(result.log_normalizer, (1, 0), value=-torch.inf), {"mean": pad(result.mean, (0, 0, 1, 0))})


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
