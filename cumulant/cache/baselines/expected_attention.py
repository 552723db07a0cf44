"""Expected attention: of queries to come, as a Gaussian says they are (arXiv 2510.00636)."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.cache.compressor import ScoreCompressor
from cumulant.cache.prefix import LayerPrefix
from cumulant.checks import sentence


class ExpectedAttention(ScoreCompressor):
    """Mean and covariance of the prefix's queries, turned back to position 0, are turned to the mean of the next 512
    positions; a token's score is what a Gaussian of such queries pays to it, times the norm of its value.

        s_j = softmax_j(⟨μ, k_j⟩ + ½ k_jᵀ Σ k_j) · |v_j|,    μ = R̄ E[R_i⁻¹ η_i],  Σ = R̄ Cov(R_i⁻¹ η_i) R̄ᵀ

    The mean over the heads of a group. The first 4 tokens stay and are left out of the softmax and the law of queries.
    """

    name = "expected"

    def __init__(self, future: int = 512, sinks: int = 4):
        self.future, self.sinks = future, sinks

    def score(self, layer: LayerPrefix) -> Tensor:
        mean, covariance = self._law(layer)
        keys = layer.keys[:, self.sinks :].double().repeat_interleave(layer.groups, 0)
        scores = (keys @ mean[..., None])[..., 0] + (keys @ covariance * keys).sum(-1) / 2
        weights = scores.softmax(-1).unflatten(0, (-1, layer.groups)).mean(1)
        weights = weights * layer.values[:, self.sinks :].double().norm(dim=-1)
        return torch.nn.functional.pad(weights, (self.sinks, 0), value=torch.inf)

    def _law(self, layer: LayerPrefix) -> tuple[Tensor, Tensor]:
        """Mean (heads, d) and covariance (heads, d, d) of queries to come."""
        length = layer.keys.shape[1]
        if length <= self.sinks + 1:
            raise ValueError(sentence("ExpectedAttention", f"more than {self.sinks + 1} tokens", length, "Read more."))
        if layer.rotates and layer.rotation is None:
            advice = "Use a method that needs no rotation, as snapkv."
            got = f"{type(layer.module).__name__}, which rotates in a way that is not known"
            raise ValueError(sentence("ExpectedAttention", "rotary positions, or none", got, advice))
        queries = layer.queries[:, self.sinks :].double()
        positions = torch.arange(self.sinks, length, device=queries.device)
        if layer.rotation is not None:
            queries = layer.rotation.turn(queries, -positions)
        mean = queries.mean(1)
        centred = queries - mean[:, None]
        covariance = centred.mT @ centred / queries.shape[1]
        if layer.rotation is not None:
            to_come = torch.arange(length, length + self.future)
            turn = layer.rotation.mean_matrix(to_come, queries.shape[-1]).to(mean.device)
            mean, covariance = mean @ turn.mT, turn @ covariance @ turn.mT
        return mean, covariance
