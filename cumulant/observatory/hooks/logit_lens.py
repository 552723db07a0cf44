"""The logit lens: what a model's own final norm and language head make of its states at every depth.

What a model does after its blocks, final norm, projections, head, softcap or scale of the logits, is not read off its
structure but run: a copy of the model that shares its weights and whose blocks return given states. Whether that is all
that decides the logits is checked against those of the observed pass; where it is not, the lens is not defined.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cumulant.nn.attention_interface import is_cross_attention
from cumulant.nn.wrappers import is_transformers
from cumulant.observatory.hooks.hidden_states import BlockPass, ModelPass
from cumulant.observatory.hooks.structure import attention_modules, input_of, twin
from cumulant.observatory.statistics.logit_lens import LENS, lens_statistics
from cumulant.observatory.statistics.states import PassTokens, Statistic, tally

LENS_TOKENS = 1024  # one token in so many is looked at through the lens
CHECKED_TOKENS = 64  # whose logits must be those of the pass
MAX_LOGITS = 1 << 23  # held at once, unless the layers of one token have more


class GivenState(nn.Module):
    """Stands in the place of a block: returns a given state, or else what it is called with, as the block would.

    block   whose attributes the model around it may read
    length  of the tuple that the block returns; None: a tensor
    """

    def __init__(self, block: nn.Module, length: int | None):
        super().__init__()
        object.__setattr__(self, "original", block)  # no part of the model
        self.length = length
        self.state: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self.state if self.state is not None else input_of(args, kwargs)[0]
        return state if self.length is None else (state, *[None] * (self.length - 1))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["original"], name)


class ModelTail:
    """What a model does after its last block: states (n, D) → logits (n, vocabulary).

    lengths  block → length of the tuple that it returns, None for a tensor; the last block last
    """

    def __init__(self, model: nn.Module, lengths: dict[str, int | None]):
        stand_ins = {path: GivenState(model.get_submodule(path), length) for path, length in lengths.items()}
        self.last = stand_ins[list(lengths)[-1]]
        self.model = twin(model, {model.get_submodule(path): stand_in for path, stand_in in stand_ins.items()})
        self.two_sided = _two_sided(model)
        self.options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}

    def __call__(self, states: Tensor) -> Tensor:
        ids = torch.zeros(len(states), 1, dtype=torch.int64, device=states.device)  # every state a sequence of its own
        self.last.state = states[:, None]
        try:
            logits = logits_of(self.model(**self._inputs(ids, states), **self.options))
        finally:
            self.last.state = None
        if logits is None or logits.shape[:2] != ids.shape:
            raise ValueError("no logits for every state")
        return logits[:, 0]

    def _inputs(self, ids: Tensor, states: Tensor) -> dict[str, Any]:
        if not self.two_sided:
            return {"input_ids": ids}
        from transformers.modeling_outputs import BaseModelOutput

        read = BaseModelOutput(last_hidden_state=torch.zeros_like(states[:, None]))  # pyright: ignore[reportArgumentType]
        return {"decoder_input_ids": ids, "encoder_outputs": read}


class LogitLens:
    """Looks at the states after the embedding and after every block of the stack that the language head reads.

    model  in the passes that it is told of
    add    takes `block/stage/quantity` and a tally
    exact  look at every token, not at one in `LENS_TOKENS`; the states of a pass are then in memory

    undefined  quantity of the lens → why it is not defined for this model
    """

    def __init__(self, model: nn.Module, add: Callable[[str, Statistic], None], *, exact: bool = False):
        self.model, self.add, self.number = model, add, 1 if exact else LENS_TOKENS
        self.undefined = dict.fromkeys(LENS, "no pass with a sampled token has returned the logits of all its tokens")
        self.refused = not _has_head(model)
        if self.refused:
            self._refuse(f"{type(model).__name__} has no language head")
        self.lengths: dict[str, int | None] = {}  # of the running pass: blocks in the order of their calls,
        self.states: dict[str, Tensor] = {}  # cells with the states of the sampled tokens,
        self.tokens: PassTokens | None = None  # and the tokens of the last block
        self.repeated = False
        self.tail: ModelTail | None = None

    def block(self, call: BlockPass) -> None:
        """Keep the states of the sampled tokens."""
        if self.refused:
            return
        index = call.tokens.one_in(self.number)
        first = not any(_stack(block) == _stack(call.block) for block in self.lengths)
        self.repeated |= call.block in self.lengths
        self.lengths[call.block] = None if isinstance(call.output, Tensor) else len(call.output)  # pyright: ignore[reportArgumentType]
        for stage in ("in", "out") if first else ("out",):
            self.states[f"{call.block}/{stage}"] = _rows(call.values[stage], index)
        self.tokens = call.tokens

    def end(self, running: ModelPass, output: object) -> None:
        """The pass has ended: look through the lens at what was kept."""
        lengths, states, tokens, self.lengths, self.states = self.lengths, self.states, self.tokens, {}, {}
        if self.refused or not lengths or tokens is None:
            return
        last = list(lengths)[-1]
        chain = {cell: x for cell, x in states.items() if _stack(cell.rpartition("/")[0]) == _stack(last)}
        index = tokens.one_in(self.number)
        if not len(index[0]) or (self.tail is None and not self._find_tail(lengths, chain, tokens, output)):
            return
        following = self._following(running, last, tokens, index)
        others = sorted({_stack(block) for block in lengths} - {_stack(last)})
        reason = f"in {' and '.join(others)}: the language head reads what {_stack(last)} returns"
        self.undefined = dict.fromkeys(LENS, reason) if others else {}
        self.undefined |= {} if following is not None else {"lens_loss": self._without_next(last)}
        self._look(chain, following, tokens.position[index])

    def _refuse(self, reason: str) -> bool:
        self.refused, self.undefined = True, dict.fromkeys(LENS, reason)
        return False

    def _find_tail(self, lengths: dict[str, int | None], chain, tokens: PassTokens, output: object) -> bool:
        """Whether what follows the blocks is known, from the first pass that returns the logits of all its tokens."""
        logits, name = logits_of(output), type(self.model).__name__
        if self.repeated:
            return self._refuse("a block is called several times in a pass: its depths are mixed")
        if logits is None or logits.shape[-1] not in _vocabularies(self.model):
            return self._refuse(f"{name} returns no logits over its vocabulary")
        if logits.shape[:2] != tokens.rows.shape:
            return False  # of some tokens only: wait for another pass
        last = list(chain.values())[-1]
        expected = _rows(logits, tokens.one_in(self.number))[:CHECKED_TOKENS].double()
        try:
            tail = ModelTail(self.model, lengths)
            found = tail(last[:CHECKED_TOKENS]).double()
        except Exception as error:  # a model that is called with states alone may fail in any way
            return self._refuse(f"its language head could not be called on states alone ({type(error).__name__})")
        size = float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max())
        tolerance = max(1e-3, 8 * torch.finfo(logits.dtype).eps) * (1 + size)
        if not float((found - expected).abs().nan_to_num(0.0).max()) <= tolerance:
            return self._refuse("its logits do not follow from what its last block returns")
        self.tail = tail
        return True

    def _following(
        self, running: ModelPass, last: str, tokens: PassTokens, index: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        """(n,) the tokens after those of ``index``, −1 after the last; None where they are not predicted or known."""
        ids = running.arguments.get("decoder_input_ids" if _two_sided(self.model) else "input_ids")
        if not self._predicts_next(last) or not isinstance(ids, Tensor) or ids.shape != tokens.rows.shape:
            return None
        ids = ids.cpu()
        after = torch.where(tokens.rows[:, 1:], ids[:, 1:], -1)
        return torch.cat([after, torch.full_like(ids[:, :1], -1)], 1)[index]

    def _predicts_next(self, last: str) -> bool:
        block = self.model.get_submodule(last)
        own = [path for path in attention_modules(block) if not is_cross_attention(path)]
        return all(getattr(block.get_submodule(path), "is_causal", True) for path in own)

    def _without_next(self, last: str) -> str:
        if not self._predicts_next(last):
            return "the model sees the tokens that follow: it does not predict the next one"
        return "the ids of the tokens were not given to the model"

    def _look(self, chain: dict[str, Tensor], following: Tensor | None, position: Tensor) -> None:
        assert self.tail is not None
        states = torch.stack(list(chain.values()))  # (layers, n, D)
        found: dict[str, list[Tensor]] = {}
        start, count = 0, 1  # how many logits a token has is known after the first
        while start < states.shape[1]:
            part = states[:, start : start + count]
            logits = self.tail(part.flatten(0, 1)).unflatten(0, part.shape[:2])
            after = None if following is None else following[start : start + count]
            for name, values in lens_statistics(logits, after).items():
                found.setdefault(name, []).append(values.cpu())
            start += count
            count = max(1, MAX_LOGITS // (len(states) * logits.shape[-1]))
        for name, parts in found.items():
            for cell, values in zip(chain, torch.cat(parts, 1), strict=True):
                self.add(f"{cell}/{name}", tally(values, position))


def logits_of(output: object) -> Tensor | None:
    """Logits (b, L, vocabulary) in what a model returned."""
    for name in ("logits", "prediction_logits"):
        logits = getattr(output, name, None)
        if isinstance(logits, Tensor):
            return logits if logits.ndim == 3 else None
    return output if isinstance(output, Tensor) and output.ndim == 3 else None


def _has_head(model: nn.Module) -> bool:
    """Whether a model says that it has a language head; one that is not of transformers may have one."""
    return not is_transformers(model) or getattr(model, "get_output_embeddings", lambda: None)() is not None


def _vocabularies(model: nn.Module) -> set[int]:
    """Sizes of the tables of embeddings, of which one is that of the language head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)
    own = {len(weight)} if isinstance(weight, Tensor) else set()
    return own | {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}


def _two_sided(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _rows(x: Tensor, index: tuple[Tensor, Tensor]) -> Tensor:
    return x.detach()[index[0].to(x.device), index[1].to(x.device)]


def _stack(block: str) -> str:
    """The list that a block is in."""
    return block.rpartition(".")[0]
