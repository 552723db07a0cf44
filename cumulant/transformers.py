"""``attn_implementation="cumulant"``: attention of transformers' models by `moments`, with its statistics on request.

Importing this module registers the function and its masks with transformers. A model on it returns what it returns on
sdpa, and `on_attention` hands the log-normalizer and any statistic of every head to a callback, from the kernel call
that computes the output:

    G_i = log Σ_j exp(⟨η_i,k_j⟩ + w_ij),      output_i = Σ_j p_ij v_j,      η = scale · query

    import cumulant.transformers
    model = AutoModel.from_pretrained(name, attn_implementation="cumulant")      # or model.set_attn_implementation
    with cumulant.transformers.on_attention(model, lambda call: print(call.name, call.moments.entropy.mean())):
        model(**inputs)

Masks are rules where transformers allows it (`StructuralMask`): no table of queries × keys for padding, causal order,
sliding windows and caches. Packed sequences, chunks and masks that a model composes itself are tables.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cumulant.checks import everywhere, sentence
from cumulant.extras import missing_package
from cumulant.kernels.arguments import Support
from cumulant.kernels.autocast import autocast
from cumulant.kernels.moments import STATISTICS, Moments
from cumulant.kernels.native.direct import Arguments, MomentsSettings
from cumulant.kernels.operator import DERIVED, scaled_moments, statistics_of
from cumulant.nn.attention_interface import (
    IGNORED_ARGUMENTS,
    TokenMasks,
    capped_scores,
    read_support,
    require_known,
    score_scale,
    visible_keys,
    without_copies,
)
from cumulant.nn.call_statistics import CallStatistics, StatisticsRequest, requested_statistics
from cumulant.nn.compressed_keys import CompressedKeys
from cumulant.nn.largest_logit import is_recording, record_largest_logit
from cumulant.nn.structural_mask import StructuralMask
from cumulant.nn.wrappers import attention_configurations, is_transformers, without_wrappers

try:
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
except ModuleNotFoundError as missing:
    raise missing_package("cumulant.transformers", missing.name or "transformers", "hf") from None

__all__ = ["AttentionMoments", "AttentionObserver", "attention_function", "mask_function", "on_attention"]

NAMES = ("cumulant", "cumulant_observed")  # the second while the observatory observes the model, too
HARMLESS = IGNORED_ARGUMENTS - {"cache", "output_attentions"}


# ---------------------------------------------------------------------- observers


@dataclass(frozen=True, eq=False)
class AttentionMoments:
    """One attention call of a model and its statistics.

    module   the layer that attended
    name     its path in the model
    moments  log_normalizer (batch, heads, q), mean (batch, heads, q, e) and the requested statistics, in float32 for
             half precision; with gradients where the model has them
    support  which keys are visible to a query, and with what log weight; of a compressed cache, which recent ones
    rows     (batch, q) True where the query is a token, False where it is padding; None: all are, or it is not known
    scale    the factor of scores: η = scale · query
    capped   scores are c tanh(s/c): no exponential family in the query; η is 0 and the scores are log weights
    query    (batch, heads, q, d) as the model passes it, rotated, before it is scaled
    key      (batch, key heads, n, d) the keys that some query sees, those of the cache before the new ones
    value    (batch, key heads, n, e)
    """

    module: nn.Module
    name: str
    moments: Moments
    support: Support
    rows: Tensor | None
    scale: float
    capped: bool
    query: Tensor
    key: Tensor
    value: Tensor


class AttentionObserver:
    """A callback on the attention calls of a model, from its creation by `on_attention` to `close`.

    As a context manager it is closed on leaving, whatever happened. Closing twice is closing once.
    """

    def __init__(self, model: nn.Module, callback: Callable[[AttentionMoments], object], statistics: frozenset[str]):
        self.callback, self.statistics = callback, statistics
        self.names = {module: name for name, module in model.named_modules()}
        self.masks = TokenMasks({name: m for m, name in self.names.items() if not name or is_transformers(m)})
        self._stack = ExitStack()
        self._stack.enter_context(self.masks.hooks())
        _change_observers(add=self)

    def close(self) -> None:
        """No further calls are handed on; the model is as it was."""
        _change_observers(remove=self)
        self._stack.close()

    def __enter__(self) -> AttentionObserver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_observers: tuple[AttentionObserver, ...] = ()  # replaced as a whole, so that calls in other threads see one or other
_changing = threading.Lock()


def _change_observers(add: AttentionObserver | None = None, remove: AttentionObserver | None = None) -> None:
    global _observers
    with _changing:
        left = tuple(o for o in _observers if o is not remove)
        _observers = left if add is None else (*left, add)


def on_attention(
    model: nn.Module, callback: Callable[[AttentionMoments], object], statistics: Collection[str] = ("entropy",)
) -> AttentionObserver:
    """Hand every attention call of ``model`` to ``callback``, with statistics from the call that computes the output.

    model       on ``attn_implementation="cumulant"``; wrapped by torch.compile or data parallelism, or part of a larger
                module, as you like
    callback    gets an `AttentionMoments` after each call, in the thread of the call; what it raises, the model raises
    statistics  names of `moments`: "entropy", "effective_atoms", "score_variance", …, or "all"; log-normalizer and mean
                always come

    The answer observes from now on: leave its ``with`` block, or `close` it, to stop. Several observers of one model
    share one kernel call with all their statistics. With gradient checkpointing a call is repeated, and handed on
    again, in the backward pass. Statistics have gradients: a penalty on them trains the model; detach what you keep.

    >>> import torch, transformers, cumulant.transformers
    >>> sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    >>> config = transformers.BertConfig(vocab_size=9, attn_implementation="cumulant", **sizes)
    >>> model, seen = transformers.BertModel(config).eval(), {}
    >>> with on_attention(model, lambda call: seen.update({call.name: call.moments.entropy.shape})):
    ...     _ = model(torch.tensor([[1, 2, 3]]))
    >>> seen
    {'encoder.layer.0.attention.self': torch.Size([1, 2, 3]), 'encoder.layer.1.attention.self': torch.Size([1, 2, 3])}
    """
    model = _require_implementation(model)
    if not callable(callback):
        advice = "Give on_attention(model, callback) a function of one argument."
        raise TypeError(sentence("on_attention.callback", "a function", type(callback).__name__, advice))
    names = (statistics,) if isinstance(statistics, str) else tuple(statistics)
    if names == ("all",):
        names = STATISTICS
    for name in names:
        if name not in STATISTICS and name not in DERIVED:
            expected = f'names among {", ".join((*STATISTICS, *DERIVED))}, or "all"'
            raise ValueError(sentence("on_attention.statistics", expected, repr(name), "Pick from them."))
    return AttentionObserver(model, callback, frozenset(names))


def _require_implementation(model: object) -> nn.Module:
    """The model without its wrappers, if some part of it is on our function."""
    expected = 'a model on attn_implementation="cumulant"'
    if not isinstance(model, nn.Module):
        advice = "Pass the model itself, not a function that calls it."
        raise TypeError(sentence("on_attention.model", expected, f"a {type(model).__name__}", advice))
    inner = without_wrappers(model)
    configurations = attention_configurations(inner)
    names = [getattr(config, "_attn_implementation_internal", None) for config in configurations]
    if any(name in NAMES for name in names):
        return inner
    kind, can_set = type(inner).__name__, getattr(inner, "_can_set_attn_implementation", None)
    if not configurations:
        advice = 'Load one with AutoModel.from_pretrained(..., attn_implementation="cumulant").'
        raise ValueError(sentence("on_attention.model", expected, f"{kind}, no model of transformers", advice))
    if can_set is not None and not can_set():
        got = f"{kind}, whose attention is written out in its own code"
        advice = "Use a model that calls attention through transformers' AttentionInterface."
        raise ValueError(sentence("on_attention.model", expected, got, advice))
    advice = 'Call model.set_attn_implementation("cumulant") first.'
    raise ValueError(sentence("on_attention.model", expected, f"{kind} on {names[0]!r}", advice))


# ---------------------------------------------------------------------- the function


class _KernelCall(NamedTuple):
    """A call of the function as the kernel takes it.

    mask      as the model passed it
    passed    query, key and value as the model has them
    scale     the factor of scores, and ``factor`` what is left of it: 1 where ``query`` is η already
    capped    scores are log weights of pairs, as they are c tanh(s/c)
    recorded  whether the largest logits are read off the same kernel call
    """

    module: nn.Module
    mask: Tensor | None
    passed: tuple[Tensor, Tensor, Tensor]
    query: Tensor
    key: Tensor
    value: Tensor
    support: Support
    scale: float
    factor: float | None = None
    capped: bool = False
    recorded: bool = False

    def moments(self, statistics: Collection[str]) -> Moments:
        """The output and ``statistics``, in one kernel call."""
        names = {"mean", *statistics} | ({"max_score"} if self.recorded else set())
        factor = self.scale if self.factor is None else self.factor
        record = _moments(self.query, self.key, self.value, self.support, tuple(sorted(names)), factor)
        if self.recorded:
            record_largest_logit(self.module, record.max_score)
        return record


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: (batch, q, heads, e) in the dtype of ``value``, and None for the weights.

    query          (batch, heads, q, d), after rotation and normalisation
    key, value     (batch, key heads, n, d | e); groups of heads share a key head. The keys of a compressed
                   `MeasureCache` come with the measure of its entries, which every query sees
    dropout        must be 0 in training: a mean over keys that are dropped at random is none of this measure
    position_bias  (batch | 1, heads | 1, q, n) log weights of pairs
    softcap        scores c tanh(s/c): exact, from all scores, in memory of queries × keys
    s_aux          (heads,) log weights of a sink

    Masks and order as in `read_support`; other arguments are refused unless they are known to change nothing.

    >>> query, value = torch.zeros(1, 1, 2, 4), torch.tensor([[[[1.0], [3.0]]]])
    >>> attention_function(nn.Identity(), query, query, value, None, is_causal=False)[0].flatten()
    tensor([2., 2.])
    """
    if dropout and module.training:
        advice = "Build it with attention_dropout=0 (BERT: attention_probs_dropout_prob=0), or call model.eval()."
        raise ValueError(sentence("attention_function.dropout", "0 in training", dropout, advice))
    if not kwargs.keys() <= HARMLESS:
        _refuse(kwargs)
    if attention_mask is not None and type(attention_mask) is not StructuralMask:
        attention_mask = without_copies(attention_mask)
    support = read_support(module, query, attention_mask, is_causal=is_causal, position_bias=position_bias, sink=s_aux)
    if type(key) is CompressedKeys:
        key.require_plain(support)
    elif (keys := visible_keys(support, query.shape[2], key.shape[2])) < key.shape[2]:
        key, value, support = key[:, :, :keys], value[:, :, :keys], support.of_first_keys(keys)
    call = _KernelCall(
        module, attention_mask, (query, key, value), query, key, value, support, score_scale(query, scaling)
    )
    if softcap is not None:
        call = _capped(call, softcap)
    if is_recording(module):  # the largest logit is that before the cap
        if softcap is None:
            call = call._replace(recorded=True)
        else:
            record_largest_logit(module, _moments(query, key, value, support, ("max_score",), call.scale).max_score)
    request = requested_statistics(module)
    if _observers or request is not None:
        output: Tensor = _observed(call, request)  # pyright: ignore[reportCallIssue]
    else:
        output = call.moments(()).mean
    if type(call.key) is CompressedKeys:
        call.key.receive(call.query, call.scale, support)  # pyright: ignore[reportAttributeAccessIssue]
    return output.to(value.dtype).transpose(1, 2).contiguous(), None


