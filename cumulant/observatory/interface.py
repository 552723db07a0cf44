"""Listening to a transformer: every call of its attention, as the measure and the queries that it is.

transformers dispatches attention through a table of functions. `listen` puts in a function that lets the model's own
one compute the output, unchanged, and hands what went in and came out to a listener; `intervene` may put another output
in its place. On leaving, whatever happened, the model is as it was. The layers of `cumulant.nn`, wherever they stand,
say themselves what they attended to, and the same listener hears them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from cumulant.checks import sentence
from cumulant.nn.hearing import Heard, hearing
from cumulant.observatory.own_layers import support_of, telling_modules, visible_rows

# arguments that models pass along and that do not change what attention computes from q, k, v and the mask
HARMLESS = {
    *("is_causal", "sliding_window", "deterministic", "target_dtype", "layer_idx"),
    *("position_ids", "position_embeddings", "inputs_embeds", "encoder_attention_mask", "labels", "num_items_in_batch"),
    *("cache", "cache_position", "past_key_value", "past_key_values", "use_cache", "is_first_iteration"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "logits_to_keep"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
}


@dataclass(frozen=True, eq=False)
class Call:
    """One call of attention.

    name      path of the module in the model
    eta       (batch, heads, q, d) natural parameters: queries times their scale, after rotation and normalisation
    key       (batch, key heads, n, d); fewer heads than eta are shared by groups
    value     (batch, key heads, n, e)
    support   arguments of `moments` that say which keys a query sees and with what weight
    output    (batch, heads, q, e) what the model's own function returned
    rows      (batch, q) True where the query is a token, False where it is padding; None: all are
    capped    scores are c tanh(s/c): no exponential family in the query; eta is 0 and the scores are log weights
    scale     the factor in eta
    """

    name: str
    module: nn.Module
    eta: Tensor
    key: Tensor
    value: Tensor
    support: dict
    output: Tensor
    rows: Tensor | None
    capped: bool
    scale: float


Listener = Callable[[Call], None]
Change = Callable[[Call], Tensor | None]


@dataclass
class Ear:
    """Where the listener of a model and the masks of the running forward pass are kept."""

    listener: Change  # of `listen` it gives None
    names: dict[nn.Module, str]
    two_sided: bool  # an encoder and a decoder, each with a mask of its own
    token_masks: dict[str, Tensor] = field(default_factory=dict)
    calls: int = 0
    passes: int = 0


EARS: list[Ear] = []  # the models that are listened to, innermost last


@contextmanager
def listen(model: nn.Module, listener: Listener) -> Iterator[Ear]:
    """Hand every attention call of ``model`` to ``listener`` while inside."""

    def hear(call: Call) -> None:
        listener(call)

    with intervene(model, hear) as ear:
        yield ear


@contextmanager
def intervene(model: nn.Module, change: Change) -> Iterator[Ear]:
    """Put what ``change`` makes of an attention call in the place of its output while inside.

    change  Call → (batch, heads, q, e), or None to keep what the model's own function returned

    Everyone hears the model's own output; of several changes of one call the innermost is the one that counts.
    """
    foreign, own = is_transformers(model), bool(telling_modules(model))
    if not foreign and not own:
        got, advice = type(model).__name__, "Load it with AutoModel.from_pretrained(...)."
        expected = "a transformers model, or one with layers of cumulant.nn"
        raise TypeError(sentence("attach.model", expected, got, advice))
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    ear = Ear(change, names, bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False)))
    with ExitStack() as stack:
        if foreign:
            stack.enter_context(_in_the_table(model, ear))
        if own:
            stack.enter_context(hearing(_told(ear)))
        stack.callback(model.register_forward_pre_hook(_remember_masks(ear), with_kwargs=True).remove)
        yield ear


def is_transformers(model: nn.Module) -> bool:
    """Whether a model is one of the library transformers; without that library none is."""
    kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    return kind is not None and isinstance(model, kind)


@contextmanager
def _in_the_table(model, ear: Ear) -> Iterator[None]:
    """Our functions in the place of the model's own in transformers' table while inside."""
    if not model._can_set_attn_implementation():
        raise ValueError(bypass(model))
    before = _implementations(model)
    EARS.append(ear)
    try:
        _register()
        for config, name in before.values():
            plain = name in (None, "eager", "cumulant_eager")
            config._attn_implementation_internal = "cumulant_eager" if plain else "cumulant_sdpa"
        yield
    finally:
        EARS.remove(ear)
        for config, name in before.values():
            config._attn_implementation_internal = name


def _told(ear: Ear) -> Callable[[Heard], None]:
    """A listener to layers of `cumulant.nn` that hands those of the model on."""

    def hear(heard: Heard) -> None:
        name = ear.names.get(heard.module)
        if name is None:
            return
        ear.calls += 1
        support, seeing = support_of(heard)
        eta, key, value = heard.eta.float(), heard.key.float(), heard.value.float()
        known = heard.rows if heard.rows is not None else _rows(ear, name, len(eta), eta.shape[2])
        rows = visible_rows(known, seeing)
        call = Call(name, heard.module, eta, key, value, support, heard.output, rows, False, heard.scale)
        if ear.listener(call) is not None:
            where, advice = f"intervene.change({name})", "A layer of cumulant.nn is heard; it cannot be changed."
            raise ValueError(sentence(where, "None", "another output", advice))

    return hear


def bypass(model: nn.Module) -> str:
    """The sentence for a model whose attention cannot be heard."""
    return sentence(
        "attach.model",
        "a model that calls attention through transformers' AttentionInterface",
        type(model).__name__,
        "Its attention is written out in its own code, so nothing would be heard; use another model, or a newer "
        "transformers that has moved it to the interface.",
    )


def _implementations(model: nn.Module) -> dict[int, tuple]:
    """Every configuration inside the model with the name of its attention function."""
    found: dict[int, tuple] = {}
    pending: list = [m.config for m in model.modules() if hasattr(getattr(m, "config", None), "sub_configs")]
    while pending:
        config = pending.pop()
        if id(config) in found:
            continue
        found[id(config)] = (config, getattr(config, "_attn_implementation_internal", None))
        pending += [sub for key in config.sub_configs if (sub := getattr(config, key, None)) is not None]
    return found


def _register() -> None:
    """Our two names in transformers' tables: without the second table masks would silently be dropped."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import eager_mask, sdpa_mask

    AttentionInterface.register("cumulant_sdpa", _heard(lambda module: sdpa_attention_forward))
    AttentionInterface.register("cumulant_eager", _heard(_own_eager))
    AttentionMaskInterface.register("cumulant_sdpa", sdpa_mask)
    AttentionMaskInterface.register("cumulant_eager", eager_mask)


