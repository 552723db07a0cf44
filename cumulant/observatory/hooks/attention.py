"""Hooks on a model's attention: every call, as the measure and the queries that it is.

transformers dispatches attention through a table of functions. `observe_attention` registers one that lets the model's
own function compute the output, unchanged, and hands what went in and came out to an observer; `replace_attention` may
put another output in its place. On leaving, whatever happened, the model is as it was. The layers of `cumulant.nn`
report their calls themselves, wherever they stand in the model, and the same observer gets them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from cumulant.checks import sentence
from cumulant.kernels.arguments import Support, intersect
from cumulant.nn.calls import AttentionCall, Observer, on_attention
from cumulant.observatory.hooks.structure import (
    attention_modules,
    is_transformers,
    list_elements,
    reporting_layers,
    unwrapped,
)

# arguments that models pass along and that do not change what attention computes from q, k, v and the mask
IGNORED_ARGUMENTS = {
    *("is_causal", "sliding_window", "deterministic", "target_dtype", "layer_idx"),
    *("position_ids", "position_embeddings", "inputs_embeds", "encoder_attention_mask", "labels", "num_items_in_batch"),
    *("cache", "cache_position", "past_key_value", "past_key_values", "use_cache", "is_first_iteration"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "logits_to_keep"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
}
# arguments that are read
INTERPRETED_ARGUMENTS = {"scaling", "dropout", "is_causal", "position_bias", "s_aux", "softcap"}
MASK_ARGUMENTS = ("attention_mask", "decoder_attention_mask")
TENSOR_ARGUMENTS = frozenset({"module", "query", "key", "value", "attention_mask"})

Replacement = Callable[[AttentionCall], Tensor | None]


@dataclass
class ModelHooks:
    """The hooks on one observed model, and what they know of its running forward pass.

    replacement  gets every call; of `observe_attention` it returns None
    names        paths of the modules
    masks        which tokens of the running pass are padding
    calls        attention calls so far
    ran          paths of the attention modules that were called, through the interface or not
    """

    replacement: Replacement
    names: dict[nn.Module, str]
    masks: TokenMasks
    calls: int = 0
    ran: set[str] = field(default_factory=set)

    @property
    def passes(self) -> int:
        """Calls of the model, or of a transformers model in it."""
        return self.masks.passes


_observed_models: list[ModelHooks] = []  # innermost last


@contextmanager
def observe_attention(model: nn.Module, observer: Observer) -> Iterator[ModelHooks]:
    """Hand every attention call of ``model`` to ``observer`` while inside."""

    def keep_output(call: AttentionCall) -> None:
        observer(call)

    with replace_attention(model, keep_output) as hooks:
        yield hooks


@contextmanager
def replace_attention(model: nn.Module, replacement: Replacement) -> Iterator[ModelHooks]:
    """Put what ``replacement`` makes of an attention call in the place of its output while inside.

    replacement  AttentionCall → (batch, heads, q, e), or None to keep what the model's own function returned

    Every observer gets the model's own output; of several replacements of one call the innermost counts.
    """
    model = unwrapped(model)
    own_layers = bool(reporting_layers(model))
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    hooks = ModelHooks(replacement, names, TokenMasks(model))
    with ExitStack() as stack:
        if is_transformers(model):
            stack.enter_context(_registered_functions(model, hooks, own_layers))
        if own_layers:
            stack.enter_context(on_attention(_layer_observer(hooks)))
        stack.enter_context(hooks.masks.hooks())
        for path in attention_modules(model):
            stack.callback(model.get_submodule(path).register_forward_pre_hook(_note_run(hooks, path)).remove)
        yield hooks


def _note_run(hooks: ModelHooks, path: str) -> Callable:
    def hook(module, args) -> None:
        hooks.ran.add(path)

    return hook


@contextmanager
def _registered_functions(model, hooks: ModelHooks, own_layers: bool) -> Iterator[None]:
    """Our functions in the place of the model's own in transformers' table while inside."""
    if not (own_layers or model._can_set_attn_implementation()):
        raise ValueError(unrecordable(model))
    before = _implementations(model)
    _observed_models.append(hooks)
    try:
        _register()
        for config, name in before.values():
            plain = name in (None, "eager", "cumulant_eager")
            config._attn_implementation_internal = "cumulant_eager" if plain else "cumulant_sdpa"
        yield
    finally:
        _observed_models.remove(hooks)
        for config, name in before.values():
            config._attn_implementation_internal = name


def _layer_observer(hooks: ModelHooks) -> Observer:
    """Hands calls of those layers of `cumulant.nn` that are in the model on, in the form of transformers' calls."""

    def observe(call: AttentionCall) -> None:
        name = hooks.names.get(call.module)
        if name is None:
            return
        hooks.calls += 1
        support, seeing = _written_out(call)
        wide = torch.promote_types(call.eta.dtype, torch.float32)
        eta, key, value = call.eta.to(wide), call.key.to(wide), call.value.to(wide)
        tokens = call.rows if call.rows is not None else hooks.masks.rows(name, len(eta), eta.shape[2], None)
        rows = intersect(tokens, seeing)
        named = AttentionCall(call.module, eta, key, value, support, call.output, call.scale, rows, name)
        if hooks.replacement(named) is not None:
            where, advice = f"replace_attention({name})", "The output of a layer of cumulant.nn cannot be replaced."
            raise ValueError(sentence(where, "None", "another output", advice))

    return observe


