"""The interface of a block of a sequence model: tokens in, tokens of the same shape out, and one sentence that holds.

The residual is inside: a model is a chain x = block(x), and one kind of block can take the place of another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from math import isfinite

import torch
from torch import Tensor, nn

from cumulant.checks import holds, require_alike, require_device, require_float, sentence, shape
from cumulant.kernels import Moments, moments


class SequenceBlock(nn.Module, ABC):
    """A map of tokens (*batch, n, dim) to tokens of that shape. Abstract; its kinds are final.

    dim, heads  the width of the stream and the number of heads
    head_dim    the width of a head, dim / heads if None
    causal      token i depends on tokens j ≤ i only

    Called as torch.nn.TransformerEncoder calls its layers (src_mask, is_causal, src_key_padding_mask) it does the same;
    a mask of pairs must be the causal one, and the block causal.
    """

    def __init__(self, dim: int, heads: int, head_dim: int | None, causal: bool):
        super().__init__()
        self.dim, self.heads = self._count("dim", dim), self._count("heads", heads)
        if head_dim is None and dim % heads:
            expected, advice = f"a number of heads that divides dim={dim}", "Or give head_dim."
            raise ValueError(sentence(self._at("heads"), expected, heads, advice))
        self.head_dim = dim // heads if head_dim is None else self._count("head_dim", head_dim)
        self.causal = bool(causal)
        self.register_forward_pre_hook(_from_torch, with_kwargs=True)

    @property
    @abstractmethod
    def guarantees(self) -> str:
        """One sentence of what holds for these weights and every input."""

    @abstractmethod
    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """x (*batch, n, dim); key_padding_mask (*batch, n), True = padding as in torch, which no token sees."""

    def _at(self, argument: str) -> str:
        return f"{type(self).__name__}.{argument}"

    def _count(self, name: str, number: int, least: int = 1) -> int:
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(sentence(self._at(name), f"an integer of at least {least}", number, "Check the sizes."))
        return number

    def _positive(self, name: str, number: float | Tensor, size: int) -> Tensor:
        """A number or one per head, as a tensor (size,) of its logarithm."""
        positive = torch.as_tensor(number, dtype=torch.get_default_dtype())
        if positive.shape not in ((), (size,)) or not holds((positive > 0) & (positive < torch.inf)):
            expected, advice = f"a positive number, or {size} of them", "It may be learned, through its logarithm."
            raise ValueError(sentence(self._at(name), expected, number, advice))
        return positive.log().expand(size).clone()

    def _number(self, name: str, number: float) -> float:
        if isinstance(number, bool) or not isinstance(number, int | float) or not (number > 0 and isfinite(number)):
            raise ValueError(sentence(self._at(name), "a positive number", number, "See the formula."))
        return float(number)

    def _choice(self, name: str, value: str, known: tuple[str, ...]) -> str:
        if value not in known:
            raise ValueError(sentence(self._at(name), f"one of {', '.join(known)}", repr(value), "Pick one."))
        return value

    def _tokens(self, name: str, x: Tensor) -> Tensor:
        """(*batch, n, dim) → (b, n, dim)"""
        require_alike(self._at(name), require_float(self._at(name), x), "the weights", next(self.parameters()))
        if x.ndim < 2 or x.shape[-1] != self.dim:
            expected = f"tokens of shape (*batch, n, dim={self.dim})"
            raise ValueError(sentence(self._at(name), expected, shape(x), "Check the last axis."))
        return x.reshape(x.shape[:-2].numel(), *x.shape[-2:])

    def _padding(self, mask: Tensor | None, x: Tensor) -> Tensor | None:
        """(*batch, n) → (b, n), True where a token is padding."""
        if mask is None:
            return None
        where = self._at("key_padding_mask")
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(sentence(where, "a Boolean tensor", got, "True marks padding, as in torch."))
        if mask.shape != x.shape[:-1]:
            expected = f"one flag per token, {tuple(x.shape[:-1])}"
            raise ValueError(sentence(where, expected, shape(mask), "True marks padding, as in torch."))
        require_device(where, mask, "x", x)
        return mask.reshape(mask.shape[:-1].numel(), mask.shape[-1])


def _from_torch(block: SequenceBlock, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """The arguments of torch's encoder layers as ours."""
    if not kwargs.keys() & {"src_mask", "is_causal", "src_key_padding_mask"}:
        return None
    known = {name: kwargs.pop(name, None) for name in ("src_mask", "is_causal", "src_key_padding_mask")}
    mask, padding = known["src_mask"], known["src_key_padding_mask"]
    if mask is not None or known["is_causal"]:
        blocked = None if mask is None else (mask if mask.dtype == torch.bool else mask < 0)
        usual = blocked is None or torch.equal(blocked, torch.ones_like(blocked).triu(1))
        if not (block.causal and usual):
            advice = "Construct the block with causal=True; no other order of tokens is known to it."
            got = "the causal one" if usual else "another"
            raise ValueError(sentence(f"{type(block).__name__}.src_mask", "no mask of pairs", got, advice))
    if padding is not None:
        kwargs["key_padding_mask"] = padding if padding.dtype == torch.bool else padding < 0
    return args, kwargs


def split(x: Tensor, weight: Tensor) -> Tensor:
    """Tokens as each head reads them:  (b, n, D), (heads, d, D) → (b, heads, n, d)"""
    heads, width, _ = weight.shape
    return (x @ weight.flatten(0, 1).mT).unflatten(-1, (heads, width)).transpose(-3, -2)


def join(y: Tensor, weight: Tensor) -> Tensor:
    """The transpose of `split`, Σ_h W_hᵀ y_h:  (b, heads, n, d), (heads, d, D) → (b, n, D)"""
    return y.transpose(-3, -2).flatten(-2) @ weight.flatten(0, 1)


def strict_past_moments(eta: Tensor, keys: Tensor, statistics: Collection[str], mask: Tensor | None = None) -> Moments:
    """What every query sees of the keys strictly before it; the first sees nothing.

    Query i + 1 and key i stand at one index after a shift by one, the order that the fused kernel knows.

    eta, keys  (b, heads, n, d);  mask  (b, 1, 1, n), True = seen
    """
    mask = None if mask is None or eta.shape[-2] < 2 else mask[..., :-1]
    past = moments(eta[..., 1:, :], keys[..., :-1, :], causal=True, mask=mask, statistics=statistics)
    g = torch.nn.functional.pad(past.log_normalizer, (1, 0), value=-torch.inf)
    if "mean" not in past.statistics:
        return Moments(g)
    return Moments(g, {"mean": torch.nn.functional.pad(past.mean, (0, 0, 1, 0))})