def _own_eager(module: nn.Module) -> Callable:
    """The function that the model's own file has for plain attention."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    raise ValueError(bypass(module))


def _heard(delegate_of: Callable[[nn.Module], Callable]) -> Callable:
    def attention(module, query, key, value, attention_mask, *args, **kwargs):
        delegate = delegate_of(module)
        out = delegate(module, query, key, value, attention_mask, *args, **kwargs)
        named = inspect.signature(delegate).bind(module, query, key, value, attention_mask, *args, **kwargs).arguments
        extra = named.pop("kwargs", {}) | {k: v for k, v in named.items() if k not in PLAIN}
        changed = None
        for ear in EARS:
            if module in ear.names:
                ear.calls += 1
                with torch.no_grad():
                    call = _call(ear, module, query, key, value, attention_mask, extra, out[0])
                    new = ear.listener(call)
                if new is not None:
                    changed = _checked(call, new)
        return out if changed is None else (changed.transpose(1, 2).to(out[0].dtype), *out[1:])

    return attention


def _checked(call: Call, new: Tensor) -> Tensor:
    if new.shape != call.output.shape:
        expected = f"shape (batch, heads, q, e) = {tuple(call.output.shape)}"
        advice = "Return None to keep the model's own output."
        raise ValueError(sentence(f"intervene.change({call.name})", expected, tuple(new.shape), advice))
    return new


PLAIN = frozenset({"module", "query", "key", "value", "attention_mask"})


def _call(ear: Ear, module, query, key, value, mask, extra: dict, output: Tensor) -> Call:
    known = {"scaling", "dropout", "is_causal", "position_bias", "s_aux", "softcap"}
    unknown = [k for k, v in extra.items() if v is not None and k not in known and k not in HARMLESS]
    name = ear.names[module]
    if unknown:
        advice = "They might change what attention computes; report it rather than trust a guess."
        raise ValueError(sentence(f"attach({name})", "attention arguments that are known", unknown, advice))
    q, n, d = query.shape[-2], key.shape[-2], query.shape[-1]
    scale = d**-0.5 if extra.get("scaling") is None else float(extra["scaling"])
    causal = extra.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    causal = bool(causal) and mask is None and q > 1 and "eager" not in _implementation(module)
    support, eta = _support(mask, causal, extra, query), scale * query.float()
    capped = extra.get("softcap") is not None
    if capped:
        cap = float(extra["softcap"])
        group = query.shape[1] // key.shape[1]
        score = cap * torch.tanh(eta @ key.float().repeat_interleave(group, 1).mT / cap)
        bias = support.get("log_weights")
        support["log_weights"] = score if bias is None else score + bias
        eta = torch.zeros_like(eta)
    rows = _rows(ear, name, query.shape[0], q)
    if n > q and causal:  # keys beyond the queries are an unused cache
        key, value = key[:, :, :q], value[:, :, :q]
    return Call(name, module, eta, key.float(), value.float(), support, output.transpose(1, 2), rows, capped, scale)


def _implementation(module: nn.Module) -> str:
    return getattr(getattr(module, "config", None), "_attn_implementation", "") or ""


def _support(mask: Tensor | None, causal: bool, extra: dict, query: Tensor) -> dict:
    """Masks, biases and sinks of the call as edits of the measure."""
    support: dict = {"causal": causal}
    if causal:
        support["offset"] = 0
    bias = extra.get("position_bias")
    if mask is not None and mask.dtype == torch.bool:
        support["mask"] = mask
    elif mask is not None:
        lowest = torch.finfo(mask.dtype).min
        support["mask"] = mask > lowest / 2  # what models use for −∞
        additive = torch.where(support["mask"], mask, 0)
        if bool((additive != 0).any()):
            bias = additive if bias is None else bias + additive
    if bias is not None:
        support["log_weights"] = bias.float().expand(-1, query.shape[1], query.shape[2], -1)
    if extra.get("s_aux") is not None:
        support["sink"] = extra["s_aux"].detach().float().reshape(1, -1)
    return support


def _remember_masks(ear: Ear):
    def hook(module, args, kwargs):
        ear.passes += 1
        names = ("attention_mask", "decoder_attention_mask")
        ear.token_masks = {k: kwargs[k] for k in names if isinstance(kwargs.get(k), Tensor) and kwargs[k].ndim == 2}

    return hook


def _rows(ear: Ear, name: str, batch: int, q: int) -> Tensor | None:
    """Which queries are tokens, from the two-dimensional masks the model was called with."""
    inside = ear.two_sided and "decoder" in name.split(".")
    mask = ear.token_masks.get("decoder_attention_mask" if inside else "attention_mask")
    if mask is None or mask.shape[0] != batch or mask.shape[1] < q:
        return None
    return mask[:, -q:].bool()
