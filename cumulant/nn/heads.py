"""Multi-head layers whose heads take their keys for a Gaussian, or for a few: approximate attention (S1-C1, S1-P2′)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

from torch import Tensor

from cumulant.checks import sentence
from cumulant.nn.calls import report_attention
from cumulant.nn.closures import approximate_by_gaussian, approximate_by_mixture
from cumulant.nn.projected import ProjectedAttention, ProjectedHeads


class _Approximate(ProjectedAttention, ABC):
    """`MultiheadAttention` with something simpler in the place of the keys. Abstract; its kinds are final."""

    @abstractmethod
    def _approximate(self, h: ProjectedHeads, **options) -> Tensor:
        """(batch, heads, q, e) from the projected heads."""

    def _forward(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool, masks: dict, **options):
        where = type(self).__name__
        if need_weights:
            advice = "Use MultiheadAttention for weights."
            raise ValueError(sentence(f"{where}.need_weights", "False: there are no weights here", True, advice))
        if self.training and self.dropout > 0:
            advice = "Call .eval(), or construct with dropout=0."
            raise ValueError(sentence(f"{where}.dropout", "0 in training: no weights to drop", self.dropout, advice))
        h = self._heads(query, key, value, **masks)
        output = self._approximate(h, **options)
        report_attention(self, h.eta, h.key, h.value, output, h.support, scale=self.head_dim**-0.5, rows=h.rows)
        return self._joined(output, query.ndim == 3), None


@final
class GaussianHead(_Approximate):
    """Heads that are affine in the query: the Gaussian with the keys' mean and covariance, approximately attention.

        out = v̄ + Cov(v, k) η,      η = W_q x / √d

    Constructor, masks and parameters of `MultiheadAttention`; ``GaussianHead.of(layer)`` takes over a trained one. The
    error is O(|η|²), and small while ½ ηᵀ Cov(k) η < log N (X-9). A query that sees no key has the mean 0.

    >>> import torch
    >>> from cumulant.nn import MultiheadAttention
    >>> exact = MultiheadAttention(8, 2, batch_first=True)
    >>> closed, x = GaussianHead.of(exact), torch.randn(1, 50, 8, generator=torch.Generator().manual_seed(0))
    >>> bool((closed(x / 9, x, x)[0] - exact(x / 9, x, x)[0]).abs().max() < 0.05)
    True
    """

    guarantees = "equals attention to first order in the query, and wherever the keys are Gaussian and many"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """As `MultiheadAttention.forward`; there are no weights to ask for."""
        masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask, "is_causal": is_causal}
        return self._forward(query, key, value, need_weights, masks)

    def _approximate(self, h: ProjectedHeads, **options) -> Tensor:
        return approximate_by_gaussian(h.eta, h.key, h.value, **h.support.arguments())


@final
class MixtureHead(_Approximate):
    """Heads whose keys are a few Gaussians, approximately attention; with one for each key it is attention.

        out = Σ_c w_c (v̄_c + Cov_c(v, k) η),     w = softmax_c(log π_c + ⟨k̄_c, η⟩ + ½ ηᵀ Cov_c(k) η)

    Constructor, masks and parameters of `MultiheadAttention`, and

    components  how many Gaussians, from k-means on the keys of every sequence and head
    seed        of the first centres

    Without ``responsibilities`` all queries must see the same keys. It fails where a cluster has condensed,
    ηᵀ Cov_c(k) η > 2 log N_c: the tail of a Gaussian has mass that no key has.

    >>> import torch
    >>> from cumulant.nn import MultiheadAttention
    >>> exact = MultiheadAttention(8, 2, batch_first=True)
    >>> closed, x = MixtureHead.of(exact, components=5), torch.randn(3, 5, 8)
    >>> torch.allclose(closed(x, x, x)[0], exact(x, x, x)[0], atol=1e-5)
    True
    """

    guarantees = "equals attention where every key has a component of its own; else to first order around each cluster"

    def __init__(self, *args, components: int = 8, seed: int = 0, **kwargs):
        super().__init__(*args, **kwargs)
        if not isinstance(components, int) or components < 1:
            expected, advice = "a positive integer", "1 is GaussianHead."
            raise ValueError(sentence("MixtureHead.components", expected, components, advice))
        self.components, self.seed = components, seed

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        responsibilities: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """As `MultiheadAttention.forward`; there are no weights to ask for.

        responsibilities  (n, c), (heads, n, c) or (batch, heads | 1, n, c): shares ≥ 0 of the components in each key,
                          in the place of k-means; then any mask will do
        """
        masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask, "is_causal": is_causal}
        return self._forward(query, key, value, need_weights, masks, responsibilities=responsibilities)

    def _approximate(self, h: ProjectedHeads, **options) -> Tensor:
        clusters = {"components": self.components, "seed": self.seed}
        return approximate_by_mixture(h.eta, h.key, h.value, **clusters, **options, **h.support.arguments())
