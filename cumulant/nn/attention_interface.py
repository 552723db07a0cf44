"""What transformers passes to an attention function, read as queries over a measure.

transformers dispatches attention through a table of functions of one signature: module, query, key, value, mask, and
keyword arguments that differ by model. `read_support` and `score_scale` say what they mean here, for those who compute
attention (`cumulant.transformers`) and for those who observe it (`cumulant.observatory`). Nothing imports transformers.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from cumulant.checks import sentence, somewhere
from cumulant.kernels.arguments import Support
from cumulant.nn.structural_mask import StructuralMask

# arguments that models pass along and that do not change what attention computes from q, k, v and the mask
IGNORED_ARGUMENTS = frozenset(
    {
        *("is_causal", "sliding_window", "deterministic", "target_dtype", "layer_idx"),
        *("position_ids", "position_embeddings", "inputs_embeds", "encoder_attention_mask", "labels"),
        *("num_items_in_batch", "cache", "cache_position", "past_key_value", "past_key_values", "use_cache"),
        *("is_first_iteration", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "logits_to_keep"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    }
)
# arguments that are read
INTERPRETED_ARGUMENTS = frozenset({"scaling", "dropout", "is_causal", "position_bias", "s_aux", "softcap"})
KNOWN_ARGUMENTS = IGNORED_ARGUMENTS | INTERPRETED_ARGUMENTS
MASK_ARGUMENTS = ("attention_mask", "decoder_attention_mask")
TOKEN_ARGUMENTS = ("input_ids", "decoder_input_ids")
CROSS_ATTENTION = {"encoder_attn", "encdecattention", "crossattention", "cross_attn", "cross_attention"}


def require_known(where: str, arguments: Mapping[str, object], known: Iterable[str] = KNOWN_ARGUMENTS) -> None:
    """Refuse arguments that are not None and not ``known``: they might change what attention computes."""
    unknown = [name for name, value in arguments.items() if value is not None and name not in known]
    if unknown:
        advice = "They might change what attention computes; report it rather than trust a guess."
        raise ValueError(sentence(where, "attention arguments that are known", ", ".join(unknown), advice))


def score_scale(query: Tensor, scaling: float | None) -> float:
    """The factor of scores: ``scaling``, or 1/√d."""
    return query.shape[-1] ** -0.5 if scaling is None else float(scaling)


def read_support(
    module: nn.Module,
    query: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    sink: Tensor | None = None,
    order_without_mask: bool = True,
) -> Support:
    """Mask, order, biases and sinks of a call as edits of the measure of its keys.

    query               (batch, heads, q, d)
    mask                (batch | 1, heads | 1, q | 1, n) Boolean, True = attend; or additive, with the least number of
                        its dtype for hidden keys; or a `StructuralMask`. None: all keys, or the plain causal order
                        from the first key on where ``is_causal``, else the module, says so and q > 1
    position_bias       (batch | 1, heads | 1, q, n) added to scores
    sink                (heads,) log weights of a key of value 0
    order_without_mask  False: no mask is no order either, as in transformers' eager functions

    With a causal order keys from ``offset + q`` on are visible to no query: `visible_keys` says how many to keep.
    """
    if type(mask) is StructuralMask:
        support = mask.support
        if position_bias is None and sink is None:
            return support
        mask, causal, offset, window = support.mask, support.causal, support.offset, support.window
    else:
        window = None
        if mask is None:
            order = getattr(module, "is_causal", True) if is_causal is None else is_causal
            causal = order_without_mask and bool(order) and query.shape[2] > 1
        else:
            causal = False
            if mask.dtype != torch.bool:
                mask, position_bias = _split_additive(mask, position_bias)
        offset = 0 if causal else None
    if position_bias is not None and _is_zero(position_bias):
        position_bias = None
    return Support(mask, causal, offset, window, position_bias, sink)


def visible_keys(support: Support, queries: int, keys: int) -> int:
    """How many of the first keys are visible to some query by the causal order; the others need not be looked at.

    >>> visible_keys(Support(causal=True, offset=2), 3, 100), visible_keys(Support(), 3, 100)
    (5, 100)
    """
    return min(keys, (support.offset or 0) + queries) if support.causal else keys


def without_copies(mask: Tensor) -> Tensor:
    """A mask without the batch and query axes over which it was only expanded."""
    if mask.ndim == 4:
        batch, query = mask.shape[0] > 1 and mask.stride(0) == 0, mask.shape[2] > 1 and mask.stride(2) == 0
        mask = mask[:1] if batch else mask
        mask = mask[:, :, :1] if query else mask
    return mask


def capped_scores(eta: Tensor, key: Tensor, cap: float) -> Tensor:
    """Scores c tanh(⟨η,k⟩ / c), (batch, heads, q, n): no exponential family in η, so every score is written down."""
    batch, heads, queries, dim = eta.shape
    grouped = eta.reshape(batch, key.shape[1], -1, dim)  # heads that share keys follow one another
    return (cap * torch.tanh(grouped @ key.mT / cap)).reshape(batch, heads, queries, -1)


def _split_additive(mask: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What an additive mask hides, as a Boolean mask, and what it adds elsewhere, with ``bias``."""
    visible = mask > torch.finfo(mask.dtype).min / 2  # what models use for −∞
    added = torch.where(visible, mask, 0)
    if _is_zero(added):
        return visible, bias
    return visible, added if bias is None else bias + added


