"""The record that every kernel returns, and the monoid that makes chunks, caches and shards one thing.

For queries η, atoms x, values v and log base weights w, with p_n = exp(⟨η,x_n⟩ + w_n − G):

    log_normalizer   G = log Σ_n exp(⟨η,x_n⟩ + w_n)
    mean             Σ p v               attention; the mean of the atoms where no values were given
    atom_mean        Σ p x               what merging `atom_trace` needs; the same tensor as `mean` without values
    mean_score       Σ p ⟨η,x⟩           the score is without the log weight
    score_variance   Var_p ⟨η,x⟩ = ηᵀ ∇²G η
    mean_log_weight  Σ p w
    value_trace      tr Cov_p(v)
    atom_trace       tr Cov_p(x) = tr ∇²G
    max_score        max_n ⟨η,x_n⟩ over atoms of positive weight
    log_sum_square   log Σ_n exp(2(⟨η,x_n⟩ + w_n)),  so that Σp² = exp(log_sum_square − 2G)
    sink_mass        probability of the sink, where one was added; it is not merged
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.typing import PerQuery, Queries

STATISTICS = (
    "mean",
    "mean_score",
    "score_variance",
    "mean_log_weight",
    "value_trace",
    "atom_trace",
    "max_score",
    "log_sum_square",
)


@dataclass(frozen=True, eq=False)
class Moments:
    """Statistics of p_η per query (see the module); what was not requested is None."""

    log_normalizer: PerQuery
    mean: Queries | None = None
    atom_mean: Queries | None = None
    mean_score: PerQuery | None = None
    score_variance: PerQuery | None = None
    mean_log_weight: PerQuery | None = None
    value_trace: PerQuery | None = None
    atom_trace: PerQuery | None = None
    max_score: PerQuery | None = None
    log_sum_square: PerQuery | None = None
    sink_mass: PerQuery | None = None

    @property
    def mass(self) -> PerQuery:
        """exp G: zero for a row without atoms. Overflows where G does; use `log_normalizer` for arithmetic."""
        return self.log_normalizer.exp()

    @property
    def entropy(self) -> PerQuery:
        """H(p) = G − Σ p ⟨η,x⟩ − Σ p w; zero for an empty row."""
        g = self.log_normalizer
        h = g - self._need("mean_score", "entropy") - self._need("mean_log_weight", "entropy")
        return torch.where(g == -torch.inf, 0, h)

    @property
    def perplexity(self) -> PerQuery:
        """exp H(p)."""
        return self.entropy.exp()

    @property
    def effective_atoms(self) -> PerQuery:
        """1/Σp² = exp(2G − log_sum_square); zero for an empty row."""
        g = self.log_normalizer
        empty = g == -torch.inf
        square = self._need("log_sum_square", "effective_atoms")
        exponent = torch.where(empty, 0, 2 * g - torch.where(empty, 0, square))
        return torch.where(empty, 0, exponent.exp())

    def merge(self, other: "Moments") -> "Moments":
        """The moments of the union of two disjoint sets of atoms.

        Means mix with weights e^{G_i − G}, variances add within and between:  u a + v b + u v (ā − b̄)².
        Commutative and associative; a record of mass 0 is the identity.

        >>> import torch
        >>> from cumulant.kernels import dense_moments
        >>> eta, x = torch.tensor([[0.5, -0.25]]), torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> parts = dense_moments(eta, x[:1]).merge(dense_moments(eta, x[1:]))
        >>> torch.allclose(parts.mean, dense_moments(eta, x).mean)
        True
        """
        self._same_fields(other)
        g, u, v = mixing_weights(self.log_normalizer, other.log_normalizer)

        def mix(name: str, spread: Tensor | None = None) -> Tensor | None:
            a, b = getattr(self, name), getattr(other, name)
            if a is None:
                return None
            if a.ndim > g.ndim:
                return u[..., None] * a + v[..., None] * b
            mixed = u * a + v * b
            return mixed if spread is None else mixed + u * v * spread

        return Moments(
            log_normalizer=g,
            mean=mix("mean"),
            atom_mean=mix("atom_mean"),
            mean_score=mix("mean_score"),
            score_variance=mix("score_variance", _gap(self.mean_score, other.mean_score)),
            mean_log_weight=mix("mean_log_weight"),
            value_trace=mix("value_trace", _gap(self.mean, other.mean, dim=-1)),
            atom_trace=mix("atom_trace", _gap(self.atom_mean, other.atom_mean, dim=-1)),
            max_score=_both(torch.maximum, self.max_score, other.max_score),
            log_sum_square=_both(safe_logaddexp, self.log_sum_square, other.log_sum_square),
        )

    def _need(self, name: str, asked: str) -> Tensor:
        value = getattr(self, name)
        if value is None:
            raise ValueError(
                sentence(f"Moments.{asked}", f"statistics that include {name!r}", "a record without it", "Request it.")
            )
        return value

    def _same_fields(self, other: "Moments") -> None:
        for f in fields(self):
            if f.name != "sink_mass" and (getattr(self, f.name) is None) != (getattr(other, f.name) is None):
                raise ValueError(
                    sentence("Moments.merge", f"both sides with {f.name!r}", "one without", "Request equal statistics.")
                )


def safe_logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """logaddexp whose gradient is 0, not NaN, where both sides are −inf."""
    return mixing_weights(a, b)[0]


def mixing_weights(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """g = logaddexp(a, b), e^{a−g}, e^{b−g}; the weights are 0 where both sides are empty."""
    top = torch.maximum(a, b).detach()
    top = torch.where(top.isfinite(), top, 0)
    ea, eb = torch.exp(a - top), torch.exp(b - top)
    total = ea + eb
    empty = total == 0
    total = torch.where(empty, 1, total)
    return torch.where(empty, -torch.inf, top + torch.log(total)), ea / total, eb / total


def _gap(a: Tensor | None, b: Tensor | None, dim: int | None = None) -> Tensor | None:
    if a is None or b is None:
        return None
    square = (a - b).square()
    return square if dim is None else square.sum(dim)


def _both(function, a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return None if a is None or b is None else function(a, b)
