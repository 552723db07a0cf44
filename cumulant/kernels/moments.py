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

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.display import html_table, one_line
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
CENTRED = {"score_variance": "mean_score", "value_trace": "mean", "atom_trace": "atom_mean"}  # variance: its mean
ATOMS_AS_VALUES = {"mean": "atom_mean", "value_trace": "atom_trace"}  # the same where the values are the atoms


@dataclass(frozen=True, eq=False)
class Moments:
    """Statistics of p_η per query (see the module).

    log_normalizer  (*batch, q)
    statistics      what was computed, by name; a property below raises a ValueError where its statistic is missing
    sink_mass       (*batch, q), or None where no sink was added
    nonempty        whether it is known that every query sees an atom
    """

    log_normalizer: PerQuery
    statistics: dict[str, Tensor] = field(default_factory=dict)
    sink_mass: PerQuery | None = None
    nonempty: bool = False

    def __repr__(self) -> str:
        return one_line("Moments", self._parts())

    def _repr_html_(self) -> str:
        return html_table("Moments, per query", self._parts())

    def _parts(self) -> dict[str, Tensor]:
        sink = {} if self.sink_mass is None else {"sink_mass": self.sink_mass}
        return {"log_normalizer": self.log_normalizer, **self.statistics, **sink}

    @property
    def mean(self) -> Queries:
        """Σ p v; the mean of the atoms where no values were given."""
        return self._requested("mean", "mean")

    @property
    def atom_mean(self) -> Queries:
        """Σ p x = ∇G."""
        return self._requested("atom_mean", "atom_mean")

    @property
    def mean_score(self) -> PerQuery:
        """Σ p ⟨η,x⟩."""
        return self._requested("mean_score", "mean_score")

    @property
    def score_variance(self) -> PerQuery:
        """Var_p ⟨η,x⟩."""
        return self._requested("score_variance", "score_variance")

    @property
    def mean_log_weight(self) -> PerQuery:
        """Σ p w."""
        return self._requested("mean_log_weight", "mean_log_weight")

    @property
    def value_trace(self) -> PerQuery:
        """tr Cov_p(v)."""
        return self._requested("value_trace", "value_trace")

    @property
    def atom_trace(self) -> PerQuery:
        """tr Cov_p(x) = tr ∇²G."""
        return self._requested("atom_trace", "atom_trace")

    @property
    def max_score(self) -> PerQuery:
        """max_n ⟨η,x_n⟩ over atoms of positive weight."""
        return self._requested("max_score", "max_score")

    @property
    def log_sum_square(self) -> PerQuery:
        """log Σ_n exp(2(⟨η,x_n⟩ + w_n))."""
        return self._requested("log_sum_square", "log_sum_square")

    @property
    def mass(self) -> PerQuery:
        """exp G: zero for a row without atoms. Overflows where G does; use `log_normalizer` for arithmetic."""
        return self.log_normalizer.exp()

    @property
    def entropy(self) -> PerQuery:
        """H(p) = G − Σ p ⟨η,x⟩ − Σ p w; zero for an empty row."""
        g = self.log_normalizer
        h = g - self._requested("mean_score", "entropy") - self._requested("mean_log_weight", "entropy")
        return h if self.nonempty else torch.where(g == -torch.inf, 0, h)

    @property
    def perplexity(self) -> PerQuery:
        """exp H(p)."""
        return self.entropy.exp()

    @property
    def effective_atoms(self) -> PerQuery:
        """1/Σp² = exp(2G − log_sum_square); zero for an empty row."""
        g = self.log_normalizer
        square = self._requested("log_sum_square", "effective_atoms")
        if self.nonempty:
            return (2 * g - square).exp()
        empty = g == -torch.inf
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
        for name in sorted(self.statistics.keys() ^ other.statistics.keys()):
            expected, advice = f"both sides with {name!r}", "Request equal statistics."
            raise ValueError(sentence("Moments.merge", expected, "one without", advice))
        g, u, v = mixing_weights(self.log_normalizer, other.log_normalizer)
        mixed = {}
        for name, a in self.statistics.items():
            b = other.statistics[name]
            if name == "max_score":
                mixed[name] = torch.maximum(a, b)
            elif name == "log_sum_square":
                mixed[name] = safe_logaddexp(a, b)
            elif a.ndim > g.ndim:
                mixed[name] = u[..., None] * a + v[..., None] * b
            else:
                mixed[name] = u * a + v * b
            if name in CENTRED:
                gap = (self.statistics[CENTRED[name]] - other.statistics[CENTRED[name]]).square()
                mixed[name] = mixed[name] + u * v * (gap.sum(-1) if gap.ndim > g.ndim else gap)
        return Moments(g, mixed, nonempty=self.nonempty or other.nonempty)

    def _requested(self, name: str, attribute: str) -> Tensor:
        if name not in self.statistics:
            expected = f"statistics that include {name!r}"
            raise ValueError(sentence(f"Moments.{attribute}", expected, "a record without it", "Request it."))
        return self.statistics[name]


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