def _refuse(arguments: dict[str, object]) -> None:
    """Say which arguments are not understood; those that are off pass."""
    if arguments.get("output_attentions"):
        advice = 'Weights are not computed; use on_attention, or set_attn_implementation("eager").'
        raise ValueError(sentence("attention_function.output_attentions", "False", True, advice))
    require_known("attention_function", arguments, HARMLESS | {"output_attentions"})


def _moments(
    query: Tensor, key: Tensor, value: Tensor, support: Support, statistics: tuple[str, ...], scale: float
) -> Moments:
    """`moments` at scale · query."""
    if type(key) is CompressedKeys:
        wanted = statistics_of(statistics, True)
        return key.moments(query, value, support, wanted, scale)  # pyright: ignore[reportAttributeAccessIssue]
    query, key, value = autocast(query, key, value)
    weights = autocast(support.log_weights)[0]
    settings = MomentsSettings(statistics_of(statistics, True), scale, support.causal, support.window, support.offset)
    return scaled_moments(Arguments(query, key, value, weights, support.mask, None), support.sink, settings, "auto")


def _capped(call: _KernelCall, cap: float) -> _KernelCall:
    """The call with its capped scores as log weights of pairs, in float32 at least; η is 0."""
    if type(call.key) is CompressedKeys:
        return call._replace(key=call.key.capped(cap), capped=True)
    wide = torch.promote_types(call.query.dtype, torch.float32)
    eta, key, value = (call.query * call.scale).to(wide), call.key.to(wide), call.value.to(wide)
    score, bias = capped_scores(eta, key, cap), call.support.log_weights
    support = replace(call.support, log_weights=score if bias is None else score + bias)
    return call._replace(query=torch.zeros_like(eta), key=key, value=value, support=support, factor=1.0, capped=True)


