"""MiniLM reading a text: alone, on our attention, with a recorder attached, and with its attention weights written out.

Each method has a model of its own, so that hooks of one do not slow another. Compared are the model's output, and the
mean entropy of every head where a method has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Prepare, Run, Unavailable, ours, peer
from benchmarks.inputs import TextWindows

MODEL = "minilm"


def plain(x: TextWindows) -> Run:
    """The model as it is."""
    model, inputs = _model(x)
    return lambda: {"output": _read(model, inputs).last_hidden_state}


def attached(quantities: str | Sequence[str] | None = None, *, hidden_states: bool = True) -> Prepare:
    """The model with `attach`; the recorder is there before and after, as in a long run.

    The first pass, and one in 32 after it, also calls every block a second time to see a perturbation grow. The harness
    has run a method three times before it takes a time, so times are those of the other 31 passes; what the one adds,
    spread over 32, is about 3 % of a plain pass. Memory is that of the first pass, so of the costliest.
    """

    def prepare(x: TextWindows) -> Run:
        attach = ours("cumulant.observatory", "attach")
        model, inputs = _model(x)
        attached_hooks = ExitStack()  # as long as `run` lives
        recorder = attached_hooks.enter_context(attach(model, quantities, hidden_states=hidden_states))

        def run(_: ExitStack = attached_hooks):
            output = _read(model, inputs).last_hidden_state
            entropy = [part.tallies["entropy"].mean for part in recorder.parts.values()]  # every pass reads the same
            return {"output": output, "entropy": torch.stack(entropy)}

        return run

    return prepare


def observed(model: str, without: Sequence[str] = ()) -> Prepare:
    """A model reads as many tokens with `observe`; ``without`` names groups of quantities to leave out."""

    def prepare(x: TextWindows) -> Run:
        observe, read = ours("cumulant.observatory", "observe"), ours("cumulant.observatory", "read_texts")
        defined: Any = ours("cumulant.observatory.statistics.quantities", "QUANTITIES")
        loaded = _loaded(model)
        limits = {"max_tokens": x.sequences * x.length, "max_length": x.length}
        names = [quantity.name for quantity in defined if quantity.group not in without]

        def run():
            record = observe(loaded, read(), quantities=names, weights=False, **limits)
            return {"entropy": torch.stack([record.tallies[f"{m.name}/entropy"].mean for m in record.modules])}

        return run

    return prepare


def own_attention(x: TextWindows) -> Run:
    """The model on attn_implementation="cumulant", with G and entropy of every head on a callback."""
    on_attention = ours("cumulant.transformers", "on_attention")
    model, inputs = _model(x)
    model.set_attn_implementation("cumulant")
    means: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(call: Any) -> None:
        m = call.moments
        means[call.name] = m.log_normalizer.mean((0, 2)), m.entropy.mean((0, 2))

    observed = ExitStack()  # as long as `run` lives
    observed.enter_context(on_attention(model, keep))

    def run(_: ExitStack = observed):
        output = _read(model, inputs).last_hidden_state
        g, entropy = (torch.stack(part) for part in zip(*means.values(), strict=True))
        return {"output": output, "log_normalizer": g, "entropy": entropy}

    return run


def weights(x: TextWindows) -> Run:
    """Plain attention that returns its weights, and their entropy."""
    model, inputs = _model(x)
    model.set_attn_implementation("eager")

    def run():
        out = _read(model, inputs, output_attentions=True)
        return {"output": out.last_hidden_state, "entropy": _entropy(out.attentions)}

    return run


def nnsight(x: TextWindows) -> Run:
    """The same weights, saved by nnsight where each layer returns them."""
    package = peer("nnsight")
    model, inputs = _model(x)
    model.set_attn_implementation("eager")
    traced = package.NNsight(model)
    layers = range(model.config.num_hidden_layers)

    def run():
        with torch.inference_mode(), traced.trace(**inputs):
            weights = [traced.encoder.layer[i].attention.self.output[1].save() for i in layers]
            output = traced.output.last_hidden_state.save()
        return {"output": output, "entropy": _entropy(weights)}

    return run


def transformer_lens(x: TextWindows) -> Run:
    """TransformerLens, once it reads encoders without a head."""
    peer("transformer_lens")
    raise Unavailable("reads BERT only with the head of a language model, which MiniLM does not have")


def _model(x: TextWindows) -> tuple[Any, dict[str, Tensor]]:
    """MiniLM and the text as it takes it: (sequences, length) tokens of Python's help, no padding."""
    read, loaded = ours("cumulant.observatory", "read_texts"), _loaded(MODEL)
    tokenizer, wanted, ids = loaded.tokenizer, x.sequences * x.length, []
    for text in read():
        ids += tokenizer(text.body, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= wanted:
            break
    tokens = torch.tensor(ids[:wanted]).reshape(x.sequences, x.length)
    tokens[:, 0], tokens[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
    return loaded.model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def _loaded(name: str) -> Any:
    try:
        return ours("cumulant.observatory", "load")(name)
    except (ModuleNotFoundError, ValueError) as missing:
        raise Unavailable(str(missing)) from None


def _read(model: Any, inputs: dict[str, Tensor], **options: bool) -> Any:
    with torch.inference_mode():
        return model(**inputs, **options)


def _entropy(attentions: Sequence[Tensor]) -> Tensor:
    """Mean over tokens, (layers, heads)."""
    return torch.stack([torch.special.entr(p).sum(-1).mean((0, 2)) for p in attentions])