def _written_out(call: AttentionCall) -> tuple[Support, Tensor | None]:
    """The support of a call with four axes for mask and weights, and the queries (batch, q) that see a key.

    Calls of `cumulant.nn` may combine a causal order with a mask. An order that is not the plain one, as of tokens that
    do not see themselves, is written out in the mask, and so are windows and an order beside a mask. A query that some
    head leaves without a key is left out of all of them; None: no query is.
    """
    heads, q, n = call.eta.shape[1], call.eta.shape[2], call.key.shape[2]
    support, device = call.support, call.eta.device
    support = replace(support, offset=n - q) if support.offset is None else support
    mask, causal = support.pair_mask(), support.causal
    if support.window is not None or (causal and (support.offset or n != q or mask is not None)):
        mask, causal = intersect(mask, support.band(torch.arange(q, device=device), n)), False
    rows = None
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape).expand(-1, -1, q, n)
        if support.sink is None:
            seen = mask.any(-1).all(1)  # (batch or 1, q)
            rows = None if bool(seen.all()) else seen.expand(len(call.eta), q)
    weights, sink = support.pair_weights(heads), support.sink
    if weights is not None:
        weights = weights.float().expand(-1, heads, q, n)
    if sink is not None:
        sink = torch.as_tensor(sink, dtype=torch.float32, device=device).reshape(1, -1).expand(1, heads)
    offset = 0 if causal else None
    return Support(mask, causal, offset, log_weights=weights, sink=sink), rows


def unrecordable(model: nn.Module) -> str:
    """The sentence for a model whose attention cannot be recorded, with the reason."""
    if not attention_modules(model):
        kinds = list(dict.fromkeys(type(m).__name__ for m in list_elements(model).values())) or ["other modules"]
        got = f"{type(model).__name__}, which has none: its layers are {', '.join(kinds[:3])}"
        return sentence("attach.model", "a model with attention", got, "Use a model that attends.")
    return sentence(
        "attach.model",
        "a model that calls attention through transformers' AttentionInterface",
        type(model).__name__,
        "Its attention is written out in its own code, so nothing would be recorded; use another model, or a newer "
        "transformers that has moved it to the interface.",
    )


def _implementations(model: nn.Module) -> dict[int, tuple]:
    """Every configuration inside the model with the name of its attention function."""
    configurations: dict[int, tuple] = {}
    pending: list = [m.config for m in model.modules() if hasattr(getattr(m, "config", None), "sub_configs")]
    while pending:
        config = pending.pop()
        if id(config) in configurations:
            continue
        configurations[id(config)] = (config, getattr(config, "_attn_implementation_internal", None))
        pending += [sub for key in config.sub_configs if (sub := getattr(config, key, None)) is not None]
    return configurations


def _register() -> None:
    """Our two names in transformers' tables: without the second table masks would silently be dropped."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import eager_mask, sdpa_mask

    AttentionInterface.register("cumulant_sdpa", _reporting(lambda module: sdpa_attention_forward))
    AttentionInterface.register("cumulant_eager", _reporting(_own_eager))
    AttentionMaskInterface.register("cumulant_sdpa", sdpa_mask)
    AttentionMaskInterface.register("cumulant_eager", eager_mask)


def _own_eager(module: nn.Module) -> Callable:
    """The function that the model's own file has for plain attention."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise ValueError(unrecordable(module))


