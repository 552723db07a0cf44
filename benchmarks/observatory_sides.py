"""MiniLM reading a text: alone, with a recorder attached, and with its attention weights written out.

Each side has a model of its own, so that what is attached to one does not slow another. The result that is compared is
the model's output, and the mean entropy of every head where a side has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Prepare, Run, Unavailable, ours, peer
from benchmarks.inputs import Reading

MODEL = "minilm"


def plain(x: Reading) -> Run:
    """The model as it is."""
    model, given = _model(x)
    return lambda: {"output": _read(model, given).last_hidden_state}


def attached(quantities: str | Sequence[str] | None = None, *, hidden_states: bool = True) -> Prepare:
    """The model with `attach`; the recorder is there before and after, as in a long run.

    The first pass, and one in 32 after it, also calls every block a second time to see a perturbation grow. The harness
    has run a side three times before it takes a time, so times are those of the other 31 passes; what the one adds,
    spread over 32, is about 3 % of a plain pass. Memory is that of the first pass, so of the costliest.
    """

    def prepare(x: Reading) -> Run:
        attach = ours("cumulant.observatory.record.recorder", "attach")
        model, given = _model(x)
        held = ExitStack()  # as long as `run` lives
        recorder = held.enter_context(attach(model, quantities, hidden_states=hidden_states))

        def run(held: ExitStack = held):
            output = _read(model, given).last_hidden_state
            entropy = [part.tallies["entropy"].mean for part in recorder.parts.values()]  # every pass reads the same
            return {"output": output, "entropy": torch.stack(entropy)}

        return run

    return prepare


def weights(x: Reading) -> Run:
    """Plain attention that returns its weights, and their entropy."""
    model, given = _model(x)
    model.set_attn_implementation("eager")

    def run():
        out = _read(model, given, output_attentions=True)
        return {"output": out.last_hidden_state, "entropy": _entropy(out.attentions)}

    return run


def nnsight(x: Reading) -> Run:
    """The same weights, saved by nnsight where each layer returns them."""
    package = peer("nnsight")
    model, given = _model(x)
    model.set_attn_implementation("eager")
    traced = package.NNsight(model)
    layers = range(model.config.num_hidden_layers)

    def run():
        with torch.inference_mode(), traced.trace(**given):
            found = [traced.encoder.layer[i].attention.self.output[1].save() for i in layers]
            output = traced.output.last_hidden_state.save()
        return {"output": output, "entropy": _entropy(found)}

    return run


def transformer_lens(x: Reading) -> Run:
    """TransformerLens, once it reads encoders without a head."""
    peer("transformer_lens")
    raise Unavailable("reads BERT only with the head of a language model, which MiniLM does not have")


def _model(x: Reading) -> tuple[Any, dict[str, Tensor]]:
    """MiniLM and the text as it takes it: (sequences, length) tokens of Python's help, all places filled."""
    load, read = (
        ours("cumulant.observatory.models.load", "load"),
        ours("cumulant.observatory", "read_texts"),
    )
    try:
        loaded = load(MODEL)
    except (ModuleNotFoundError, ValueError) as missing:
        raise Unavailable(str(missing)) from None
    tokenizer, wanted, ids = loaded.tokenizer, x.sequences * x.length, []
    for text in read():
        ids += tokenizer(text.body, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= wanted:
            break
    tokens = torch.tensor(ids[:wanted]).reshape(x.sequences, x.length)
    tokens[:, 0], tokens[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
    return loaded.model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def _read(model: Any, given: dict[str, Tensor], **options: bool) -> Any:
    with torch.inference_mode():
        return model(**given, **options)


def _entropy(attentions: Sequence[Tensor]) -> Tensor:
    """Mean over tokens, (layers, heads)."""
    return torch.stack([torch.special.entr(p).sum(-1).mean((0, 2)) for p in attentions])