@torch.compiler.disable
def _observed(call: _KernelCall, request: StatisticsRequest | None) -> Tensor:
    """The output, with the call handed to the observers of its module and to who has a ``request`` for its
    statistics."""
    observers = [observer for observer in _observers if call.module in observer.names]
    own = frozenset() if request is None else request.statistics
    record = call.moments(own.union(*(observer.statistics for observer in observers)))
    if request is not None:
        request.receive(CallStatistics(call.module, record, call.support, call.key.shape[2], mask=call.mask))
    for observer in observers:
        name = observer.names[call.module]
        rows = observer.masks.rows(name, call.query.shape[0], call.query.shape[2], call.mask)
        seen = AttentionMoments(call.module, name, record, call.support, rows, call.scale, call.capped, *call.passed)
        observer.callback(seen)
    return record.mean


# ---------------------------------------------------------------------- masks


def mask_function(*args, **arguments) -> Tensor | None:
    """The mask of a forward pass, from the keyword arguments that transformers has for it: a rule where there is one.

    None               nothing is hidden but by the plain causal order that the layers know of themselves
    plain tensor       (batch, 1, q, n), expanded over queries where it is only padding, or has one query
    `StructuralMask`   causal order, window and cache, with padding

    Under torch.compile, and where a model composes masks (packed sequences, chunks, images that see both ways), it is
    the table of transformers' `sdpa_mask`.

    >>> mask_function(batch_size=1, q_length=2, kv_length=3, q_offset=1)
    StructuralMask((1, 1, 2, 3), {'causal': True, 'offset': 1})
    """
    rule = arguments.get("mask_function", masking_utils.causal_mask_function)
    tokens = arguments.get("attention_mask")
    tracing = torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    band = None if args or tracing or "q_length" not in arguments else _band(rule)
    if band is None or (tokens is not None and tokens.ndim != 2):
        return masking_utils.sdpa_mask(*args, **arguments)
    queries, keys, (causal, window) = arguments["q_length"], arguments["kv_length"], band
    start = arguments.get("kv_offset", 0)
    offset = int(arguments.get("q_offset", 0)) - start
    visible = max(0, min(keys, offset + queries)) if causal else keys
    tokens = _padding(tokens, start, visible)
    if window is not None and window >= (offset + queries if causal else max(offset + queries, keys)):
        window = None  # no query has a key that far away
    batch, device = arguments["batch_size"], arguments.get("device", "cpu")
    if not causal and window is None:
        if tokens is None and arguments.get("allow_is_bidirectional_skip", False):
            return None
        row = torch.ones(1, 1, dtype=torch.bool, device=device) if tokens is None else tokens
        return row[:, None, None].expand(batch, 1, queries, keys)
    plain = causal and window is None and tokens is None and (offset == 0 if queries > 1 else visible == keys)
    if plain and arguments.get("allow_is_causal_skip", True):
        return None
    sizes = {"batch": batch, "queries": queries, "keys": keys}
    mask = StructuralMask.of(tokens, **sizes, causal=causal, window=window, offset=offset, device=device)
    return mask.table() if queries == 1 else mask


