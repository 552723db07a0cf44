"""A block of this room in the place of a layer of an existing model.

    block = swap(model, "encoder.layer.3", EnergyBlock(384, 12))         # BERT, MiniLM, RoBERTa, …
    block = swap(model, "model.layers.7", ConvexBlock(576, 9, causal=True))  # Llama, Qwen, …
    print(block.guarantees)

Models that call their layers with tokens alone, and torch's TransformerEncoder, get the block as it is. Layers of
transformers are called with masks, caches and positions besides: there the block stands inside a `TransformersLayer`.
"""

from __future__ import annotations

import inspect
from typing import TypeVar

import torch
from torch import Tensor, nn

from cumulant.checks import everywhere, sentence, shape, somewhere
from cumulant.nn.blocks import SequenceBlock

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def swap(model: nn.Module, path: str, block: AnyModule) -> AnyModule:
    """Put ``block`` where ``path`` leads in ``model``, on the device and in the dtype of what was there; returns it.

    The layer of a causal model needs a causal block, and its width is the block's. The new weights are not trained.

    >>> import torch
    >>> from cumulant.nn import EnergyBlock
    >>> layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> swap(model, "layers.1", EnergyBlock(16, 2)).guarantees
    'no step raises the energy of a sample, whatever the weights and the input'
    >>> model(torch.zeros(3, 5, 16)).shape
    torch.Size([3, 5, 16])
    """
    old = _layer_at(model, path)
    names = _names(old)
    if names is not None and isinstance(block, SequenceBlock):
        _require_width(old, block.dim)
        _require_order(old, block.causal)
    known = next((p for p in (*old.parameters(), *model.parameters()) if p.is_floating_point()), None)
    if known is not None:
        block.to(device=known.device, dtype=known.dtype)
    block.train(old.training)
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, block if names is None else TransformersLayer(block, names))
    return block


def _layer_at(model: nn.Module, path: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(sentence("swap.model", "a torch.nn.Module", type(model).__name__, "Pass the model."))
    try:
        if path:
            return model.get_submodule(path)
    except AttributeError:
        pass
    lists = ", ".join([name for name, part in model.named_modules() if isinstance(part, nn.ModuleList)][:3])
    advice = f"Lists of layers: {lists}." if lists else "See model.named_modules()."
    raise ValueError(sentence("swap.path", "the name of a layer", repr(path), advice))


def _names(old: nn.Module) -> tuple[str, ...] | None:
    """What a layer of transformers calls its arguments, in order; None for any other."""
    if isinstance(old, TransformersLayer):
        return old.names
    if not type(old).__module__.startswith("transformers."):
        return None
    names = tuple(inspect.signature(old.forward).parameters)
    if names[:1] != ("hidden_states",) or "position_bias" in names:
        got, advice = type(old).__name__, "T5 and MPNet hand biases of positions from layer to layer: not known here."
        raise ValueError(sentence("swap.path", "a layer that maps hidden_states to hidden_states", got, advice))
    return names


def _require_width(old: nn.Module, dim: int) -> None:
    """Norms and biases of a layer have the width of its stream."""
    widths = {p.shape[-1] for p in old.parameters() if p.ndim == 1}
    if dim not in widths:
        got, advice = f"dim={dim}", f"The layer has vectors of size {', '.join(map(str, sorted(widths)))}."
        raise ValueError(sentence("swap.block", "the width of the layer that goes", got, advice))


def _require_order(old: nn.Module, causal: bool) -> None:
    """A mask is left out where it says nothing new: whether a layer looks ahead is known from the layer alone."""
    ordered = any(getattr(part, "is_causal", getattr(part, "causal", False)) is True for part in old.modules())
    if ordered and not causal:
        advice = "Construct the block with causal=True: here it would see the tokens that it is to predict."
        raise ValueError(sentence("swap.block", "a causal block, as the layer is", "causal=False", advice))


class TransformersLayer(nn.Module):
    """A block as a layer of a transformers model (5.x): masks are translated, positions are left to the embeddings.

    Every mask that says "no padding", or "no padding and nothing ahead" for a causal block, is understood, as numbers
    or as Booleans. A cache is not: set ``model.config.use_cache = False``, and generate without one.
    """

    def __init__(self, block: nn.Module, names: tuple[str, ...]):
        super().__init__()
        self.block, self.names = block, names

    @property
    def guarantees(self) -> str:
        """What holds of the block."""
        return str(self.block.guarantees)

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        arguments = dict(zip(self.names[1:], args, strict=False)) | kwargs
        if any(hasattr(part, "get_seq_length") for part in arguments.values()):
            advice = "Set model.config.use_cache = False: a block looks at all tokens every time."
            raise ValueError(sentence("TransformersLayer", "no cache of keys", "one", advice))
        if arguments.get("encoder_hidden_states") is not None:
            advice = "Blocks attend to their own tokens alone."
            raise ValueError(sentence("TransformersLayer", "no second sequence", "encoder_hidden_states", advice))
        mask = arguments.get("attention_mask")
        padding = self._padding(mask, hidden_states) if isinstance(mask, Tensor) else None
        return self.block(hidden_states, key_padding_mask=padding)

    def _padding(self, mask: Tensor, x: Tensor) -> Tensor | None:
        """(b, n) True at padding, from (b, n), True or 1 = token, or from (b | 1, 1, n, n), True or 0.0 = seen."""
        batch, n = x.shape[:2]
        if mask.ndim == 2 and mask.shape == (batch, n):
            padding = ~mask.bool()
        elif mask.ndim == 4 and mask.shape[1:] == (1, n, n):
            padding = self._of_pairs(mask.bool() if mask.dtype == torch.bool else mask == 0, batch)
        else:
            expected, advice = f"shape (b, n) or (b, 1, n, n) for n={n}", "Set model.config.use_cache = False."
            raise ValueError(sentence("TransformersLayer.attention_mask", expected, shape(mask), advice))
        return padding if somewhere(padding) else None

    def _of_pairs(self, seen: Tensor, batch: int) -> Tensor:
        """The keys that no token sees; what is seen beside them is to be the block's own order."""
        seen = seen[:, 0].expand(batch, -1, -1)
        n = seen.shape[-1]
        order = torch.ones(n, n, dtype=torch.bool, device=seen.device)
        order = order.tril() if getattr(self.block, "causal", False) else order
        here = seen.diagonal(dim1=-2, dim2=-1)  # a token sees itself; rows of padding may hold anything
        expected = order & here[:, None, :]
        if not everywhere((seen == expected) | ~here[..., None]):
            advice = "Windows and packed sequences are not known to blocks; attn_implementation='sdpa' has neither."
            raise ValueError(sentence("TransformersLayer.attention_mask", "padding alone", "another order", advice))
        return ~here
