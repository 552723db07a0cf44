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
from cumulant.nn.attention_interface import (
    TokenMasks,
    capped_scores,
    read_support,
    require_known,
    score_scale,
    visible_keys,
)
from cumulant.nn.calls import AttentionCall, Observer, on_attention
from cumulant.nn.structural_mask import StructuralMask
from cumulant.nn.wrappers import attention_configurations, is_transformers
from cumulant.observatory.hooks.structure import (
    attention_modules,
    first_paths,
    list_elements,
    reporting_layers,
    unwrapped,
)

# the names of a model's attention functions while it is observed; all others compute what sdpa does
OBSERVED = {None: "cumulant_eager", "eager": "cumulant_eager", "cumulant_eager": "cumulant_eager"}
OBSERVED |= {"cumulant": "cumulant_observed", "cumulant_observed": "cumulant_observed"}
KEPT_MASKS = 2  # of a pass: layers have one, or two in turn
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
    _supports: dict[tuple[int, int], tuple[Support, Support]] = field(default_factory=dict)

    def without_tables(self, support: Support, queries: int, keys: int) -> Support:
        """The same support with its mask (batch | 1, heads | 1, q, n) as one row of keys, with or without a causal
        order, and without a mask where the order says all: padding is written out by transformers as a table of pairs.
        The layers of a pass share their masks, so each is compared once."""
        mask = support.mask
        if mask is None or mask.ndim < 4 or mask.shape[2] == 1 or support.causal or support.window is not None:
            return support
        key = self.passes, id(mask)
        if key not in self._supports:
            if len(self._supports) >= KEPT_MASKS or any(number != self.passes for number, _ in self._supports):
                self._supports.clear()
            # the mask too: its id is not given to another while it lives
            self._supports[key] = support, _row_of_keys(mask, ordered=queries == keys)
        short = self._supports[key][1]
        return replace(support, mask=short.mask, causal=short.causal, offset=short.offset)

    @property
    def passes(self) -> int:
        """Calls of the model, or of a transformers model in it."""
        return self.masks.passes


_observed_models: list[ModelHooks] = []  # innermost last
# a configuration by its id, with its function before it was observed and how many observe it
_observed_configurations: dict[int, tuple[object, str | None, int]] = {}


@contextmanager
def observe_attention(
    model: nn.Module, observer: Observer, *, running: tuple[nn.Module, tuple, dict] | None = None
) -> Iterator[ModelHooks]:
    """Hand every attention call of ``model`` to ``observer`` while inside.

    running  module, args and kwargs of a call of the model, or of a part of it, that has begun and ends inside
    """

    def keep_output(call: AttentionCall) -> None:
        observer(call)

    with replace_attention(model, keep_output, running=running) as hooks:
        yield hooks


@contextmanager
def replace_attention(
    model: nn.Module, replacement: Replacement, *, running: tuple[nn.Module, tuple, dict] | None = None
) -> Iterator[ModelHooks]:
    """Put what ``replacement`` makes of an attention call in the place of its output while inside.

    replacement  AttentionCall → (batch, heads, q, e), or None to keep what the model's own function returned

    Every observer gets the model's own output; of several replacements of one call the innermost counts.
    """
    model = unwrapped(model)
    own_layers = bool(reporting_layers(model))
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    models = {name: m for name, m in model.named_modules() if not name or is_transformers(m)}
    hooks = ModelHooks(replacement, names, TokenMasks(models))
    with ExitStack() as stack:
        if is_transformers(model):
            stack.enter_context(_registered_functions(model, hooks, own_layers))
        if own_layers:
            stack.enter_context(on_attention(_layer_observer(hooks)))
        stack.enter_context(hooks.masks.hooks(None if running is None else running[0]))
        if running is not None:
            hooks.masks.begin(*running)
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
    configurations = attention_configurations(model)
    names = {getattr(config, "_attn_implementation_internal", None) for config in configurations}
    _register(own="cumulant" in names)
    _observed_models.append(hooks)
    try:
        for config in configurations:
            name = getattr(config, "_attn_implementation_internal", None)
            _, original, observers = _observed_configurations.get(id(config), (config, name, 0))
            _observed_configurations[id(config)] = config, original, observers + 1
            config._attn_implementation_internal = OBSERVED.get(name, "cumulant_sdpa")
        yield
    finally:
        _observed_models.remove(hooks)
        for config in configurations:
            _let_go_of(config)


