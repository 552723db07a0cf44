"""Multi-head attention with torch's constructor, masks and parameters, and with what the family says about each head.

    η_h = W_q,h x / √d,   k_h = W_k,h c,   v_h = W_v,h c,   output = W_o [Σ_j p_hij v_hj]_h,   p = softmax(⟨η,k⟩ + w)

Every head is an exponential family over its keys (S1-E1). What torch calls ``add_zero_attn`` is a sink: one more atom
at 0 with value 0.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, final

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from cumulant.attention import Attended, attend
from cumulant.checks import sentence
from cumulant.kernels import Moments, moments
from cumulant.kernels.dense import accumulate, normalize, without_nonfinite
from cumulant.nn.call_statistics import requested_statistics
from cumulant.nn.calls import report_attention
from cumulant.nn.largest_logit import is_recording, record_largest_logit
from cumulant.nn.masks import without_pairs
from cumulant.nn.projected import ProjectedAttention, ProjectedHeads


class MultiheadAttended(NamedTuple):
    """What `MultiheadAttention.attend` returns.

    output  as of `MultiheadAttention.forward`
    heads   `Attended` with a head axis: log_normalizer, entropy, … (batch, heads, q); output (batch, heads, q, d)
    """

    output: Tensor
    heads: Attended


@final
class MultiheadAttention(ProjectedAttention):
    """torch.nn.MultiheadAttention, argument for argument and parameter for parameter: state dicts load both ways.

        output = W_o [Σ_j p_hij W_v,h c_j]_h + b_o

    The first eleven arguments are torch's.

    drop  what ``dropout`` does in training. "weights": as torch, weights are zeroed and the rest is scaled up, after
          which they are no probability. "keys": keys are removed before the softmax, each query and head drawing its
          own, so that what is left is an exponential family and `attend` describes it.

    Other than in torch,
    - a query that sees no key has the mean 0, so that its output is the bias of the output projection (torch: NaN);
    - ``is_causal`` needs no mask beside it, and one that is not the causal mask is refused rather than ignored;
    - the key of ``add_bias_kv`` is visible under ``is_causal`` as it is under the mask;
    - gradients of gradients exist without weights too, in memory linear in the tokens.

    >>> import torch
    >>> theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    >>> ours, x = MultiheadAttention.of(theirs), torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    >>> torch.allclose(ours(x, x, x)[0], theirs(x, x, x)[0], atol=1e-6)
    True
    >>> ours.attend(x, x, x).heads.entropy.shape
    torch.Size([3, 2, 5])
    """

    guarantees = "each head's output is the gradient of its log-normalizer in the direction of the values"

    def __init__(self, *args, drop: Literal["weights", "keys"] = "weights", **kwargs):
        super().__init__(*args, **kwargs)
        if drop not in ("weights", "keys"):
            expected, advice = "'weights' or 'keys'", "torch's dropout is 'weights'."
            raise ValueError(sentence("MultiheadAttention.drop", expected, repr(drop), advice))
        self.drop = drop

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the weights if asked for, as torch.

        query, key, value     (tokens, batch, ·), with ``batch_first`` (batch, tokens, ·), or (tokens, ·)
        key_padding_mask      (batch, n); True is blocked, numbers are added to the scores
        attn_mask             (q, n) or (batch · heads, q, n), likewise
        need_weights          also the weights (batch, q, n): queries × keys in memory, which without them (and without
                              dropout of weights) is never held. True by default because it is in torch.
        average_attn_weights  False: the weights of each head, (batch, heads, q, n)
        is_causal             key j is visible to query i iff j ≤ i
        """
        masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask, "is_causal": is_causal}
        h = self._dropped(self._heads(query, key, value, **masks))
        request, m = requested_statistics(self), None
        drops_weights = self.training and self.dropout > 0 and self.drop == "weights"
        if need_weights or drops_weights or not h.eta.shape[0]:
            output, weights = self._dense(h, self.dropout if drops_weights else 0.0)
            self._record(h)
        else:
            recorded, asked = is_recording(self), () if request is None else tuple(request.statistics)
            asked = (*asked, "max_score", "mean") if recorded else (*asked, "mean")
            m = moments(h.eta, h.key, h.value, statistics=asked, **h.support.arguments())
            if recorded:
                record_largest_logit(self, m.max_score)
            output, weights = m.mean, None
        self._report(h, output, m)
        out = self._joined(output, query.ndim == 3)
        if not need_weights or weights is None:
            return out, None
        weights = weights.mean(1) if average_attn_weights else weights
        return out, weights if query.ndim == 3 else weights[0]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> MultiheadAttended:
        """The output with each head's log-normalizer, entropy, … in linear memory and differentiable.

        Arguments as of `forward`. Refused while dropout makes the weights something else than probabilities.
        """
        if self.training and self.dropout > 0 and self.drop == "weights":
            expected, advice = "probabilities", "Call .eval(), or construct with drop='keys'."
            raise ValueError(
                sentence("MultiheadAttention.attend", expected, f"weights with dropout={self.dropout}", advice)
            )
        masks = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask, "is_causal": is_causal}
        h = self._dropped(self._heads(query, key, value, **masks))
        heads = attend(h.eta, h.key, h.value, scale=1.0, **h.support.arguments())
        self._record(h)
        self._report(h, heads.output)
        out = self._joined(heads.output, query.ndim == 3)
        if query.ndim == 2:
            heads = Attended(*(None if part is None else part[0] for part in heads))  # pyright: ignore[reportArgumentType]
        return MultiheadAttended(out, heads)

    def _dropped(self, h: ProjectedHeads) -> ProjectedHeads:
        if not (self.training and self.dropout > 0 and self.drop == "keys"):
            return h
        size = (*h.eta.shape[:-1], h.key.shape[-2])
        gone = torch.rand(size, device=h.eta.device) < self.dropout
        return h._replace(support=without_pairs(h.support, gone))

    def _dense(self, h: ProjectedHeads, rate: float) -> tuple[Tensor, Tensor]:
        """Means (batch, heads, q, d) and weights (batch, heads, q, n), the sink's last where there is one."""
        eta, key, value = accumulate(h.eta), accumulate(h.key), h.value
        if h.support.unrestricted:
            logits = eta @ key.mT
        else:
            absent = h.support.weigh(eta.new_zeros(1, 1, eta.shape[-2], key.shape[-2])) == -torch.inf
            eta, key, value = without_nonfinite(eta, key, value, ~absent)
            logits = h.support.weigh(eta @ key.mT).masked_fill(absent, -torch.inf)
        if self.add_zero_attn:
            logits = pad(logits, (0, 1), value=0.0)
        p = dropout(normalize(logits)[1], rate).to(h.value.dtype)
        return p[..., : key.shape[-2]] @ value, p

    def _record(self, h: ProjectedHeads) -> None:
        """The largest logits, by a call of their own where the output does not come from `moments`."""
        if is_recording(self):
            m = moments(h.eta.detach(), h.key.detach(), statistics=("max_score",), **h.support.arguments())
            record_largest_logit(self, m.max_score)

    def _report(self, h: ProjectedHeads, output: Tensor, m: Moments | None = None) -> None:
        parts = {"scale": self.head_dim**-0.5, "rows": h.rows, "moments": m}
        report_attention(self, h.eta, h.key, h.value, output, h.support, **parts)
