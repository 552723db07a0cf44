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
from cumulant.nn.calls import AttentionCall, on_attention
from cumulant.observatory.hooks.blocks import attention_modules
from cumulant.observatory.hooks.nn_adapter import support_of, telling_modules, visible_rows
from cumulant.observatory.hooks.token_masks import TokenMasks
from cumulant.observatory.hooks.unwrap import is_transformers, unwrapped

# arguments that models pass along and that do not change what attention computes from q, k, v and the mask
HARMLESS = {
    *("is_causal", "sliding_window", "deterministic", "target_dtype", "layer_idx"),
    *("position_ids", "position_embeddings", "inputs_embeds", "encoder_attention_mask", "labels", "num_items_in_batch"),
    *("cache", "cache_position", "past_key_value", "past_key_values", "use_cache", "is_first_iteration"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "logits_to_keep"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
}


Listener = Callable[[AttentionCall], None]
Change = Callable[[AttentionCall], Tensor | None]


@dataclass
class Ear:
    """Where the listener of a model and the masks of the running forward pass are kept.

    listener  of `listen` it gives None
    names     paths of the modules
    masks     which tokens of the running pass are padding
    calls     attention calls so far
    ran       paths of the attention modules that were called, through the interface or not
    """

    listener: Change
    names: dict[nn.Module, str]
    masks: TokenMasks
    calls: int = 0
    ran: set[str] = field(default_factory=set)

    @property
    def passes(self) -> int:
        """Calls of the model, or of a transformers model in it."""
        return self.masks.passes


EARS: list[Ear] = []  # the models that are listened to, innermost last


@contextmanager
def listen(model: nn.Module, listener: Listener) -> Iterator[Ear]:
    """Hand every attention call of ``model`` to ``listener`` while inside."""

    def hear(call: AttentionCall) -> None:
        listener(call)

    with intervene(model, hear) as ear:
        yield ear


@contextmanager
def intervene(model: nn.Module, change: Change) -> Iterator[Ear]:
    """Put what ``change`` makes of an attention call in the place of its output while inside.

    change  AttentionCall → (batch, heads, q, e), or None to keep what the model's own function returned

    Everyone hears the model's own output; of several changes of one call the innermost is the one that counts.
    """
    model = unwrapped(model)
    foreign, own = is_transformers(model), bool(telling_modules(model))
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    ear = Ear(change, names, TokenMasks(model))
    with ExitStack() as stack:
        if foreign:
            stack.enter_context(_in_the_table(model, ear, own))
        if own:
            stack.enter_context(on_attention(_told(ear)))
        stack.enter_context(ear.masks.hooks())
        for path in attention_modules(model):
            stack.callback(model.get_submodule(path).register_forward_pre_hook(_runs(ear, path)).remove)
        yield ear


def _runs(ear: Ear, path: str) -> Callable:
    def hook(module, args) -> None:
        ear.ran.add(path)

    return hook


@contextmanager
def _in_the_table(model, ear: Ear, own: bool) -> Iterator[None]:
    """Our functions in the place of the model's own in transformers' table while inside."""
    if not (own or model._can_set_attn_implementation()):
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


def _told(ear: Ear) -> Callable[[AttentionCall], None]:
    """A listener to layers of `cumulant.nn` that hands those of the model on."""

    def hear(heard: AttentionCall) -> None:
        name = ear.names.get(heard.module)
        if name is None:
            return
        ear.calls += 1
        support, seeing = support_of(heard)
        wide = torch.promote_types(heard.eta.dtype, torch.float32)
        eta, key, value = heard.eta.to(wide), heard.key.to(wide), heard.value.to(wide)
        known = heard.rows if heard.rows is not None else ear.masks.rows(name, len(eta), eta.shape[2], None)
        rows = visible_rows(known, seeing)
        call = AttentionCall(heard.module, eta, key, value, support, heard.output, heard.scale, rows, name)
        if ear.listener(call) is not None:
            where, advice = f"intervene.change({name})", "A layer of cumulant.nn is heard; it cannot be changed."
            raise ValueError(sentence(where, "None", "another output", advice))

    return hear


def bypass(model: nn.Module) -> str:
    """The sentence for a model whose attention cannot be recorded, with the reason."""
    if not attention_modules(model):
        kinds = list(dict.fromkeys(type(m).__name__ for m in _elements(model))) or ["other modules"]
        got = f"{type(model).__name__}, which has none: its layers are {', '.join(kinds[:3])}"
        return sentence("attach.model", "a model with attention", got, "Use a model that attends.")
    return sentence(
        "attach.model",
        "a model that calls attention through transformers' AttentionInterface",
        type(model).__name__,
        "Its attention is written out in its own code, so nothing would be recorded; use another model, or a newer "
        "transformers that has moved it to the interface.",
    )


def _elements(model: nn.Module) -> Iterator[nn.Module]:
    """What the lists of layers of a model hold."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from module


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


def _checked(call: AttentionCall, new: Tensor) -> Tensor:
    if new.shape != call.output.shape:
        expected = f"shape (batch, heads, q, e) = {tuple(call.output.shape)}"
        advice = "Return None to keep the model's own output."
        raise ValueError(sentence(f"intervene.change({call.name})", expected, tuple(new.shape), advice))
    return new


PLAIN = frozenset({"module", "query", "key", "value", "attention_mask"})


def _call(ear: Ear, module, query, key, value, mask, extra: dict, output: Tensor) -> AttentionCall:
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
    wide = torch.promote_types(query.dtype, torch.float32)
    support, eta = _support(mask, causal, extra, query), scale * query.to(wide)
    capped = extra.get("softcap") is not None
    if capped:
        cap = float(extra["softcap"])
        group = query.shape[1] // key.shape[1]
        score = cap * torch.tanh(eta @ key.to(wide).repeat_interleave(group, 1).mT / cap)
        bias = support.get("log_weights")
        support["log_weights"] = score if bias is None else score + bias
        eta = torch.zeros_like(eta)
    rows = ear.masks.rows(name, query.shape[0], q, support.get("mask"))
    if n > q and causal:  # keys beyond the queries are an unused cache
        key, value = key[:, :, :q], value[:, :, :q]
    key, value = key.to(wide), value.to(wide)
    return AttentionCall(module, eta, key, value, support, output.transpose(1, 2), scale, rows, name, capped)


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
        wide = torch.promote_types(query.dtype, torch.float32)
        support["log_weights"] = bias.to(wide).expand(-1, query.shape[1], query.shape[2], -1)
    if extra.get("s_aux") is not None:
        support["sink"] = extra["s_aux"].detach().float().reshape(1, -1)
    return support
