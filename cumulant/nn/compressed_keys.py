"""The keys that a compressed cache hands to an attention function: recent tokens, and a measure before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.kernels.arguments import Support
from cumulant.kernels.autocast import autocast
from cumulant.kernels.dense import accumulate
from cumulant.kernels.moments import Moments
from cumulant.kernels.native.direct import Arguments, MomentsSettings
from cumulant.kernels.operator import scaled_moments
from cumulant.kernels.ragged import RaggedAtoms, ragged_moments
from cumulant.nn.attention_interface import capped_scores

# torch's only constructor of such tensors
_make: Any = torch.compiler.disable(getattr(Tensor, "_make_wrapper_subclass"))  # noqa: B009


class CompressedKeys(Tensor):
    """Keys (batch, key heads, n, d) of the n tokens that were not compressed, with the measure of those that were.

        output_i = (Z_i m_i + Σ_j e^{⟨η_i,k_j⟩} v_j) / (Z_i + Σ_j e^{⟨η_i,k_j⟩}),   Z_i = Σ_c e^{⟨η_i,k_c⟩ + w_c},
        m_i = Σ_c e^{⟨η_i,k_c⟩ + w_c} v_c / Z_i      c over compressed entries, j over recent tokens the mask shows

    To everyone it has shape, dtype and device of the recent keys, as the masks of transformers count them; any
    operation on it is a TypeError in words, so that no attention function loses the measure without a notice. The
    attention function "cumulant" calls `moments`.

    recent    (batch, key heads, n, d) the keys themselves
    entries   the measure of each key head, `RaggedAtoms`; None: nothing is compressed
    cap       scores are cap · tanh(score / cap); None: as they are
    receiver  of a cache that keeps queries: called once the output is known, with (batch, heads, q, d) queries, the
              factor of scores and which recent tokens they see; None: nobody wants them
    """

    recent: Tensor
    entries: RaggedAtoms | None
    cap: float | None
    receiver: Callable[[Tensor, float, Support], None] | None

    @classmethod
    def of(
        cls,
        recent: Tensor,
        entries: RaggedAtoms | None,
        cap: float | None = None,
        receiver: Callable[[Tensor, float, Support], None] | None = None,
    ) -> CompressedKeys:
        keys = _make(cls, recent.shape, dtype=recent.dtype, device=recent.device)
        keys.recent, keys.entries, keys.cap, keys.receiver = recent, entries, cap, receiver
        return keys

    # shape, dtype and device are answered without an operation
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType, reportPrivateUsage]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        expected = 'attn_implementation="cumulant", which reads compressed entries and hands on queries'
        advice = 'Call model.set_attn_implementation("cumulant"), outside torch.compile.'
        got = f"an attention function that computes {func.__name__.split('.')[0]} of its keys"
        raise TypeError(sentence("MeasureCache", expected, got, advice))

    def __repr__(self, *, tensor_contents: object = None) -> str:
        held = () if self.entries is None else tuple(self.entries.atoms.shape)
        return f"CompressedKeys({tuple(self.shape)}, entries {held})"

    def capped(self, cap: float) -> CompressedKeys:
        """The same with capped scores."""
        return CompressedKeys.of(self.recent, self.entries, cap, self.receiver)

    @torch.compiler.disable
    def receive(self, query: Tensor, scale: float, support: Support) -> None:
        """Hand queries (batch, heads, q, d) to who keeps a sample of them."""
        if self.receiver is not None:
            self.receiver(query, scale, support)

    def require_plain(self, support: Support) -> None:
        """Refuse what has no meaning for entries without a position: biases, and masks of other than recent keys."""
        where, n = "attention_function.attention_mask", self.shape[-2]
        if support.log_weights is not None:
            advice = "Merged entries have no position; use a model with rotary or learned positions."
            raise ValueError(sentence(where, "no bias of pairs on a compressed cache", "one", advice))
        if support.mask is not None and support.mask.shape[-1] not in (1, n):
            expected, got = f"a mask over the {n} tokens that are not compressed", f"one of {support.mask.shape[-1]}"
            advice = "Pass masks (batch, tokens), of all tokens: the model cuts them to the cache."
            raise ValueError(sentence(where, expected, got, advice))

    @torch.compiler.disable
    def moments(self, query: Tensor, values: Tensor, support: Support, wanted: frozenset[str], scale: float) -> Moments:
        """Statistics of (batch, heads, q, d) queries over the measure and the recent tokens together.

        values   (batch, key heads, n, e) of the recent tokens
        support  which of the recent tokens a query sees; its sink counts once
        wanted   names of statistics that kernels form; "mean" always comes

        >>> recent, value = torch.zeros(1, 1, 1, 2), torch.tensor([[[[4.0]]]])
        >>> rows = torch.tensor([[0]]), torch.tensor([[1]])
        >>> old = RaggedAtoms(torch.zeros(1, 2), torch.tensor([[1.0]]), torch.zeros(1), *rows)
        >>> keys = CompressedKeys.of(recent, old)                             # mass 1 at value 1, mass 1 at value 4
        >>> keys.moments(recent, value, Support(), frozenset({"mean"}), 1.0).mean
        tensor([[[[2.5000]]]])
        """
        wanted |= {"mean"}
        if self.entries is None:
            return self._recent_moments(query, values, support, wanted, scale)
        old = ragged_moments(query, self.entries, MomentsSettings(wanted, scale, False, None, None), self.cap)
        new = self._recent_moments(query, values, support, wanted, scale)
        merged = _mixed(old, new) if wanted == {"mean"} else _merged(old, new)
        if new.sink_mass is None:
            return merged
        share = (new.log_normalizer - merged.log_normalizer).exp()
        return replace(merged, sink_mass=torch.where(new.log_normalizer == -torch.inf, 0, new.sink_mass * share))

    def _recent_moments(
        self, query: Tensor, values: Tensor, support: Support, wanted: frozenset[str], scale: float
    ) -> Moments:
        query, key, values = autocast(query, self.recent, values)
        weights = autocast(support.log_weights)[0]
        if self.cap is not None:
            query, key, values = accumulate(query) * scale, accumulate(key), accumulate(values)
            score = capped_scores(query, key, self.cap)
            weights = score if weights is None else score + weights
            query, scale = torch.zeros_like(query), 1.0
        settings = MomentsSettings(wanted, scale, support.causal, support.window, support.offset)
        return scaled_moments(
            Arguments(query, key, values, weights, support.mask, None), support.sink, settings, "auto"
        )


def _merged(a: Moments, b: Moments) -> Moments:
    """`Moments.merge` of the statistics of both: one side may have a weight of 0 that nobody asked for."""
    both = a.statistics.keys() & b.statistics.keys()
    a, b = (replace(m, statistics={name: m.statistics[name] for name in both}, sink_mass=None) for m in (a, b))
    return a.merge(b)


def _mixed(a: Moments, b: Moments) -> Moments:
    """`Moments.merge` of means, in few operations: e^{G_a − G} is a logistic function of G_a − G_b."""
    finite = b.log_normalizer.clamp_min(torch.finfo(b.log_normalizer.dtype).min)  # two empty sides have no difference
    share = torch.sigmoid(a.log_normalizer - finite)[..., None]
    mean = torch.lerp(b.mean, a.mean, share)
    return Moments(torch.logaddexp(a.log_normalizer, b.log_normalizer), {"mean": mean})
