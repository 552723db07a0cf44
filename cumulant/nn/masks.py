"""torch.nn's two masks as edits of the measure: which keys a query sees, and with what weight.

In this room ``attn_mask`` and ``key_padding_mask`` mean what they mean in torch.nn: **True is blocked**, the reverse of
`attend` and of scaled_dot_product_attention; a floating mask is added to the scores.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from cumulant.checks import holds, known, require_device, sentence, shape
from cumulant.kernels.arguments import Support, intersect

LARGEST_MASK = 1 << 25  # entries of a mask that may be made for the sake of speed


def as_one_mask(support: Support, queries: int, heads: int) -> Support:
    """Causal order and mask as one mask where that is not too large: the fused kernel takes one of the two."""
    mask = support.mask
    if not support.causal or mask is None or mask.shape[0] * heads * queries * mask.shape[-1] > LARGEST_MASK:
        return support
    return replace(support, mask=mask & ~after(queries, mask.shape[-1], mask.device), causal=False, offset=None)


def without_pairs(support: Support, dropped: Tensor) -> Support:
    """Fewer keys: ``dropped`` (batch, heads, q, n) is True for those that go."""
    return replace(support, mask=intersect(support.mask, ~dropped))


def with_one_more_key(support: Support, queries: int, keys: int, device: torch.device) -> Support:
    """One more key at the end, which every query sees, in causal order too."""
    mask, w = support.mask, support.log_weights
    if support.causal:
        mask = intersect(mask, ~after(queries, keys, device)[None, None])
    mask = None if mask is None else pad(mask, (0, 1), value=True)
    return Support(mask=mask, log_weights=None if w is None else pad(w, (0, 1)))


def as_log_weights(support: Support, key: Tensor, queries: int) -> Tensor | None:
    """The same as log weights alone, (…, n) where all queries have the same and (…, q, n) else."""
    if support.unrestricted:
        return None
    rows = queries if support.causal else 1
    w = support.weigh(key.new_zeros(1, 1, rows, key.shape[-2]))
    return w[..., 0, :] if w.shape[-2] == 1 else w


def after(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """(q, n), True where a key comes after the query."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1)


def support_of_masks(
    where: str,
    query: Tensor,
    key: Tensor,
    *,
    heads: int,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Support:
    """What masks in torch's convention show to query (batch, q, ·) and key (batch, n, ·).

    attn_mask         (q, n) or (batch · heads, q, n); True is blocked, numbers are added to the scores
    key_padding_mask  (batch, n), likewise
    is_causal         attn_mask is the causal mask, or stands for it where there is none. torch trusts the word; here
                      another mask beside it is refused.
    """
    batch, q, n = query.shape[0], query.shape[1], key.shape[1]
    parts = []
    if attn_mask is not None:
        attn_mask = _checked(f"{where}.attn_mask", attn_mask, query, (q, n), (batch * heads, q, n))
        table = attn_mask.reshape((1, 1, q, n) if attn_mask.ndim == 2 else (batch, heads, q, n))
        if is_causal:
            _require_causal(where, table)
        else:
            parts.append(_visible_or_weight(table, query.dtype))
    if key_padding_mask is not None:
        table = _checked(f"{where}.key_padding_mask", key_padding_mask, query, (batch, n))[:, None, None]
        parts.append(_visible_or_weight(table, query.dtype))
    masks = [mask for mask, _ in parts if mask is not None]
    weights = [w for _, w in parts if w is not None]
    w = None if not weights else weights[0] if len(weights) == 1 else weights[0] + weights[1]
    return Support(
        mask=None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1],
        log_weights=w[..., 0, :] if w is not None and w.shape[-2] == 1 else w,  # alike for all queries: of the keys
        causal=is_causal,
        offset=0 if is_causal else None,
    )


def _checked(where: str, mask: Tensor, query: Tensor, *shapes: tuple[int, ...]) -> Tensor:
    if not isinstance(mask, Tensor) or (mask.dtype != torch.bool and not mask.is_floating_point()):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        advice = "True means blocked; for 0/1 integers call .bool()."
        raise TypeError(sentence(where, "a Boolean or floating mask", got, advice))
    if tuple(mask.shape) not in shapes:
        expected = " or ".join("(" + ", ".join(map(str, s)) + ")" for s in shapes)
        raise ValueError(sentence(where, f"shape {expected}", shape(mask), "Keys are on the last axis."))
    require_device(where, mask, "query", query)
    return mask


def _visible_or_weight(table: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """(True = attend, None), or (None, log weights); a floating mask of 0 and −inf is a Boolean one for the kernels."""
    if table.dtype == torch.bool:
        return ~table, None
    shut = table == -torch.inf
    if not table.requires_grad and known(shut | (table == 0)):
        return ~shut, None
    return None, table.to(dtype)


def _require_causal(where: str, table: Tensor) -> None:
    late = after(table.shape[-2], table.shape[-1], table.device)
    expected = late if table.dtype == torch.bool else torch.where(late, -torch.inf, 0.0)
    if not holds(table == expected):
        advice = "Leave is_causal out, or the mask."
        raise ValueError(sentence(f"{where}.attn_mask", "the causal mask, as is_causal says", "another mask", advice))
