"""One window of a text: its prefix is read and compressed by every method, and what follows is read with each cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cumulant.cache.audit.continuation import FullPass, logits_after, read_on
from cumulant.cache.audit.head_errors import (
    FullReading,
    HeadErrors,
    head_errors,
    held_tokens,
    lost_attention,
    read_full,
)
from cumulant.cache.audit.result import Answers, Look, Method, MethodResult, Prediction, WindowResult, WorstToken
from cumulant.cache.audit.retrieval import RetrievalPrefix, retrieval_prefix, right_answers
from cumulant.cache.audit.texts import TextWindow
from cumulant.cache.audit.token_errors import FullPredictions, TokenErrors, full_predictions, token_errors
from cumulant.cache.compressor import Compressed, Compressor, compress_prefix
from cumulant.cache.prefix import Prefix, prefill
from cumulant.observatory.hooks.structure import NotFound
from cumulant.observatory.hooks.weights import head_outputs
from cumulant.observatory.text.windows import token_strings

WORST = 2  # tokens of a window that are kept for every method
LIKELY = 3  # predictions
LOST = 8  # tokens that they looked at and that are not held


class WindowSettings(NamedTuple):
    """How a window is read.

    prefix, continuation  tokens
    every                 one token in so many has its queries measured
    retrieval             whether questions are asked, too
    """

    prefix: int
    continuation: int
    every: int
    retrieval: bool


class Audited(NamedTuple):
    """A model, and how its heads reach the residual stream: module → (heads, D, e), None where that is not known."""

    model: nn.Module
    tokenizer: Any
    outputs: dict[str, Tensor | None]


def audited(model: nn.Module, tokenizer: Any, prefix: Prefix) -> Audited:
    """The model with its output projections."""
    found = {layer.name: head_outputs(model, layer.name) for layer in prefix.layers}
    return Audited(model, tokenizer, {name: None if isinstance(w, NotFound) else w for name, w in found.items()})


class Clock:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        self.spent[name] = self.spent.get(name, 0.0) + seconds

    def time(self, name: str, function: Callable, *args: Any) -> Any:
        """What a function returns, with its time put under ``name``."""
        start = time.perf_counter()
        made = function(*args)
        self.add(name, time.perf_counter() - start)
        return made


@torch.no_grad()
def measure_window(
    model: nn.Module,
    tokenizer: Any,
    window: TextWindow,
    methods: Mapping[str, Compressor],
    keeps: Sequence[float],
    settings: WindowSettings,
    step: Callable[[str], None] = lambda words: None,
) -> WindowResult:
    """Every method at every budget on one window; ``step`` is called with what has been done."""
    clock, device = Clock(), next(model.parameters()).device
    ids = window.input_ids.to(device)
    window = window._replace(input_ids=ids)
    prefix = prefill(model, ids[: settings.prefix], tokenizer)
    clock.add("prefill", prefix.seconds)
    known = audited(model, tokenizer, prefix)
    following = ids[settings.prefix + 1 :]
    full = read_on(prefix, ids[settings.prefix : -1], settings.every)
    clock.add("full", full.seconds)
    predicted = clock.time("statistics", full_predictions, full.logits, following)
    readings = clock.time("statistics", lambda: [read_full(*x) for x in zip(prefix.layers, full.layers, strict=True)])
    step(f"{window.name}: read")
    results: dict[Method, MethodResult] = {}
    for name, compressor in methods.items():
        for keep in keeps:
            made = compress_prefix(prefix, compressor, keep)
            results[Method(name, keep)] = _measure(
                known, prefix, full, predicted, readings, made, window, settings, clock
            )
            step(f"{window.name}: {name} at {keep:g}")
    attention = torch.stack([reading.attention.mean(0) for reading in readings]).mean(0) / len(full.layers[0].at)
    strings = tuple(token_strings(tokenizer, ids.tolist()))
    about = window.document, window.name, window.kind, ids.cpu(), strings
    result = WindowResult(*about, predicted.nll.cpu(), attention.cpu(), results, {}, clock.spent)
    if settings.retrieval:
        result = _ask(known, window, methods, keeps, settings, result, step)
    return result


def _measure(
    known: Audited,
    prefix: Prefix,
    full: FullPass,
    predicted: FullPredictions,
    readings: list[FullReading],
    made: Compressed,
    window: TextWindow,
    settings: WindowSettings,
    clock: Clock,
) -> MethodResult:
    ids = window.input_ids[settings.prefix : -1]
    logits, seconds = logits_after(prefix, made.cache(prefix), ids)
    clock.add("compressed", seconds)
    start = time.perf_counter()
    tokens = _on_cpu(token_errors(predicted, logits))
    heads = [
        head_errors(layer, entries, reading, known.outputs[layer.name], asked.stream)
        for layer, entries, reading, asked in zip(prefix.layers, made.layers, readings, full.layers, strict=True)
    ]
    lost = [
        lost_attention(layer, entries, reading.attention)
        for layer, entries, reading in zip(prefix.layers, made.layers, readings, strict=True)
    ]
    held = [held_tokens(layer, e).double().mean(0) for layer, e in zip(prefix.layers, made.layers, strict=True)]
    stacked = HeadErrors(**{f.name: torch.stack([getattr(h, f.name) for h in heads]).cpu() for f in fields(HeadErrors)})
    per_query = len(full.layers[0].at) * len(prefix.layers[0].queries)
    result = MethodResult(
        stacked,
        tokens,
        torch.stack(held).mean(0).cpu(),
        torch.stack(lost).mean(0).cpu() / per_query,
        made.held,
        made.full,
        made.seconds,
        {},
        _worst(prefix, full, logits, made, tokens, known.tokenizer),
    )
    clock.add("statistics", time.perf_counter() - start)
    return result


def _on_cpu(errors: TokenErrors) -> TokenErrors:
    """Where results are stored."""
    return TokenErrors(**{f.name: getattr(errors, f.name).cpu() for f in fields(TokenErrors)})


def _worst(
    prefix: Prefix,
    full: FullPass,
    logits: Tensor,
    made: Compressed,
    tokens: TokenErrors,
    tokenizer: Any,
) -> tuple[WorstToken, ...]:
    found = []
    for token in tokens.kl.topk(min(WORST, len(tokens.kl))).indices.tolist():
        before, after = _likely(full.logits[token], tokenizer), _likely(logits[token], tokenizer)
        looked = _looked_at(prefix, full, made, token)
        found.append(WorstToken(len(prefix) + token, float(tokens.kl[token]), before, after, looked))
    return tuple(found)


def _likely(logits: Tensor, tokenizer: Any) -> tuple[Prediction, ...]:
    top = logits.double().softmax(-1).topk(LIKELY)
    strings = [token_strings(tokenizer, [token])[0] for token in top.indices.tolist()]
    return tuple(zip(strings, top.values.tolist(), strict=True))


def _looked_at(prefix: Prefix, full: FullPass, made: Compressed, token: int) -> tuple[Look, ...]:
    """Positions of the prefix that this token looked at with the full cache where its head does not hold them, with the
    attention of all heads together that they had."""
    total = torch.zeros(len(prefix), dtype=torch.float64)
    for layer, asked, queries, entries in zip(prefix.layers, full.layers, full.all, made.layers, strict=True):
        query = queries[:, token].unflatten(0, (-1, layer.groups))  # (key heads, group, d)
        keys = torch.cat([layer.keys, asked.keys[:, : token + 1]], 1)
        scores = query @ keys.mT
        if layer.sinks is not None:
            sink = layer.sinks.to(scores).view(len(keys), -1, 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., : len(prefix)]
        total += (weights.sum(1) * ~held_tokens(layer, entries)).sum(0).double().cpu()
    top = total.topk(min(LOST, len(total)))
    heads = sum(len(layer.queries) for layer in prefix.layers)
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return tuple((position, paid / heads) for position, paid in pairs if paid > 0)


def _ask(
    known: Audited,
    window: TextWindow,
    methods: Mapping[str, Compressor],
    keeps: Sequence[float],
    settings: WindowSettings,
    result: WindowResult,
    step: Callable[[str], None],
) -> WindowResult:
    """The same with the questions answered."""
    text = retrieval_prefix(known.tokenizer, window.filler, settings.prefix, window.document)
    device = next(known.model.parameters()).device
    questions = {task: tuple(t.to(device) for t in asked) for task, asked in text.questions.items()}
    text = text._replace(input_ids=text.input_ids.to(device), questions=questions)
    prefix = prefill(known.model, text.input_ids, known.tokenizer)
    answers: Answers = {}
    for task, (ids, answer) in text.questions.items():
        logits = known.model(input_ids=ids[None], past_key_values=prefix.copy_cache(), use_cache=True).logits[0]
        answers[task] = right_answers(logits, ids, answer)
    results = dict(result.methods)
    for name, compressor in methods.items():
        for keep in keeps:
            found = _answers(prefix, text, compress_prefix(prefix, compressor, keep))
            results[Method(name, keep)] = results[Method(name, keep)]._replace(answers=found)
            step(f"{window.name}: {name} at {keep:g}, questions")
    return result._replace(methods=results, answers=answers)


def _answers(prefix: Prefix, text: RetrievalPrefix, made: Compressed) -> Answers:
    cache = made.cache(prefix)
    return {
        task: right_answers(logits_after(prefix, cache, ids)[0], ids, answer)
        for task, (ids, answer) in text.questions.items()
    }
