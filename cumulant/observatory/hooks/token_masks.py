"""Which queries of an attention call are tokens and which are padding, from the masks that the model was called with.

The transformers model nearest around an attention module decides: of CLIP the text half has the mask of the texts, and
the image half has none, whatever the lengths are.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from cumulant.observatory.hooks.structure import is_transformers

MASK_ARGUMENTS = ("attention_mask", "decoder_attention_mask")


class TokenMasks:
    """The masks (batch, length) of the running call of a model and of the transformers models inside it.

    passes  calls so far
    """

    def __init__(self, model: nn.Module):
        self.models = {name: m for name, m in model.named_modules() if not name or is_transformers(m)}
        self.passes = 0
        self._masks: dict[str, dict[str, object]] = {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Follow the calls of the models while inside."""
        with ExitStack() as stack:
            for path, model in self.models.items():
                before, after = self._hooks(path, inspect.signature(model.forward))
                stack.callback(model.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(model.register_forward_hook(after, always_call=True).remove)
            yield

    def begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """A call that began before there were hooks, of one of the models, or of what is around or inside them."""
        path = next((path for path, model in self.models.items() if model is module), "")
        self._begin(path, inspect.signature(module.forward), args, kwargs)

    def _begin(self, path: str, signature: inspect.Signature, args: tuple, kwargs: dict) -> None:
        try:
            bound = signature.bind_partial(*args).arguments | kwargs
        except TypeError:  # the model itself says what is wrong with its arguments
            bound = kwargs
        known = [name for name in MASK_ARGUMENTS if name in signature.parameters or name in kwargs]
        self._masks[path] = {name: bound.get(name) for name in known}
        self.passes += 1

    def _hooks(self, path: str, signature: inspect.Signature):
        def before(module, args, kwargs) -> None:
            self._begin(path, signature, args, kwargs)

        def after(module, args, output) -> None:
            self._masks.pop(path, None)

        return before, after

    def rows(self, name: str, batch: int, q: int, mask: Tensor | None) -> Tensor | None:
        """(batch, q) True where a query of the attention module at path ``name`` is a token; None: all are.

        mask  (batch or 1, heads or 1, q, n) that the call itself has, True where a key is seen

        A model that takes no mask, or got one that is not (batch, length), leaves the answer to the model around it. A
        mask of images or sound counts pixels or samples, not queries; there, and where attention is called without its
        model, the mask of the call is all that is known.
        """
        for path in sorted(self._masks, key=len, reverse=True):
            if path and not name.startswith(f"{path}."):
                continue
            in_decoder = self._two_sided(path) and "decoder" in name.removeprefix(path).split(".")
            wanted = MASK_ARGUMENTS[1] if in_decoder else MASK_ARGUMENTS[0]
            if not in_decoder and getattr(self.models[path], "main_input_name", "input_ids") != "input_ids":
                return rows_from_mask(mask, q)
            if wanted not in self._masks[path]:
                continue
            tokens = self._masks[path][wanted]
            if tokens is None:
                return None
            if isinstance(tokens, Tensor) and tokens.ndim == 2:
                return tokens[:, -q:].bool() if len(tokens) == batch and tokens.shape[1] >= q else None
        return None if self._masks else rows_from_mask(mask, q)

    def _two_sided(self, path: str) -> bool:
        """An encoder and a decoder, each with a mask of its own."""
        return bool(getattr(getattr(self.models[path], "config", None), "is_encoder_decoder", False))


def rows_from_mask(mask: Tensor | None, q: int) -> Tensor | None:
    """Which queries are tokens, from the mask of one self-attention: those that some query sees as a key.

    >>> import torch
    >>> rows_from_mask(torch.tensor([[True, False], [True, False]])[None, None], 2)
    tensor([[ True, False]])
    """
    if mask is None or mask.shape[-2:] != (q, q):
        return None
    return mask.any(-2).any(1)
