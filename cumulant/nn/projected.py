"""The base of the multi-head layers: parameters by torch's names, projections, heads, shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from cumulant.checks import require_alike, require_float, sentence, shape
from cumulant.kernels.arguments import Support
from cumulant.kernels.autocast import autocast_enabled
from cumulant.nn.masks import as_one_mask, support_of_masks, with_one_more_key


class ProjectedHeads(NamedTuple):
    """The arguments of a call, head by head.

    eta, key, value  (batch, heads, q | n, d); eta is the query times 1/√d
    support          which keys a query sees; its sink is 0.0 with ``add_zero_attn``: one more atom at 0 with value 0
    rows             (batch, q) True for tokens, where padding of the queries is known
    """

    eta: Tensor
    key: Tensor
    value: Tensor
    support: Support
    rows: Tensor | None


class ProjectedAttention(nn.Module):
    """Projections into heads and out of them; how a head averages is what its subclasses say.

    The parameters are those of torch.nn.MultiheadAttention, by name, shape and initial values for a given seed.
    """

    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_sizes(type(self).__name__, embed_dim, num_heads, dropout)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        self.kdim, self.vdim = (embed_dim if size is None else size for size in (kdim, vdim))
        # torch.nn's encoder layers look at this name before they call
        self._qkv_same_embed_dim = self.kdim == embed_dim and self.vdim == embed_dim
        factory = {"device": device, "dtype": dtype}

        def empty(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*size, **factory))

        packed = self._qkv_same_embed_dim
        self.register_parameter("in_proj_weight", empty(3 * embed_dim, embed_dim) if packed else None)
        for name, width in (("q", embed_dim), ("k", self.kdim), ("v", self.vdim)):
            self.register_parameter(f"{name}_proj_weight", None if packed else empty(embed_dim, width))
        self.register_parameter("in_proj_bias", empty(3 * embed_dim) if bias else None)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        for name in ("bias_k", "bias_v"):
            self.register_parameter(name, empty(1, 1, embed_dim) if add_bias_kv else None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As torch.nn.MultiheadAttention: Xavier for the projections, 0 for their biases."""
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            if getattr(self, name) is not None:
                nn.init.xavier_uniform_(getattr(self, name))
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)

    @classmethod
    def of(cls, module: nn.MultiheadAttention | ProjectedAttention, **options) -> Self:
        """This layer on the very parameters of ``module``, which may be torch's: a swap in one line."""
        if not isinstance(module, nn.MultiheadAttention | ProjectedAttention):
            got, advice = type(module).__name__, "Its parameters must have torch's names."
            raise TypeError(sentence(f"{cls.__name__}.of", "a multi-head attention layer", got, advice))
        sizes = {name: getattr(module, name) for name in ("embed_dim", "num_heads", "dropout", "kdim", "vdim")}
        rest = {name: getattr(module, name) for name in ("batch_first", "add_zero_attn")}
        shaped = {"bias": module.in_proj_bias is not None, "add_bias_kv": module.bias_k is not None}
        layer = cls(**sizes, **rest, **shaped, device="meta", **options)
        for name, parameter in module.named_parameters(recurse=False):
            setattr(layer, name, parameter)
        for name, parameter in module.out_proj.named_parameters():
            setattr(layer.out_proj, name, parameter)
        return layer.train(module.training)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, batch_first={self.batch_first}"

    def _heads(self, query: Tensor, key: Tensor, value: Tensor, **masks) -> ProjectedHeads:
        """Projections split into heads, with torch's masks as what each query sees."""
        where = type(self).__name__
        self._check(where, query, key, value)
        same = query is key
        if query.ndim == 2:
            padding = masks.get("key_padding_mask")
            masks["key_padding_mask"] = padding[None] if isinstance(padding, Tensor) else padding
        query, key, value = self._batches(query, key, value)
        support = support_of_masks(where, query, key, heads=self.num_heads, **masks)
        support = as_one_mask(support, query.shape[1], self.num_heads)
        eta, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self._project(query, key, value)
        )
        if self.bias_k is not None and self.bias_v is not None:
            support = with_one_more_key(support, query.shape[1], key.shape[1], query.device)
            k, v = self._with_bias(k, self.bias_k), self._with_bias(v, self.bias_v)
        rows = masks.get("key_padding_mask")
        rows = ~rows if same and rows is not None and rows.dtype == torch.bool else None
        support = replace(support, sink=0.0) if self.add_zero_attn else support
        return ProjectedHeads(eta, k, v, support, rows)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """η, keys and values, heads side by side; one product for what is one tensor."""
        weights, biases = self._weights()

        def product(x: Tensor, first: int, last: int) -> tuple[Tensor, ...]:
            b = None if biases is None else torch.cat(biases[first:last])
            return linear(x, torch.cat(weights[first:last]), b).split(self.embed_dim, -1)

        alike = [w.shape == weights[1].shape for w in weights]
        if query is key and key is value and all(alike):
            eta, k, v = product(key, 0, 3)
        elif key is value and alike[2]:
            (eta,), (k, v) = product(query, 0, 1), product(key, 1, 3)
        else:
            (eta,), (k,), (v,) = product(query, 0, 1), product(key, 1, 2), product(value, 2, 3)
        return eta, k, v

    def _weights(self) -> tuple[list[Tensor], list[Tensor] | None]:
        """Of query, key and value, and their biases. The query's carry its scale, since they are smaller than it."""
        scale = self.head_dim**-0.5
        if self.in_proj_weight is not None:
            first, *others = self.in_proj_weight.split(self.embed_dim)
        else:
            first, *others = (getattr(self, f"{name}_proj_weight") for name in "qkv")
        if self.in_proj_bias is None:
            return [first * scale, *others], None
        bias, *rest = self.in_proj_bias.split(self.embed_dim)
        return [first * scale, *others], [bias * scale, *rest]

    def _with_bias(self, keys: Tensor, extra: Tensor) -> Tensor:
        """One more key or value, the same for every sequence."""
        row = extra.reshape(1, self.num_heads, 1, -1).to(keys.dtype)
        return torch.cat([keys, row.expand(keys.shape[0], -1, -1, -1)], -2)

    def _batches(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, tokens, ·) for all; what was one tensor stays one, so that it is projected once."""
        made: dict[int, Tensor] = {}
        for x in (query, key, value):
            if id(x) not in made:
                made[id(x)] = x[None] if x.ndim == 2 else x if self.batch_first else x.transpose(0, 1)
        return made[id(query)], made[id(key)], made[id(value)]

    def _joined(self, output: Tensor, batched: bool) -> Tensor:
        """(batch, heads, q, d) → what `forward` returns."""
        flat = output.transpose(1, 2).flatten(-2).to(self.out_proj.weight.dtype)
        out = self.out_proj(flat)
        return out[0] if not batched else out if self.batch_first else out.transpose(0, 1)

    def _check(self, where: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        widths = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        order = "batch, tokens" if self.batch_first else "tokens, batch"
        for (name, width), x in zip(widths.items(), (query, key, value), strict=True):
            require_float(f"{where}.{name}", x)
            if x.is_nested or x.ndim not in (2, 3) or x.shape[-1] != width or x.ndim != query.ndim:
                expected = f"shape ({order}, {width}) or (tokens, {width}), as the others"
                got = "a nested tensor" if x.is_nested else shape(x)
                raise ValueError(sentence(f"{where}.{name}", expected, got, "Check the last axis and batch_first."))
            if not autocast_enabled(x):
                require_alike(f"{where}.{name}", x, "the parameters", self.out_proj.weight)
        if key.shape[:-1] != value.shape[:-1]:
            expected = f"the batch and tokens of key {tuple(key.shape[:-1])}"
            raise ValueError(sentence(f"{where}.value", expected, shape(value), "Every key has one value."))
        axis = 0 if self.batch_first else 1
        if query.ndim == 3 and query.shape[axis] != key.shape[axis]:
            expected = f"the batch of query ({query.shape[axis]})"
            raise ValueError(sentence(f"{where}.key", expected, key.shape[axis], "Check batch_first."))


def check_sizes(where: str, width: int, num_heads: int, dropout: float = 0.0, *, name: str = "embed_dim") -> None:
    """Positive sizes that divide, and a probability; ``name`` is what the width is called."""
    for argument, size in {name: width, "num_heads": num_heads}.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(sentence(f"{where}.{argument}", "a positive integer", size, "Pass at least 1."))
    if width % num_heads:
        advice = "Every head takes an equal part."
        expected = f"a number that divides {name}={width}"
        raise ValueError(sentence(f"{where}.num_heads", expected, num_heads, advice))
    if not 0 <= dropout < 1:
        raise ValueError(sentence(f"{where}.dropout", "a probability in [0, 1)", dropout, "0 is off."))
