"""Which numbers of a layer scale the logits of one head and of no other.

    logit_h = scale · ⟨W_Q,h x + b_Q,h , W_K,h y + b_K,h⟩

Rotation does not change lengths, so that a factor on the rows of a head is a factor on its logits. With a norm on
queries or keys the rows no longer matter, and the gain of the norm takes their place, if heads have gains of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from cumulant.nn.attention import MultiheadAttention
from cumulant.observatory.hooks.structure import QUERY_KEY_NORMS, REPORTING_LAYERS, NotFound
from cumulant.observatory.hooks.weights import HEAD_WIDTH, INPUT_PROJECTIONS, head_count

INTERLEAVED = ("GPTNeoX",)  # classes with one child for all, query, key and value of a head side by side
STACKED = ("qkv_proj", "Wqkv", "qkv", "c_attn")  # one child for all, with the queries of all heads first, then all keys
OUTPUT_NORMS = ("LayerNorm", "attn_sub_norm")  # norms of attention modules on what attention returned
QUERY_BIASES = ("bias_u",)  # (heads, width) parameters that a module adds to its queries, for scores with keys alone


class HeadRows(NamedTuple):
    """Numbers of one parameter by head.

    name   of the parameter, inside the layer
    axis   along which heads lie
    rows   (heads, r) indices along it
    power  a factor γ of the logits is a factor γ^power of these numbers
    """

    name: str
    axis: int
    rows: Tensor
    power: float


def head_rows(module: nn.Module) -> list[HeadRows] | NotFound:
    """The numbers to scale for a factor on the logits of a head of an attention module, or why there are none.

    Heads with keys of their own share the factor between queries and keys, γ^½ each; where a group of heads shares its
    keys, the queries have all of it. Of latent attention (MLA) the rotary key is shared by all heads and left.

    >>> [(part.name, part.power) for part in head_rows(MultiheadAttention(8, 2, bias=False))]
    [('in_proj_weight', 0.5), ('in_proj_weight', 0.5)]
    """
    if isinstance(module, MultiheadAttention):
        return _rows_of_multihead(module)
    heads, kind = head_count(module), type(module).__name__
    if isinstance(module, REPORTING_LAYERS):
        return NotFound(f"{kind} has no queries and keys of a head that could be scaled alone")
    if not heads:
        return NotFound(f"{kind} does not say how many heads it has")
    if getattr(getattr(module, "config", None), "clip_qkv", None) is not None:
        return NotFound(f"{kind} cuts its queries and keys off at clip_qkv")
    if hasattr(module, "kv_b_proj") and hasattr(module, "qk_nope_head_dim"):
        return _rows_of_latent(module, heads)
    sides = _sides(module, heads)
    if isinstance(sides, NotFound):
        return sides
    norms = _norm_rows(module, heads)
    if isinstance(norms, NotFound):
        return norms
    query, key = norms.get("query", sides[0] + _query_biases(module, heads)), norms.get("key", sides[1])
    return _shared_factor(query, key, heads)


def parameter_of(module: nn.Module, name: str) -> nn.Parameter:
    """The parameter at a path inside a module."""
    path, _, last = name.rpartition(".")
    return getattr(module.get_submodule(path), last)


Side = list[tuple[str, int, Tensor]]  # name of a parameter, axis, rows


def _shared_factor(query: Side, key: Side, heads: int) -> list[HeadRows]:
    own_keys = all(len(rows) == heads for _, _, rows in key)
    parts = [HeadRows(*part, 0.5 if own_keys else 1.0) for part in query]
    return parts + ([HeadRows(*part, 0.5) for part in key] if own_keys else [])


def _blocks(first: int, heads: int, width: int, step: int | None = None) -> Tensor:
    """(heads, width) indices: heads of a width from ``first`` on, each ``step`` after the one before."""
    return first + torch.arange(heads)[:, None] * (step or width) + torch.arange(width)


def _rows_of_multihead(module: MultiheadAttention) -> list[HeadRows]:
    heads, width, dim = module.num_heads, module.head_dim, module.embed_dim
    packed = module.in_proj_weight is not None
    parts: list[tuple[str, int, Tensor]] = []
    for i, letter in enumerate("qk"):
        rows = _blocks(i * dim, heads, width)
        parts.append(("in_proj_weight", 0, rows) if packed else (f"{letter}_proj_weight", 0, _blocks(0, heads, width)))
        if module.in_proj_bias is not None:
            parts.append(("in_proj_bias", 0, rows))
    if module.bias_k is not None:
        parts.append(("bias_k", 2, _blocks(0, heads, width)))
    return [HeadRows(*part, 0.5) for part in parts]


def _rows_of_latent(module: nn.Module, heads: int) -> list[HeadRows] | NotFound:
    nope, rope, value = (int(getattr(module, n)) for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    child = next((n for n in ("q_b_proj", "q_proj") if isinstance(getattr(module, n, None), nn.Linear)), None)
    if child is None:
        return NotFound(f"{type(module).__name__} has no query projection by a known name")
    plain = _blocks(0, heads, nope, nope + rope)
    turned = _blocks(nope, heads, rope, nope + rope)
    keys = _blocks(0, heads, nope, nope + value)
    parts = [HeadRows(name, axis, plain, 0.5) for name, axis in _parameters(module, child)]
    parts += [HeadRows(name, axis, turned, 1.0) for name, axis in _parameters(module, child)]
    return parts + [HeadRows(name, axis, keys, 0.5) for name, axis in _parameters(module, "kv_b_proj")]


def _sides(module: nn.Module, heads: int) -> tuple[Side, Side] | NotFound:
    """Rows of queries and of keys."""
    kind = type(module).__name__
    for names in INPUT_PROJECTIONS:
        if all(_is_projection(getattr(module, n, None)) for n in names[:2]):
            query, key = (_size(getattr(module, n)) for n in names[:2])
            width = _width(module, heads, query)
            if query != heads * width or key % width or heads % (key // width):
                return NotFound(f"{kind} has {heads} heads and projections to {query} and {key} numbers")
            return _side(module, names[0], _blocks(0, heads, width)), _side(
                module, names[1], _blocks(0, key // width, width)
            )
    if _is_projection(getattr(module, "q_attn", None)) and _is_projection(getattr(module, "c_attn", None)):
        return _crossed(module, heads)
    fused = next((n for n in ("query_key_value", *STACKED) if _is_projection(getattr(module, n, None))), None)
    if fused is None:
        return NotFound(_no_projections(module))
    size = _size(getattr(module, fused))
    # without it GPT-BigCode has query, key and value of a head side by side
    multiple = getattr(module, "multi_query", True)
    if (fused == "query_key_value" and kind.startswith(INTERLEAVED)) or not multiple:
        width = size // (3 * heads)
        first, second = (_blocks(i * width, heads, width, 3 * width) for i in range(2))
        return _side(module, fused, first), _side(module, fused, second)
    if fused == "query_key_value":
        return NotFound(f"{fused} of {kind} has queries and keys in an order that is not known")
    return _stacked(module, fused, heads)


def _crossed(module: nn.Module, heads: int) -> tuple[Side, Side]:
    """Cross-attention of GPT-2: queries in a child of their own, keys and values in the other."""
    width = _size(module.q_attn) // heads
    rows = _blocks(0, heads, width)
    return _side(module, "q_attn", rows), _side(module, "c_attn", rows)


def _no_projections(module: nn.Module) -> str:
    """Why a module has none that can be scaled."""
    kind = type(module).__name__
    known = {name for names in INPUT_PROJECTIONS for name in names[:2]} | {"query_key_value", *STACKED}
    wrapped = next(((n, child) for n, child in module.named_children() if n in known), None)
    if wrapped is not None and not _is_projection(wrapped[1]):
        return f"{wrapped[0]} of {kind} is a {type(wrapped[1]).__name__}, not a plain matrix of floating numbers"
    children = ", ".join(name for name, _ in module.named_children()) or "nothing"
    return f"{kind} holds {children}: no query and key projections by a known name"


def _stacked(module: nn.Module, name: str, heads: int) -> tuple[Side, Side] | NotFound:
    size = _size(getattr(module, name))
    width = _width(module, heads, size // 3)
    rest = size - heads * width
    if rest <= 0 or rest % (2 * width) or heads % (rest // (2 * width)):
        return NotFound(
            f"{name} of {type(module).__name__} gives {size} numbers, not queries, keys and values of heads"
        )
    keys = rest // (2 * width)
    return _side(module, name, _blocks(0, heads, width)), _side(module, name, _blocks(heads * width, keys, width))


def _query_biases(module: nn.Module, heads: int) -> Side:
    """Parameters (heads, width) that are added to queries after their projection, as of attention with relative
    positions (Transformer-XL): that of the scores with keys."""
    named = [n for n in QUERY_BIASES if isinstance(p := getattr(module, n, None), Tensor) and len(p) == heads]
    return [(name, 0, torch.arange(heads)[:, None]) for name in named]


def _norm_rows(module: nn.Module, heads: int) -> dict[str, Side] | NotFound:
    """Gains and shifts of norms on queries and keys that heads have for themselves, by side."""
    found: dict[str, Side] = {}
    for name, child in module.named_modules():
        if child is module or "Norm" not in type(child).__name__ or name in OUTPUT_NORMS:
            continue
        side, gain = QUERY_KEY_NORMS.get(name), getattr(child, "weight", None)
        if side is None:
            return NotFound(f"{name} of {type(module).__name__} may be a norm on queries or keys, by no known name")
        if not isinstance(gain, Tensor):
            return NotFound(f"{name} of {type(module).__name__} is a {type(child).__name__} without gains to scale")
        width = int(next((n for a in HEAD_WIDTH if isinstance(n := getattr(module, a, None), int)), 0))
        if gain.numel() in (1, width):
            return NotFound(f"{name} of {type(module).__name__} has no gain for each head: all heads share one")
        count = len(gain) if gain.ndim == 2 else gain.numel() // width if width else 0
        if count not in (heads, *(k for k in range(1, heads) if heads % k == 0)):
            return NotFound(f"{name} of {type(module).__name__} has {gain.numel()} gains for {heads} heads")
        rows = _blocks(0, count, 1 if gain.ndim == 2 else width)
        named = [n for n in ("weight", "bias") if isinstance(getattr(child, n, None), Tensor)]
        found[side] = [(f"{name}.{n}", 0, rows) for n in named]
    return found


def _side(module: nn.Module, child: str, rows: Tensor) -> Side:
    return [(name, axis, rows) for name, axis in _parameters(module, child)]


def _parameters(module: nn.Module, child: str) -> list[tuple[str, int]]:
    """Weight and bias of a projection, and the axis of what comes out of it: Conv1D stores (in, out)."""
    layer = getattr(module, child)
    axis = 1 if type(layer).__name__ == "Conv1D" else 0
    return [(f"{child}.weight", axis), *([(f"{child}.bias", 0)] if getattr(layer, "bias", None) is not None else [])]


def _is_projection(layer: object) -> bool:
    """A plain matrix of floating numbers: those that adapters or quantisation wrap are not."""
    if not (isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"):
        return False
    return isinstance(w := getattr(layer, "weight", None), Tensor) and w.ndim == 2 and w.is_floating_point()


def _size(layer: object) -> int:
    """How many numbers come out of a projection."""
    return getattr(layer, "weight").shape[1 if type(layer).__name__ == "Conv1D" else 0]  # noqa: B009


def _width(module: nn.Module, heads: int, total: int) -> int:
    """Numbers of a head: as the module says, or an equal part of all queries."""
    named = next((n for a in HEAD_WIDTH if isinstance(n := getattr(module, a, None), int)), None)
    return named or max(1, total // heads)
