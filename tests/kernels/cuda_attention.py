"""torch's memory-efficient attention of CUDA by its contract, on CPU tensors: shapes, padding, layouts it refuses.

The contract is that of torch's source and of its shape functions: a log-sum-exp whose rows are padded to multiples of
32 with infinities, widths and rows of a bias in multiples of what the kernel loads at once, anything at all in a row
that sees no key. In float64 inside, rounded to float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(what)


def _checked(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> None:
    for tensor in (query, key, value):
        _require(tensor.ndim == 4 and tensor.dtype == torch.float32, "expected float32 (batch, heads, n, d)")
        _require(tensor.stride(-1) == 1, "the last axis must be contiguous")
        _require(all(s % 4 == 0 for s in tensor.stride()[:-1]) and tensor.shape[-1] % 4 == 0, "not correctly aligned")
    _require(query.shape[-1] == key.shape[-1] and key.shape[2] == value.shape[2], "shapes")
    if bias is not None:
        _require(bias.dtype == query.dtype, "the bias must have the dtype of the query")
        _require(bias.shape == (*query.shape[:3], key.shape[2]), "the bias must be expanded")
        _require(bias.stride(-1) == 1 and all(s % 16 == 0 for s in bias.stride()[1:-1]), "the bias is not aligned")


def _logits(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    logits = scale * query.double() @ key.double().mT
    if bias is not None:
        logits = logits + bias
    return (
        logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -torch.inf) if is_causal else logits
    )


def forward(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    _checked(query, key, value, attn_bias)
    _require(compute_log_sumexp and dropout_p == 0, "not what the library asks for")
    logits = _logits(query, key, attn_bias, is_causal, scale)
    out = torch.softmax(logits, -1) @ value.double()  # NaN in a row without keys
    lse = torch.nn.functional.pad(torch.logsumexp(logits, -1), (0, -query.shape[2] % 32), value=torch.inf)
    seed = torch.zeros((), dtype=torch.int64)
    return out.float().transpose(1, 2).contiguous().transpose(1, 2), lse.float(), seed, seed


def backward(row, query, key, value, bias, out, lse, seed, offset, dropout_p, mask, is_causal=False, *, scale=None):
    _checked(query, key, value, bias)
    _checked(query, key, row, None) if row.shape[2] == key.shape[2] else None
    _require(row.shape == out.shape == (*query.shape[:3], value.shape[-1]), "gradient and output have the shape of out")
    _require(lse.shape[-1] == -(-query.shape[2] // 32) * 32, "the log-sum-exp is padded to a multiple of 32")
    _require(list(mask) == [True, True, True, False], "no gradient of the bias is asked for")
    p = torch.exp(_logits(query, key, bias, is_causal, scale) - lse[..., : query.shape[2], None].double())
    delta = (row.double() * out.double()).sum(-1, keepdim=True)
    slope = p * (row.double() @ value.double().mT - delta) * scale
    slopes = slope @ key.double(), slope.mT @ query.double(), p.mT @ row.double()
    return (*(s.float() for s in slopes), torch.empty(0))


@contextmanager
def on_cpu() -> Iterator[None]:
    """torch's two operators serve CPU tensors by the functions above."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("_scaled_dot_product_efficient_attention", forward, "CPU")
        library.impl("_scaled_dot_product_efficient_attention_backward", backward, "CPU")
        yield
    finally:
        library._destroy()  # pyright: ignore[reportPrivateUsage]