def _is_zero(bias: Tensor) -> bool:
    """Whether a bias is 0 everywhere and that can be seen and relied on."""
    if bias.requires_grad or torch.compiler.is_compiling():
        return False
    return not somewhere(bias)


class TokenMasks:
    """The masks (batch, length) of the running call of a model and of the transformers models inside it.

    The transformers model nearest around an attention module decides which of its queries are tokens and which are
    padding: of CLIP the text half has the mask of the texts, and the image half has none, whatever the lengths are.
    Calls in different threads do not see each other's masks.

    models  paths and modules: the model itself, at the empty path, and the transformers models inside it
    passes  calls so far
    """

    def __init__(self, models: dict[str, nn.Module]):
        self.models = models
        self.passes = 0
        self._local = threading.local()

    @property
    def _masks(self) -> dict[str, dict[str, object]]:
        return self._local.__dict__.setdefault("masks", {})

    @contextmanager
    def hooks(self, running: nn.Module | None = None) -> Iterator[None]:
        """Follow the calls of the models while inside, but of the one whose call has begun (`begin`).

        torch goes through the hooks of a module that raises: taking some off meanwhile would hide its error.
        """
        with ExitStack() as stack:
            for path, model in self.models.items():
                if model is running:
                    continue
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
        wanted = (*MASK_ARGUMENTS, *TOKEN_ARGUMENTS)
        known = [name for name in wanted if name in signature.parameters or name in kwargs]
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
        model, the mask of the call is all that is known, but for frames of sound (`position_mask`).
        """
        masks = self._masks
        for path in sorted(masks, key=len, reverse=True):
            if path and not name.startswith(f"{path}."):
                continue
            in_decoder = self._two_sided(path) and "decoder" in name.removeprefix(path).split(".")
            wanted = MASK_ARGUMENTS[1] if in_decoder else MASK_ARGUMENTS[0]
            if not in_decoder and getattr(self.models[path], "main_input_name", "input_ids") != "input_ids":
                return rows_from_mask(mask, q) if mask is not None else self._rows_of_frames(name, batch, q)
            if wanted not in masks[path]:
                continue
            tokens = masks[path][wanted]
            if tokens is None:
                return None
            if isinstance(tokens, Tensor) and tokens.ndim == 2:
                return tokens[:, -q:].bool() if len(tokens) == batch and tokens.shape[1] >= q else None
        return None if masks else rows_from_mask(mask, q)

    def _rows_of_frames(self, name: str, batch: int, q: int) -> Tensor | None:
        """Positions with sound, by the mask of frames that a model around the attention module got."""
        for path, given in self._masks.items():
            frames = given.get(MASK_ARGUMENTS[0])
            around = not path or name.startswith(f"{path}.")
            if around and isinstance(frames, Tensor) and frames.ndim == 2 and len(frames) == batch:
                return position_mask(frames, q)
        return None

    def tokens(self, name: str, batch: int, n: int) -> Tensor | None:
        """(batch, n) ids of the tokens that are the keys of the attention module at path ``name``; None if unknown.

        The nearest model around it that was called with ids has them. With a cache the keys before are not known, and
        the keys of a cross-attention are of another sequence.
        """
        if is_cross_attention(name):
            return None
        for path in sorted(self._masks, key=len, reverse=True):
            if path and not name.startswith(f"{path}."):
                continue
            in_decoder = self._two_sided(path) and "decoder" in name.removeprefix(path).split(".")
            ids = self._masks[path].get(TOKEN_ARGUMENTS[1] if in_decoder else TOKEN_ARGUMENTS[0])
            if isinstance(ids, Tensor):
                return ids if ids.shape == (batch, n) and not ids.is_floating_point() else None
        return None

    def _two_sided(self, path: str) -> bool:
        """An encoder and a decoder, each with a mask of its own."""
        return bool(getattr(getattr(self.models[path], "config", None), "is_encoder_decoder", False))


def is_cross_attention(name: str) -> bool:
    """Whether an attention module is called so that its keys are of another sequence.

    >>> is_cross_attention("decoder.layers.0.encoder_attn"), is_cross_attention("decoder.layers.0.self_attn")
    (True, False)
    """
    return not CROSS_ATTENTION.isdisjoint(name.lower().split("."))


def position_mask(frames: Tensor, q: int) -> Tensor | None:
    """(batch, q) True where a position has sound, from a mask (batch, r·q) of frames of which r make a position.

    None if the frames are not a multiple of the positions.

    >>> import torch
    >>> position_mask(torch.tensor([[1, 1, 1, 0, 0, 0]]), 3)
    tensor([[ True,  True, False]])
    """
    if frames.shape[1] % q:
        return None
    return frames[:, :: frames.shape[1] // q].bool()


def rows_from_mask(mask: Tensor | None, q: int) -> Tensor | None:
    """Which queries are tokens, from the mask of one self-attention: those that some query sees as a key.

    >>> import torch
    >>> rows_from_mask(torch.tensor([[True, False], [True, False]])[None, None], 2)
    tensor([[ True, False]])
    """
    if mask is None or mask.shape[-2:] != (q, q):
        return None
    return mask.any(-2).any(1)