def _let_go_of(config) -> None:
    """The last of several observers of a configuration gives it back its function, in whatever order they end."""
    _, original, observers = _observed_configurations.pop(id(config))
    if observers > 1:
        _observed_configurations[id(config)] = config, original, observers - 1
    else:
        config._attn_implementation_internal = original


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
        ids = hooks.masks.tokens(name, len(key), key.shape[2])
        named = AttentionCall(call.module, eta, key, value, support, call.output, call.scale, rows, name, tokens=ids)
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
        f"{type(model).__name__} with {first_paths(attention_modules(model))}",
        "Its attention is written out in its own code, so nothing would be recorded; use another model, or a newer "
        "transformers that has moved it to the interface.",
    )


def _register(own: bool) -> None:
    """Our names in transformers' tables: without the second table masks would silently be dropped.

    own  also the function that `cumulant.transformers` registers, as a model that is observed has it
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import eager_mask, sdpa_mask

    AttentionInterface.register("cumulant_sdpa", _reporting(lambda module: sdpa_attention_forward))
    AttentionInterface.register("cumulant_eager", _reporting(_own_eager))
    AttentionMaskInterface.register("cumulant_sdpa", sdpa_mask)
    AttentionMaskInterface.register("cumulant_eager", eager_mask)
    if own:
        from cumulant.transformers import attention_function, mask_function

        AttentionInterface.register("cumulant_observed", _reporting(lambda module: attention_function))
        AttentionMaskInterface.register("cumulant_observed", mask_function)


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
    name = hooks.names[module]
    require_known(f"attach({name})", extra)
    q, n = query.shape[-2], key.shape[-2]
    mask = mask.table() if isinstance(mask, StructuralMask) else mask
    scale = score_scale(query, extra.get("scaling"))
    wide = torch.promote_types(query.dtype, torch.float32)
    support, eta = _support(module, query, mask, extra, wide), scale * query.to(wide)
    rows = hooks.masks.rows(name, query.shape[0], q, support.mask)
    support = hooks.without_tables(support, q, n)
    keys = visible_keys(support, q, n)  # those behind are an unused cache
    if keys < n:
        key, value, support = key[:, :, :keys], value[:, :, :keys], support.of_first_keys(keys)
    key, value = key.to(wide), value.to(wide)
    capped = extra.get("softcap") is not None
    if capped:
        score, bias = capped_scores(eta, key, float(extra["softcap"])), support.log_weights
        score = score.masked_fill(_padding(score, support.mask, rows), -torch.inf) if score.isnan().any() else score
        support, eta = replace(support, log_weights=score if bias is None else score + bias), torch.zeros_like(eta)
    ids = hooks.masks.tokens(name, len(key), keys)
    return AttentionCall(module, eta, key, value, support, output.transpose(1, 2), scale, rows, name, capped, ids)


def _row_of_keys(mask: Tensor, ordered: bool) -> Support:
    """A mask (·, ·, q, n) as one row (·, ·, 1, n) where all queries see the same keys, or where they do up to their own
    (looked for if ``ordered``), without the row if it shows all; else the mask as it is."""
    row = mask[:, :, :1]
    if torch.equal(row.expand_as(mask), mask):
        return Support(None if bool(row.all()) else row)
    last = mask[:, :, -1:]
    if ordered and torch.equal(last.expand_as(mask).tril(), mask):
        return Support(None if bool(last.all()) else last, causal=True, offset=0)
    return Support(mask)


def _padding(score: Tensor, mask: Tensor | None, rows: Tensor | None) -> Tensor:
    """True where a score (batch, heads, q, n) is of a hidden key or of a query that is no token: there may be NaN."""
    hidden = torch.zeros_like(score, dtype=torch.bool)
    hidden = hidden if mask is None else hidden | ~mask
    return hidden if rows is None else hidden | ~rows.to(score.device)[:, None, :, None]


def _implementation(module: nn.Module) -> str:
    return getattr(getattr(module, "config", None), "_attn_implementation", "") or ""


def _support(module: nn.Module, query: Tensor, mask: Tensor | None, extra: dict, wide: torch.dtype) -> Support:
    """The support of a call, with the biases of every head and query in ``wide``."""
    named = {"is_causal": extra.get("is_causal"), "position_bias": extra.get("position_bias")}
    support = read_support(module, query, mask, **named, order_without_mask="eager" not in _implementation(module))
    bias, sink = support.log_weights, extra.get("s_aux")
    return replace(
        support,
        log_weights=None if bias is None else bias.to(wide).expand(-1, query.shape[1], query.shape[2], -1),
        sink=None if sink is None else sink.detach().float().reshape(1, -1),
    )
