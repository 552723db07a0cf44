"""Restricted Boltzmann machines, and contrastive divergence in the sense of Hinton (§10, X-13).

    p(v, h) = e^{−E(v,h)} / Z,      E(v, h) = −⟨b,v⟩ − ⟨c,h⟩ − vᵀWh,      v and h vectors of 0 and 1
    log Σ_h e^{−E(v,h)} = ⟨b,v⟩ + Σ_k softplus(c_k + (vW)_k)

The hidden units summed out are a convolution of two-atom measures {0, W_k} with masses 1 and e^{c_k}: the potential of
a fully connected layer with sigmoid units.

Contrastive *divergence* is not contrastive *learning*: it estimates the gradient data mean − model mean of a likelihood
by letting a Gibbs chain run k steps from the data, without candidates and without a softmax over them. InfoNCE and
related losses are in `cumulant.contrastive`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from cumulant.checks import holds, require_alike, require_finite, require_float, sentence, shape
from cumulant.kernels.dense import accumulate, normalize

MAX_ENUMERATED_UNITS = 20  # on the smaller side: 2²⁰ states
BLOCK_SIZE = 1 << 20  # numbers in memory at once during the enumeration


class Gradient(NamedTuple):
    """The derivative of the mean log-likelihood: weight (v, h), visible_bias (v,), hidden_bias (h,). Ascend it."""

    weight: Tensor
    visible_bias: Tensor
    hidden_bias: Tensor


@final
@dataclass(frozen=True, eq=False)
class RestrictedBoltzmann:
    """Binary visible and hidden units, joined only across the two sides (module docstring for the law).

    weight        (v, h)
    visible_bias  (v,), 0 if None
    hidden_bias   (h,), 0 if None

    States are floating tensors of 0 and 1, leading axes free; values in between are taken as probabilities. Half
    precision is accumulated in float32.

    >>> import torch
    >>> model = RestrictedBoltzmann(torch.tensor([[1.0, -1.0], [0.5, 2.0]], dtype=torch.float64))
    >>> model.hidden_mean(torch.tensor([1.0, 1.0], dtype=torch.float64))
    tensor([0.8176, 0.7311], dtype=torch.float64)
    >>> round(model.log_partition().item(), 12)
    3.945243009119
    """

    weight: Tensor
    visible_bias: Tensor | None = None
    hidden_bias: Tensor | None = None

    def __post_init__(self):
        where, w = "RestrictedBoltzmann", require_float("RestrictedBoltzmann.weight", self.weight)
        if w.ndim != 2:
            raise ValueError(sentence(f"{where}.weight", "shape (v, h)", shape(w), "Rows are visible units."))
        require_finite(f"{where}.weight", w)
        for name, bias, count in (
            ("visible_bias", self.visible_bias, w.shape[0]),
            ("hidden_bias", self.hidden_bias, w.shape[1]),
        ):
            if bias is None:
                continue
            require_alike(f"{where}.{name}", require_float(f"{where}.{name}", bias), "weight", w)
            if bias.shape != (count,):
                raise ValueError(sentence(f"{where}.{name}", f"shape ({count},)", shape(bias), "One per unit."))
            require_finite(f"{where}.{name}", bias)

    @property
    def swapped(self) -> RestrictedBoltzmann:
        """The same law with the two sides exchanged."""
        return RestrictedBoltzmann(self.weight.mT, self.hidden_bias, self.visible_bias)

    def energy(self, visible: Tensor, hidden: Tensor) -> Tensor:
        """E(v, h) = −⟨b,v⟩ − ⟨c,h⟩ − vᵀWh:  (*batch, v), (*batch, h) → (*batch)."""
        v, h = self._state("visible", visible, 0), self._state("hidden", hidden, 1)
        biases = -self._linear(v, self.visible_bias) - self._linear(h, self.hidden_bias)
        return biases - ((v @ self._weight) * h).sum(-1)

    def log_marginal(self, visible: Tensor) -> Tensor:
        """log Σ_h e^{−E(v,h)} = ⟨b,v⟩ + Σ_k softplus(c_k + (vW)_k), not normalised:  (*batch, v) → (*batch)."""
        v = self._state("visible", visible, 0)
        return self._linear(v, self.visible_bias) - logsigmoid(-self._field(v)).sum(-1)

    def log_likelihood(self, visible: Tensor) -> Tensor:
        """log p(v) = log_marginal − log Z, by enumeration:  (*batch, v) → (*batch)."""
        return self.log_marginal(visible) - self.log_partition()

    def hidden_mean(self, visible: Tensor) -> Tensor:
        """E[h | v] = sigmoid(c + vW):  (*batch, v) → (*batch, h)."""
        return torch.sigmoid(self._field(self._state("visible", visible, 0)))

    def visible_mean(self, hidden: Tensor) -> Tensor:
        """E[v | h] = sigmoid(b + Wh):  (*batch, h) → (*batch, v)."""
        return torch.sigmoid(self.swapped._field(self._state("hidden", hidden, 1)))

    def sample_hidden(self, visible: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """h given v, independent units of 0 and 1:  (*batch, v) → (*batch, h)."""
        return torch.bernoulli(self.hidden_mean(visible).detach(), generator=generator).to(self.weight.dtype)

    def sample_visible(self, hidden: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """v given h, independent units of 0 and 1:  (*batch, h) → (*batch, v)."""
        return torch.bernoulli(self.visible_mean(hidden).detach(), generator=generator).to(self.weight.dtype)

    def log_partition(self) -> Tensor:
        """log Z = log Σ_v e^{log_marginal(v)}, by enumeration of the smaller side; at most 20 units there."""
        side = self if self.weight.shape[0] <= self.weight.shape[1] else self.swapped
        totals = [normalize(side.log_marginal(block))[0] for block in side._states("log_partition")]
        return torch.logsumexp(torch.stack(totals), 0)

    def likelihood_gradient(self, data: Tensor) -> Gradient:
        """The exact gradient of the mean log-likelihood of data, E_data[∂] − E_model[∂], by enumeration.

            ∂/∂W = ⟨v E[h|v]ᵀ⟩_data − ⟨v hᵀ⟩_model,    ∂/∂b = ⟨v⟩_data − ⟨v⟩_model,    ∂/∂c likewise with h

        data (n, v); 0 without data. At most 20 units on the smaller side.

        >>> import torch
        >>> model = RestrictedBoltzmann(torch.zeros(2, 1))
        >>> model.likelihood_gradient(torch.tensor([[1.0, 1.0]])).visible_bias
        tensor([0.5000, 0.5000])
        """
        v = self._data("likelihood_gradient", data)
        if len(v) == 0:
            return self._zero_gradient()
        small = self.weight.shape[0] <= self.weight.shape[1]
        side = self if small else self.swapped
        log_z = self.log_partition().detach()
        sums = list(side._zero_gradient())
        with torch.no_grad():
            for block in side._states("likelihood_gradient"):
                p = (side.log_marginal(block) - log_z).exp()[:, None]
                states, other = accumulate(block), side.hidden_mean(block)
                parts = states.mT @ (p * other), (p * states).sum(0), (p * other).sum(0)
                sums = [total + part for total, part in zip(sums, parts, strict=True)]
        model = Gradient(*sums) if small else Gradient(sums[0].mT, sums[2], sums[1])
        return _minus(self._expectation(v), model)

    @property
    def _weight(self) -> Tensor:
        return accumulate(self.weight)

    def _linear(self, state: Tensor, bias: Tensor | None) -> Tensor:
        return state.new_zeros(state.shape[:-1]) if bias is None else (state * accumulate(bias)).sum(-1)

    def _field(self, visible: Tensor) -> Tensor:
        """c + vW, the natural parameters of the hidden units."""
        field = visible @ self._weight
        return field if self.hidden_bias is None else field + accumulate(self.hidden_bias)

    def _state(self, name: str, state: Tensor, axis: int) -> Tensor:
        where, count = f"RestrictedBoltzmann.{name}", self.weight.shape[axis]
        require_alike(where, require_float(where, state), "weight", self.weight)
        if state.ndim == 0 or state.shape[-1] != count:
            raise ValueError(sentence(where, f"shape (*batch, {count})", shape(state), "Units go last."))
        if not holds((state >= 0) & (state <= 1)):
            raise ValueError(sentence(where, "values in [0, 1]", "some outside", "Units are 0 or 1."))
        return accumulate(state)

    def _data(self, where: str, data: Tensor) -> Tensor:
        v = self._state("visible", data, 0)
        if v.ndim != 2:
            expected = f"shape (n, {self.weight.shape[0]})"
            raise ValueError(sentence(f"{where}.data", expected, shape(data), "Rows are examples."))
        return v

    def _zero_gradient(self) -> Gradient:
        w = self._weight.detach()
        return Gradient(torch.zeros_like(w), w.new_zeros(w.shape[0]), w.new_zeros(w.shape[1]))

    def _expectation(self, visible: Tensor) -> Gradient:
        """⟨v E[h|v]ᵀ⟩, ⟨v⟩ and ⟨E[h|v]⟩ over rows."""
        hidden = torch.sigmoid(self._field(visible)).detach()
        return Gradient(visible.mT @ hidden / len(visible), visible.mean(0), hidden.mean(0))

    def _states(self, where: str):
        """All states of the visible side, in blocks of rows."""
        units, other = self.weight.shape
        if units > MAX_ENUMERATED_UNITS:
            advice = "Use contrastive_divergence, or a smaller side."
            got = f"{units} and {other}" if units <= other else f"{other} and {units}"
            expected = f"at most {MAX_ENUMERATED_UNITS} units on one side, to enumerate their states"
            raise ValueError(sentence(f"RestrictedBoltzmann.{where}", expected, got, advice))
        step = max(1, BLOCK_SIZE // max(1, units + other))
        bits = torch.arange(units, device=self.weight.device)
        for start in range(0, 1 << units, step):
            codes = torch.arange(start, min(start + step, 1 << units), device=self.weight.device)
            yield ((codes[:, None] >> bits) & 1).to(self.weight.dtype)


def contrastive_divergence(
    model: RestrictedBoltzmann, data: Tensor, steps: int = 1, *, generator: torch.Generator | None = None
) -> Gradient:
    """Hinton's CD-k: the likelihood gradient with the model's mean replaced by that of a k-step Gibbs chain from data.

        Δ = ⟨v E[h|v]ᵀ⟩_data − ⟨v E[h|v]ᵀ⟩_k steps of  h ~ p(h|v), v ~ p(v|h)

    data (n, v), one chain each. Random, and biased for every finite k: the chain is not at equilibrium. The bias
    vanishes as k grows. Zero without data.

    >>> import torch
    >>> model = RestrictedBoltzmann(torch.zeros(2, 1))                       # fair coins: one step is exact
    >>> g = contrastive_divergence(model, torch.ones(10_000, 2), generator=torch.Generator().manual_seed(0))
    >>> bool((g.visible_bias - 0.5).abs().max() < 0.02)
    True
    """
    if not isinstance(model, RestrictedBoltzmann):
        got = type(model).__name__
        raise TypeError(sentence("contrastive_divergence.model", "a RestrictedBoltzmann", got, "Build one first."))
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(sentence("contrastive_divergence.steps", "a number of steps ≥ 1", steps, "1 is CD-1."))
    v = model._data("contrastive_divergence", data)  # pyright: ignore[reportPrivateUsage]
    if len(v) == 0:
        return model._zero_gradient()  # pyright: ignore[reportPrivateUsage]
    chain = data
    for _ in range(steps):
        chain = model.sample_visible(model.sample_hidden(chain, generator=generator), generator=generator)
    return _minus(model._expectation(v), model._expectation(accumulate(chain)))  # pyright: ignore[reportPrivateUsage]


def _minus(a: Gradient, b: Gradient) -> Gradient:
    return Gradient(*(one - other for one, other in zip(a, b, strict=True)))