def _reporting(delegate_of: Callable[[nn.Module], Callable]) -> Callable:
    """An attention function for transformers' table that calls the model's own and reports the call."""

    def attention(module, query, key, value, attention_mask, *args, **kwargs):
        delegate = delegate_of(module)
        out = delegate(module, query, key, value, attention_mask, *args, **kwargs)
        named = inspect.signature(delegate).bind(module, query, key, value, attention_mask, *args, **kwargs).arguments
        extra = named.pop("kwargs", {}) | {k: v for k, v in named.items() if k not in TENSOR_ARGUMENTS}
        replaced = None
        for hooks in _observed_models:
            if module in hooks.names:
                hooks.calls += 1
                with torch.no_grad():
                    call = _call(hooks, module, query, key, value, attention_mask, extra, out[0])
                    new = hooks.replacement(call)
                if new is not None:
                    replaced = _require_shape(call, new)
        return out if replaced is None else (replaced.transpose(1, 2).to(out[0].dtype), *out[1:])

    return attention


def _require_shape(call: AttentionCall, new: Tensor) -> Tensor:
    if new.shape != call.output.shape:
        expected = f"shape (batch, heads, q, e) = {tuple(call.output.shape)}"
        advice = "Return None to keep the model's own output."
        raise ValueError(sentence(f"replace_attention({call.name})", expected, tuple(new.shape), advice))
    return new


def _call(hooks: ModelHooks, module, query, key, value, mask, extra: dict, output: Tensor) -> AttentionCall:
    known = INTERPRETED_ARGUMENTS | IGNORED_ARGUMENTS
    unknown = [k for k, v in extra.items() if v is not None and k not in known]
    name = hooks.names[module]
    if unknown:
        advice = "They might change what attention computes; report it rather than trust a guess."
        raise ValueError(sentence(f"attach({name})", "attention arguments that are known", unknown, advice))
    q, n, d = query.shape[-2], key.shape[-2], query.shape[-1]
    scale = d**-0.5 if extra.get("scaling") is None else float(extra["scaling"])
    causal = extra.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    causal = bool(causal) and mask is None and q > 1 and "eager" not in _implementation(module)
    wide = torch.promote_types(query.dtype, torch.float32)
    support, eta = _support(mask, causal, extra, query), scale * query.to(wide)
    capped = extra.get("softcap") is not None
    if capped:
        cap = float(extra["softcap"])
        group = query.shape[1] // key.shape[1]
        score = cap * torch.tanh(eta @ key.to(wide).repeat_interleave(group, 1).mT / cap)
        bias = support.log_weights
        support, eta = replace(support, log_weights=score if bias is None else score + bias), torch.zeros_like(eta)
    rows = hooks.masks.rows(name, query.shape[0], q, support.mask)
    if n > q and causal:  # keys beyond the queries are an unused cache
        key, value = key[:, :, :q], value[:, :, :q]
    key, value = key.to(wide), value.to(wide)
    return AttentionCall(module, eta, key, value, support, output.transpose(1, 2), scale, rows, name, capped)


def _implementation(module: nn.Module) -> str:
    return getattr(getattr(module, "config", None), "_attn_implementation", "") or ""


def _support(mask: Tensor | None, causal: bool, extra: dict, query: Tensor) -> Support:
    """Masks, biases and sinks of the call as edits of the measure."""
    bias, sink = extra.get("position_bias"), extra.get("s_aux")
    if mask is not None and mask.dtype != torch.bool:
        added, mask = mask, mask > torch.finfo(mask.dtype).min / 2  # what models use for −∞
        added = torch.where(mask, added, 0)
        if bool((added != 0).any()):
            bias = added if bias is None else bias + added
    if bias is not None:
        wide = torch.promote_types(query.dtype, torch.float32)
        bias = bias.to(wide).expand(-1, query.shape[1], query.shape[2], -1)
    sink = None if sink is None else sink.detach().float().reshape(1, -1)
    return Support(mask, causal, 0 if causal else None, log_weights=bias, sink=sink)


class TokenMasks:
    """The masks (batch, length) of the running call of a model and of the transformers models inside it.

    The transformers model nearest around an attention module decides which of its queries are tokens and which are
    padding: of CLIP the text half has the mask of the texts, and the image half has none, whatever the lengths are.

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