def _padding(tokens: Tensor | None, start: int, keys: int) -> Tensor | None:
    """(batch, keys) True where key ``start + j`` is a token; None where all are."""
    if tokens is None:
        return None
    tokens = tokens[:, start : start + keys]
    if tokens.shape[1] == keys and everywhere(tokens):
        return None
    return torch.nn.functional.pad(tokens, (0, keys - tokens.shape[1]))


def _band(rule: Callable) -> tuple[bool, int | None] | None:
    """Causal order and window of a mask function of transformers; None where it says more than that."""
    parts = _conjunction(rule)
    causal, windows = False, []
    for part in parts:
        code = getattr(part, "__code__", None)
        if part is masking_utils.causal_mask_function:
            causal = True
        elif code is not None and code is _PAST_WINDOW:  # j > i − window
            if masking_utils.causal_mask_function not in parts:
                return None
            windows.append(_enclosed(part, "sliding_window"))
        elif code is not None and code is _WINDOW:  # |i − j| ≤ window
            windows.append(_enclosed(part, "sliding_window") + 1)
        elif part is not masking_utils.bidirectional_mask_function:
            return None
    return causal, min(windows, default=None)


def _conjunction(rule: Callable) -> list[Callable]:
    """The mask functions that must all hold, if ``rule`` was put together by and_masks."""
    code = getattr(rule, "__code__", None)
    if code is None or code is not _AND:
        return [rule]
    return [part for function in _enclosed(rule, "mask_functions") for part in _conjunction(function)]


def _enclosed(function: Callable, name: str):
    """A variable of the function around this one."""
    return (function.__closure__ or ())[function.__code__.co_freevars.index(name)].cell_contents


def _code_of(factory: str, *arguments: object):
    """The code of the functions that a function of masking_utils makes; None where this version has none."""
    make = getattr(masking_utils, factory, None)
    return None if make is None else make(*arguments).__code__


_AND = _code_of("and_masks", masking_utils.causal_mask_function)
_PAST_WINDOW = _code_of("sliding_window_overlay", 1)
_WINDOW = _code_of("sliding_window_bidirectional_overlay", 1)

AttentionInterface.register("cumulant", attention_function)
AttentionMaskInterface.register("cumulant", mask_function)
