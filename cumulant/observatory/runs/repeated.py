"""The usual test for induction: random tokens, each sequence twice in a row.

Whoever reads the second half can only know what comes next from the first, by looking at the token that followed the
same token there: one key, a sequence length before, for every query. No text has that much repetition, and none of it
can be had by knowing language.
"""

from __future__ import annotations

import inspect
from dataclasses import replace

import torch
from torch import Tensor, nn

from cumulant.checks import require_integer, sentence
from cumulant.nn.wrappers import is_transformers
from cumulant.observatory.hooks.structure import unwrapped
from cumulant.observatory.record.record import Record
from cumulant.observatory.record.recorder import attach

LENGTH, SEQUENCES = 48, 8
PROBE = "repeated_induction"  # its name among the numbers of a head


def repeated_tokens(
    vocabulary: int, *, length: int = LENGTH, sequences: int = SEQUENCES, seed: int = 0, excluded: tuple[int, ...] = ()
) -> Tensor:
    """(sequences, 2 · length) ids: different random tokens, then the same again.

    excluded  ids that are not drawn, such as special tokens

    >>> repeated_tokens(9, length=3, sequences=1, excluded=(0,)).view(2, 3).diff(dim=0).tolist()
    [[0, 0, 0]]
    """
    kept = torch.tensor([i for i in range(vocabulary) if i not in {*excluded}])
    require_integer("repeated_tokens.length", length, 1, len(kept))
    generator = torch.Generator().manual_seed(seed)
    rows = [kept[torch.randperm(len(kept), generator=generator)[:length]] for _ in range(sequences)]
    return torch.stack(rows).repeat(1, 2)


@torch.inference_mode()
def repeated_induction(
    model: nn.Module, *, length: int = LENGTH, sequences: int = SEQUENCES, seed: int = 0, excluded: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    """Attention module → (heads,) mean of pᵢ,ᵢ₋ₗ₊₁ over the second copy of random tokens of length L that repeat.

    model     a causal model that takes input_ids
    excluded  ids that are not drawn, such as special tokens

    >>> from transformers import LlamaConfig, LlamaModel
    >>> sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> model = LlamaModel(LlamaConfig(**sizes, intermediate_size=8)).eval()
    >>> for parameter in model.parameters():
    ...     _ = torch.nn.init.zeros_(parameter)
    >>> repeated_induction(model, length=8)               # all keys look alike: 1/9 … 1/16 over the second copy
    {'layers.0.self_attn': tensor([0.0829, 0.0829], dtype=torch.float64)}
    """
    model = unwrapped(model)
    vocabulary = _vocabulary(model)
    if vocabulary is None:
        got, advice = type(model).__name__, "Build ids of your own, and read induction_mass under attach."
        raise ValueError(sentence("repeated_induction.model", "a model that reads token ids", got, advice))
    length = min(length, vocabulary - len(excluded))
    ids = repeated_tokens(vocabulary, length=length, sequences=sequences, seed=seed, excluded=excluded)
    device = next(model.parameters()).device
    with attach(model, "induction_mass", hidden_states=False) as recorder:
        model(input_ids=ids.to(device))
    tallies = recorder.record(weights=False).tallies
    return {name.rpartition("/")[0]: tally.mean for name, tally in tallies.items()}


def with_probe(record: Record, model: nn.Module, excluded: tuple[int, ...] = ()) -> Record:
    """The record with `repeated_induction` of every head, or with the reason why it is not defined."""
    length = probe_length(model, excluded)
    reason = _undefined(record, model, length)
    if reason is not None:
        undefined = record.meta.undefined | {PROBE: reason}
        return replace(record, meta=replace(record.meta, undefined=undefined))
    numbers = repeated_induction(model, length=length, excluded=excluded)
    return replace(record, weights=record.weights | {f"{name}/{PROBE}": mean for name, mean in numbers.items()})


def _undefined(record: Record, model: nn.Module, length: int) -> str | None:
    """Why a model cannot be tested on tokens that repeat; None: it can."""
    if getattr(getattr(unwrapped(model), "config", None), "is_encoder_decoder", False):
        return "the model reads two sequences: tokens that repeat in one can be looked up in the other"
    if _vocabulary(model) is None:
        return "the model reads no token ids"
    if any(f"{layer.name}/next_mass" in record.tallies for layer in record.modules):
        return "the model sees the token that follows: there is nothing to look up"
    if not any(key.endswith("/induction_mass") for key in record.tallies):
        return "induction_mass was not observed, or no token of the text occurs twice"
    return "its positions or its vocabulary are too few for a sequence that repeats" if length < 2 else None


def probe_length(model: nn.Module, excluded: tuple[int, ...] = (), longest: int = LENGTH) -> int:
    """How long a sequence can be of which a model reads two in a row; 0 for a model that reads no ids."""
    config, vocabulary = getattr(unwrapped(model), "config", None), _vocabulary(model)
    limits = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "context"))
    limit = next((limit for limit in limits if limit), 2 * longest)
    return 0 if vocabulary is None else max(0, min(longest, int(limit) // 2, vocabulary - len(excluded)))


def _vocabulary(model: nn.Module) -> int | None:
    """How many tokens a model knows; None if it reads no ids."""
    model = unwrapped(model)
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    if not is_transformers(model) and "input_ids" in inspect.signature(model.forward).parameters:
        embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    return embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None
