"""A model with some of its heads replaced: what can stand in their place, and passes that compute only what changes.

removed   0
uniform   the mean of the values that a query sees
gaussian  v̄ + Cov(v, k) η                          one Gaussian in the place of the keys (S1-C1)
mixture   a few Gaussians (S1-P2′)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cumulant.checks import sentence
from cumulant.kernels.arguments import intersect
from cumulant.kernels.operator import moments
from cumulant.nn.calls import AttentionCall, Observer
from cumulant.nn.closures import DifferentKeysError, approximate_by_gaussian, approximate_by_mixture
from cumulant.observatory.hooks.attention import observe_attention, replace_attention, unrecordable
from cumulant.observatory.hooks.structure import block_of
from cumulant.observatory.models.load import CAUSAL, Loaded, reads_speech
from cumulant.observatory.text.windows import Batch

HeadOutput = Callable[[AttentionCall], Tensor | None]

# ---------------------------------------------------------------------- in the place of a head


def removed_output(call: AttentionCall) -> Tensor:
    """Zero: the head adds nothing to the stream, (batch, heads, q, e)."""
    return torch.zeros_like(call.output)


def uniform_output(call: AttentionCall) -> Tensor:
    """The mean of the values that each query sees, all alike, (batch, heads, q, e).

    Biases of positions are dropped, but for those that hide a key; a learned sink, which is no key, gets nothing.

    >>> from cumulant.nn import Support
    >>> x = torch.tensor([[[[1.0], [2.0], [6.0]]]])
    >>> uniform_output(AttentionCall(nn.Identity(), x, x, x, Support(causal=True), x)).flatten().tolist()
    [1.0, 1.5, 3.0]
    """
    weights = call.support.pair_weights(call.eta.shape[1])
    support = replace(call.support, sink=None, log_weights=None)
    if weights is not None:
        support = replace(support, mask=intersect(support.pair_mask(), weights > -torch.inf))
    found = moments(torch.zeros_like(call.eta), call.key, call.value, statistics=("mean",), **support.arguments())
    assert found.mean is not None
    return found.mean


def gaussian_output(call: AttentionCall) -> Tensor:
    """Output of every head if the visible keys are replaced by one Gaussian, (batch, heads, q, e).  S1-C1"""
    _require_linear("gaussian_output", call)
    return approximate_by_gaussian(call.eta, call.key, call.value, **call.support.arguments())


def mixture_output(call: AttentionCall, components: int, seed: int = 0) -> Tensor | None:
    """Output of every head if its keys are replaced by a few Gaussians, from k-means on them.  S1-P2′

    components  how many at most; 1 is `gaussian_output`
    seed        of the first centres; they do not depend on the other sequences of the batch

    None if the queries do not all see the same keys: each would need clusters of its own.
    """
    if components < 1:
        raise ValueError(sentence("mixture_output.components", "at least 1", components, "Use 1 for one Gaussian."))
    _require_linear("mixture_output", call)
    try:
        return approximate_by_mixture(
            call.eta, call.key, call.value, components=components, seed=seed, **call.support.arguments()
        )
    except DifferentKeysError:
        return None


def _require_linear(where: str, call: AttentionCall) -> None:
    if call.capped:
        advice = "A Gaussian approximates exponential families in the query only."
        raise ValueError(sentence(f"{where}({call.name})", "scores linear in the query", "capped ones", advice))


def heads_of(call: AttentionCall, heads: list[int]) -> AttentionCall:
    """The call restricted to these heads, each with keys of its own."""
    group = call.eta.shape[1] // call.key.shape[1]
    shared = [head // group for head in heads]
    return replace(
        call,
        eta=call.eta[:, heads],
        key=call.key[:, shared],
        value=call.value[:, shared],
        output=call.output[:, heads],
        support=call.support.of_heads(heads),
    )


# ---------------------------------------------------------------------- passes of the model


class ReplacingPasses:
    """Passes of a model, untouched or with heads replaced.

    where    begins the sentence if the model is refused
    speech   a model that writes what it hears is none of these: its loss is that of the transcript
    measure  "loss" of a decoder with its language-model head and of a transcript, "embedding" of any other model

    ``first`` is the first token of a window whose loss counts: logits before it are not computed where a model can
    leave them out.
    """

    def __init__(self, loaded: Loaded, where: str, speech: bool = False):
        self.network: Any = loaded.model
        self.where = where
        config = self.network.config
        kind = type(self.network).__name__
        hears = speech and reads_speech(self.network)
        if getattr(config, "is_encoder_decoder", False) and not hears:
            advice = "There is no one number yet for the damage to an encoder–decoder of text."
            raise ValueError(sentence(f"{where}.model", "an encoder or a decoder", kind, advice))
        if loaded.tokenizer is None and not hears:
            advice = "Load a model with a tokenizer beside it."
            raise ValueError(sentence(f"{where}.model", "a model with its tokenizer", None, advice))
        self.measure = "loss" if hears or kind.endswith(CAUSAL) else "embedding"
        self.options = {"use_cache": False} if getattr(config, "use_cache", False) else {}
        self.device = next(self.network.parameters()).device
        self.keeps = self.measure == "loss" and "logits_to_keep" in inspect.signature(self.network.forward).parameters

    def run(self, batch: Batch, first: int = 1) -> Tensor:
        """Logits (batch, n, vocabulary), or embeddings (batch, D): means of the last hidden state over tokens."""
        kept = {"logits_to_keep": batch.input_ids.shape[1] - first + 1} if self.keeps and first > 1 else {}
        with torch.inference_mode():
            out = self.network(**batch.inputs(self.device), **self.options, **kept)
            if self.measure == "loss":
                return out.logits
            state = getattr(out, "last_hidden_state", None)
            if state is None:
                got, advice = type(self.network).__name__, "Load it without the head on top."
                raise ValueError(
                    sentence(f"{self.where}.model", "a language model or a last hidden state", got, advice)
                )
            mask = batch.attention_mask.to(self.device)[..., None]
            return (state.float() * mask).sum(1) / mask.sum(1)

    def plain(self, batch: Batch, observer: Observer, first: int = 1) -> tuple[Tensor, dict[str, Any]]:
        """Output of the untouched model, and of those blocks that `altered` need not compute again."""
        names: list[str] = []

        def observe(call: AttentionCall) -> None:
            names.append(call.name)
            observer(call)

        with observe_attention(self.network, observe), _block_outputs(self.network) as outputs:
            result = self.run(batch, first)
        if not names:
            raise ValueError(unrecordable(self.network))
        blocks = [block_of(self.network, name) for name in names]
        again = len(set(names)) < len(names) or None in blocks
        return result, {} if again else {b: outputs[b] for b in dict.fromkeys(blocks) if b is not None}

    def altered(
        self,
        batch: Batch,
        heads: dict[str, list[int]],
        output: HeadOutput,
        blocks: dict[str, Any],
        observer: Observer | None = None,
        first: int = 1,
    ) -> Tensor:
        """Output of the model with heads replaced; blocks before the first of them return what they returned before.

        heads     attention module → heads
        output    what stands in their place; None leaves them as they are
        blocks    what `plain` returned of the same batch, or {}
        observer  gets the calls of all blocks that are computed
        """

        def change(call: AttentionCall) -> Tensor | None:
            if observer is not None:
                observer(call)
            replaced = heads.get(call.name)
            new = output(heads_of(call, replaced)) if replaced else None
            if new is None:
                return None
            out = call.output.clone()
            out[:, replaced] = new.to(out.dtype)
            return out

        changed = {block_of(self.network, name) for name in heads}
        with replace_attention(self.network, change), _skipping_blocks_before(self.network, changed, blocks):
            return self.run(batch, first)

    def window_scores(self, batch: Batch, plain: Tensor, altered: Tensor, first: int = 1) -> Tensor:
        """(windows, 2) sum and count: the loss over tokens from the ``first`` on, or 1 − cosine of the embeddings."""
        if self.measure == "embedding":
            away = 1 - functional.cosine_similarity(plain.double(), altered.double(), -1)
            return torch.stack([away.cpu(), torch.ones_like(away, device="cpu")], 1)
        rows = []
        for ids, mask, logits in zip(batch.input_ids, batch.attention_mask, altered, strict=True):
            length, missing = int(mask.sum()), len(ids) - len(logits)  # padding is on the right
            target = ids[first:length].to(logits.device)
            mine = logits[first - 1 - missing : length - 1 - missing].float()
            loss = functional.cross_entropy(mine, target, reduction="sum")
            rows.append([float(loss), float(len(target))])
        return torch.tensor(rows, dtype=torch.float64)


def by_module(cells: list[tuple[str, int]]) -> dict[str, list[int]]:
    """(attention module, head) → attention module → its heads.

    >>> by_module([("a", 0), ("b", 1), ("a", 2)])
    {'a': [0, 2], 'b': [1]}
    """
    heads: dict[str, list[int]] = {}
    for name, head in cells:
        heads.setdefault(name, []).append(head)
    return heads


@contextmanager
def _block_outputs(network: nn.Module) -> Iterator[dict[str, Any]]:
    """What every module that is an element of a list returned, by its path."""
    outputs: dict[str, Any] = {}
    with ExitStack() as stack:
        for name, module in network.named_modules():
            if isinstance(network.get_submodule(name.rpartition(".")[0]), nn.ModuleList):

                def keep(module, args, out, name=name):
                    outputs[name] = out

                stack.callback(module.register_forward_hook(keep).remove)
        yield outputs


@contextmanager
def _skipping_blocks_before(network: nn.Module, first: set[str | None], outputs: dict[str, Any]) -> Iterator[None]:
    """Blocks that come before the first of these, in the order of ``outputs``, return what they returned."""
    earlier: list[str] = []
    for block in outputs:
        if block in first:
            break
        earlier.append(block)
    modules = {name: network.get_submodule(name) for name in earlier}
    before: dict[str, Any] = {name: vars(module).get("forward") for name, module in modules.items()}
    try:
        for name, module in modules.items():
            module.forward = lambda *args, out=outputs[name], **kwargs: out
        yield
    finally:
        for name, module in modules.items():
            if before[name] is None:
                vars(module).pop("forward", None)
            else:
                module.forward = before[name]
