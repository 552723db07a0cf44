"""`audit`: how wrong a compressed cache is, and where, for any compressor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cumulant.cache.audit.record import (
    WINDOWS,
    AuditRecord,
    AuditSettings,
    load_settings,
    save_settings,
    window_path,
)
from cumulant.cache.audit.result import WindowResult
from cumulant.cache.audit.texts import CHARACTERS, AuditText, TextWindow, default_documents, windows
from cumulant.cache.audit.window import WindowSettings, measure_window
from cumulant.cache.budget import require_keep
from cumulant.cache.compressor import Compressor, as_compressor
from cumulant.cache.measure_cache import MeasureCache
from cumulant.cache.prefix import on_cumulant, require_decoder
from cumulant.checks import require_integer, sentence
from cumulant.files import versions
from cumulant.observatory.models.load import Loaded, load

PREFIX, CONTINUATION, DOCUMENTS, EVERY = 1024, 512, 8, 16
Step = Callable[[int, int, str], None]


def audit(
    model: str | Loaded | nn.Module,
    texts: Iterable[str | AuditText] | None = None,
    compressor: object = "h2o",
    *,
    keep: float | Sequence[float] = 0.25,
    tokenizer: Any = None,
    prefix: int = PREFIX,
    continuation: int = CONTINUATION,
    documents: int = DOCUMENTS,
    every: int = EVERY,
    retrieval: bool = True,
    directory: str | Path | None = None,
    progress: Step | None = None,
) -> AuditRecord:
    """Measure what a compressor does to the cache of a decoder: per head, per token, and to what can be looked up.

        ΔG = Ĝ(η) − G(η),    |ô − o|,    |W_O (ô − o)|,    KL(p ‖ p̂)      Ĝ, ô, p̂ with the compressed cache

    Of every document the first ``prefix`` tokens are read and compressed; the tokens after them are read twice, with
    the full cache and with the compressed one. Heads are compared on the queries of the first of these passes, exactly,
    in float64; predictions with the predictions.

    model         a name that `cumulant.observatory.load` knows, what it returned, or a decoder of transformers
    texts         one string or `AuditText` for each document; None: four kinds that a Python installation has
    compressor    a `Compressor`, the name of a baseline, a press, a function of one layer (`as_compressor`), a list of
                  them, or a dictionary by name: all are compared on the same windows
    keep          bytes held over bytes of the full cache, all layers together; or several
    tokenizer     where the model comes without one
    every         one token in so many has the queries of all heads measured; predictions are those of every token
    retrieval     ask for facts that are hidden in the text, too
    directory     where the record is written, window by window; an audit that was stopped goes on from there
    progress      called with steps done, steps in all and what has been done

    >>> import transformers
    >>> from cumulant.cache.audit import audit
    >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=4, **sizes)).eval()
    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> words = Tokenizer(models.WordLevel({"to": 0, "be": 1, "or": 2, "not": 3}, "or"))
    >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    >>> options = {"tokenizer": tokenizer, "prefix": 8, "continuation": 3, "retrieval": False}
    >>> found = audit(model, [4 * "to be or not "], "stream", keep=1.0, **options)
    >>> row = found.rows()[0]                                                             # the whole cache is held
    >>> abs(row.kl.value) < 1e-6, row.agreement.value, found.heads(row.method)[0].missed < 1e-6
    (True, 1.0, True)
    """
    loaded = _loaded(model, tokenizer)
    methods = compressors(compressor)
    keeps = tuple(require_keep("audit.keep", k) for k in (keep if isinstance(keep, Sequence) else [keep]))
    require_integer("audit.prefix", prefix, 2)
    require_integer("audit.continuation", continuation, 1)
    require_integer("audit.documents", documents, 1)
    require_integer("audit.every", every, 1)
    limit = getattr(loaded.model.config, "max_position_embeddings", None)
    if isinstance(limit, int) and prefix + continuation > limit:
        advice = "Positions beyond were never trained; take shorter ones."
        got = f"{prefix} + {continuation}"
        raise ValueError(sentence("audit.prefix + continuation", f"at most {limit} tokens", got, advice))
    read = _documents(texts, prefix + continuation + 1, documents)
    chosen = windows(read, loaded.tokenizer, prefix, continuation, documents)
    settings = AuditSettings(
        *(loaded.name, loaded.fingerprint, tuple(methods), keeps, prefix, continuation, every, retrieval),
        versions("torch", "transformers"),
        loaded.notes,
    )
    results = _run(loaded, chosen, methods, settings, None if directory is None else Path(directory), progress)
    return AuditRecord(settings, tuple(results))


def compressors(compressor: object) -> dict[str, Compressor]:
    """Compressors by name, each name once.

    >>> list(compressors(["h2o", "snapkv"]))
    ['h2o', 'snapkv']
    """
    if isinstance(compressor, Mapping):
        named = {str(name): as_compressor(c) for name, c in compressor.items()}
    else:
        several = compressor if isinstance(compressor, list | tuple) else [compressor]
        found = [as_compressor(c) for c in several]
        named = {c.name: c for c in found}
        if len(named) < len(found):
            advice = "Pass a dictionary, with a name for each."
            raise ValueError(sentence("audit.compressor", "different names", [c.name for c in found], advice))
    if not named:
        raise ValueError(sentence("audit.compressor", "at least one compressor", "none", 'Try "h2o".'))
    return named


def _loaded(model: str | Loaded | nn.Module, tokenizer: Any) -> Loaded:
    loaded = load(model) if isinstance(model, str | Path) else model
    if isinstance(loaded, nn.Module):
        name = getattr(getattr(loaded, "config", None), "name_or_path", "") or type(loaded).__name__
        loaded = Loaded(loaded, tokenizer, name, "", "")
    if not isinstance(loaded, Loaded):
        expected, advice = "a model of transformers or its name", 'Try "smollm2".'
        raise TypeError(sentence("audit.model", expected, type(model).__name__, advice))
    MeasureCache(require_decoder(loaded.model))  # refuses what cannot be compressed before anything is read
    if tokenizer is None and loaded.tokenizer is None:
        raise ValueError(sentence("audit.tokenizer", "a tokenizer", "None", "Pass that of the model."))
    return loaded if tokenizer is None else Loaded(loaded.model, tokenizer, *vars_of(loaded))


def vars_of(loaded: Loaded) -> tuple[str, str, str]:
    """Name, source and fingerprint."""
    return loaded.name, loaded.source, loaded.fingerprint


def _documents(texts: Iterable[str | AuditText] | None, needed: int, number: int) -> list[AuditText]:
    if texts is None:
        return default_documents(CHARACTERS * needed, number)
    if isinstance(texts, str):
        texts = [texts]
    return [
        text if isinstance(text, AuditText) else AuditText(f"text {i}", "text", text) for i, text in enumerate(texts)
    ]


def _run(
    loaded: Loaded,
    chosen: Sequence[TextWindow],
    methods: Mapping[str, Compressor],
    settings: AuditSettings,
    directory: Path | None,
    progress: Step | None,
) -> list[WindowResult]:
    if directory is not None:
        _begin(directory, settings)
    each = 1 + len(methods) * len(settings.keeps) * (1 + settings.retrieval)
    total, results = each * len(chosen), []
    of_window = WindowSettings(settings.prefix, settings.continuation, settings.every, settings.retrieval)
    with on_cumulant(loaded.model):
        for number, window in enumerate(chosen):
            path = None if directory is None else window_path(directory, window.document)
            result = None if path is None else _finished(path, window)
            if result is None:
                done = iter(range(number * each + 1, (number + 1) * each + 1))

                def step(words: str, done=done) -> None:
                    if progress is not None:
                        progress(next(done), total, words)

                arguments = (loaded.model, loaded.tokenizer, window, methods, settings.keeps, of_window, step)
                result = measure_window(*arguments)
                if path is not None:
                    result.save(path)
            elif progress is not None:
                progress((number + 1) * each, total, f"{window.name}: was measured before")
            results.append(result)
    return results


def _begin(directory: Path, settings: AuditSettings) -> None:
    """Claim a directory, or go on with the audit that is in it."""
    before = load_settings(directory)
    if before is not None:
        difference = before.difference(settings)
        if difference is not None:
            advice = "Give another directory, or delete this one."
            raise ValueError(sentence(str(directory), "the same audit", f"one with {difference}", advice))
        return
    if directory.exists() and any(directory.iterdir()):
        advice = "Give an empty directory."
        raise ValueError(sentence(str(directory), "an empty directory or an audit", "other files", advice))
    (directory / WINDOWS).mkdir(parents=True, exist_ok=True)
    save_settings(settings, directory)


def _finished(path: Path, window: TextWindow) -> WindowResult | None:
    if not path.is_file():
        return None
    result = WindowResult.load(path)
    if not torch.equal(result.input_ids, window.input_ids):
        advice = "The texts have changed; give another directory, or delete this one."
        raise ValueError(sentence(str(path), f"the window of {window.name}", f"another, of {result.name}", advice))
    return result
