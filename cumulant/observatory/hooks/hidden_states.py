"""Hidden states over the depth of a model: their size, direction and spread, what blocks expand and norms contract.

`observe_hidden_states` puts hooks on every block while the model runs. What is kept has a fixed size however long the
text is, can be merged, and is plain tensors with names; the model's outputs do not change.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cumulant.checks import sentence, shape
from cumulant.nn.attention_interface import position_mask
from cumulant.observatory.hooks.residual_stages import (
    BlockStages,
    BlockTrace,
    find_stages,
    growth_tallies,
    perturbation,
    stage_values,
    trace_modules,
    trace_norms,
)
from cumulant.observatory.hooks.structure import (
    NotFound,
    attention_modules,
    block_of,
    input_of,
    norm_of,
    sequences_of,
    state_of,
    twin,
    without_cache,
)
from cumulant.observatory.statistics.sampling import priorities
from cumulant.observatory.statistics.states import (
    MAX_COVARIANCE_WIDTH,
    MeanScatter,
    PassTokens,
    Statistic,
    at_least_single,
    flatten,
    merge_statistics,
    state_statistics,
    tally,
    unflatten,
)

PERTURBED_PASSES = 32  # blocks are perturbed in one pass out of so many, the first among them
SAMPLED_TOKENS = 2048  # of a pass, in whole sequences, from which directions, covariances and norms are taken


class StageKey(NamedTuple):
    """A stage of a block, and the cell under which its statistics are kept; role is "state", "norm", or "front" for
    the norm that attention reads through."""

    block: str
    stage: str
    cell: str
    role: str


@dataclass
class ModelPass:
    """The running call of the model: which rows are tokens, and of which texts."""

    number: int
    masks: dict[str, Tensor]
    texts: Tensor | None
    arguments: dict[str, Any]  # of the call
    sequences: dict[str, Tensor] = field(default_factory=dict)  # those that `expect` named as sampled and perturbed
    tokens: dict[tuple[str, int, int], PassTokens] = field(default_factory=dict)


class BlockPass(NamedTuple):
    """One call of a block: its state at each stage, the stages, the calls inside it, its tokens, what it returned."""

    block: str
    values: dict[str, Tensor]
    plan: BlockStages
    trace: BlockTrace
    tokens: PassTokens
    output: object


class PassObserver(Protocol):
    """Who is told of every call of a block, and of the end of a pass."""

    def block(self, call: BlockPass) -> None: ...

    def end(self, running: ModelPass, output: object) -> None: ...


@dataclass
class ObservedBlock:
    """A block with hooks, and what has been found out about it."""

    name: str
    module: nn.Module
    inside_decoder: bool
    plan: BlockStages | None = None
    cell: str = ""  # where statistics of its input are: under its own name, or at the output of the block before
    centred: dict[str, bool] = field(default_factory=dict)  # per norm: LayerNorm or RMSNorm
    twin: nn.Module | None = None
    trace: BlockTrace = field(default_factory=BlockTrace)
    handles: list = field(default_factory=list)
    calls: tuple[int, int] = (-1, 0)  # the pass, and how often the block was called in it

    def release(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles, self.trace = [], BlockTrace()


class HiddenStateObserver:
    """Statistics per block and stage of the residual stream. Made by `observe_hidden_states`.

    Kept under `block/stage/quantity`:

        size        |x|/√D per token
        cosine      of a token to the mean direction of its sequence
        pairwise    mean cosine between the tokens of a sequence, per sequence
        spread      mean and covariance
        within      scatter about the means of the sequences, for "in" and "out"
        sample      512 of the same tokens, each less the mean of its sequence, for "in" and "out"
        growth      log |δ stage| / |δ in| of a perturbation of all tokens, per token
        step        log |δ stage| / |δ stage before|

    and under `block/norm path/quantity`: inverse (1/σ, the operator norm of the Jacobian without gain: it contracts iff
    below 1), contraction (log |δ output| / |δ input|, with gain), and spread of the normed states without gain for the
    norm in front of attention. Size is of every token; all else is of whole sequences, named by who runs the model
    (`expect`) or else drawn at random, up to 2048 tokens of a pass. So the sample is of the tokens that `within` is of,
    which its comparison with Gaussian samples rests on. Padding is left out; without tokens nothing changes.
    """

    def __init__(self, model: nn.Module, seed: int = 0, *, covariance: bool = True, perturb: bool = True):
        self.seed, self.covariance, self.perturb = seed, covariance, perturb
        self.two_sided = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self.hears = getattr(model, "main_input_name", "") == "input_features"  # its attention mask is of frames
        self.signature = inspect.signature(model.forward)
        self.blocks: list[ObservedBlock] = []
        self.notes: dict[str, str] = {}
        self.statistics: dict[str, Statistic] = {}
        self.running: ModelPass | None = None
        self.passes = self.texts = 0
        self.expected: dict[str, Tensor] = {}
        self.latest: tuple[Tensor, str] | None = None  # the last output, and the key of its statistics
        self.observers: list[PassObserver] = []
        for path in dict.fromkeys(block_of(model, name) for name in attention_modules(model)):
            if path is not None:
                inside = self.two_sided and "decoder" in path.split(".")
                self.blocks.append(ObservedBlock(path, model.get_submodule(path), inside, cell=f"{path}/in"))
        if not self.blocks:
            self.notes["model"] = "no attention inside a list of blocks was found: hidden states are not observed"

    def expect(
        self,
        *,
        texts: Tensor | None = None,
        rows: Tensor | None = None,
        decoder_rows: Tensor | None = None,
        sampled: Tensor | None = None,
        perturbed: Tensor | None = None,
    ) -> None:
        """Describe the sequences of the next pass.

        texts (b,) numbers of the texts, by default counted up; rows (b, L) True where there is a token, by default the
        attention mask of the call. sampled, perturbed (b,) True for the sequences from which directions, covariances
        and norms are taken, and for those that are perturbed: chosen by a hash of the text they give the same
        statistics however sequences are batched.
        """
        given = {"texts": texts, "rows": rows, "decoder_rows": decoder_rows, "sampled": sampled, "perturbed": perturbed}
        for name, tensor in given.items():
            if tensor is not None and tensor.ndim != (2 if name.endswith("rows") else 1):
                expected = "shape (b, L)" if name.endswith("rows") else "shape (b,)"
                raise ValueError(
                    sentence(f"HiddenStateObserver.expect.{name}", expected, shape(tensor), "One entry per sequence.")
                )
        self.expected = {k: v for k, v in given.items() if v is not None}

    def names(self) -> list[StageKey]:
        """Where things are, in the order of depth: block, stage, and the cell under which its cloud is kept."""
        out = []
        for block in self.blocks:
            if block.plan is None:
                continue
            stages = [s.name for s in block.plan.stages] + [f"norm {path}" for path in block.centred]
            for stage in stages:
                cell = block.cell if stage == "in" else f"{block.name}/{stage}"
                role = (
                    "state"
                    if not stage.startswith("norm ")
                    else "front"
                    if stage == f"norm {block.plan.front}"
                    else "norm"
                )
                out.append(StageKey(block.name, stage, cell, role))
        return out

    def state(self) -> dict[str, Tensor]:
        """All statistics as tensors; `merge_layers` joins two of them."""
        return flatten(self.statistics)

    def merge(self, state: dict[str, Tensor]) -> None:
        """Take in the statistics of another observer of the same model."""
        self.statistics = merge_statistics(self.statistics, unflatten(state))

    def begin(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """Hook: the model is called."""
        try:
            bound = self.signature.bind_partial(*args).arguments | kwargs
        except TypeError:  # the model itself says what is wrong with its arguments
            bound = kwargs
        masks = {"rows": bound.get("attention_mask"), "decoder_rows": bound.get("decoder_attention_mask")}
        masks = {k: v.bool() for k, v in masks.items() if isinstance(v, Tensor) and v.ndim == 2}
        texts = self.expected.get("texts")
        masks |= {k: v.bool() for k, v in self.expected.items() if k.endswith("rows")}
        sequences = {k: v.nonzero()[:, 0] for k, v in self.expected.items() if k in ("sampled", "perturbed")}
        self.running, self.expected, self.latest = ModelPass(self.passes, masks, texts, bound, sequences), {}, None

    @torch.no_grad()
    def end(self, model: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        """Hook: the model has returned."""
        if self.running is not None:
            self.passes += 1
            for observer in self.observers:
                observer.end(self.running, output)
        self.running = self.latest = None

    def enter(self, block: ObservedBlock, args: tuple, kwargs: dict) -> None:
        """Hook: a block is called."""
        block.release()
        x = input_of(args, kwargs)[0]
        if self.running is None or x is None:
            return
        block.handles = trace_norms(block.module, block.trace, x)
        if block.plan is None:
            block.handles += trace_modules(block.module, block.trace, x)

    @torch.no_grad()
    def leave(self, block: ObservedBlock, args: tuple, kwargs: dict, output: object) -> None:
        """Hook: a block has returned."""
        trace, (x, key), out = block.trace, input_of(args, kwargs), state_of(output)
        block.release()
        if self.running is None:
            return
        if x is None or out is None or x.shape != out.shape or x.ndim != 3:
            self.notes[block.name] = "the block does not map states (b, L, D) to states: it is left out"
            return
        plan = self._find_stages(block, x, out, trace)
        self._count_call(block)
        tokens = self._tokens(block, x)
        values = stage_values(plan, x, out, trace)
        for stage, value in values.items():
            if stage != "in" or block.cell == f"{block.name}/in":
                self._add_states(f"{block.name}/{stage}", value.detach(), tokens, ends=stage in ("in", "out"))
        self._add_norms(block, trace, tokens)
        for observer in self.observers:
            observer.block(BlockPass(block.name, values, plan, trace, tokens, output))
        usual = tokens.sampled if self.running.number % PERTURBED_PASSES == 0 else tokens.sampled[:0]
        perturbed = self.running.sequences.get("perturbed", usual)
        if self.perturb and len(perturbed) and not block.module.training:
            rows, position = tokens.rows[perturbed], tokens.position[perturbed]
            tokens = tokens._replace(rows=rows, position=position, sampled=perturbed)
            self._perturb(block, args, kwargs, key, values, trace, tokens)
        self.latest = (out, f"{block.name}/out")

    def _find_stages(self, block: ObservedBlock, x: Tensor, out: Tensor, trace: BlockTrace) -> BlockStages:
        if block.plan is None:
            block.plan = find_stages(x, out, trace)
            if block.plan.note:
                self.notes[block.name] = block.plan.note
            if self.latest is not None and self.latest[0] is x:
                block.cell = self.latest[1]
            for path in dict.fromkeys(e.norm for e in trace.norms()):
                norm = norm_of(block.module.get_submodule(path), x.shape[-1])
                if isinstance(norm, NotFound):
                    self.notes[f"{block.name}.{path}"] = norm.reason
                else:
                    block.centred[path] = norm.centred
        return block.plan

    def _count_call(self, block: ObservedBlock) -> None:
        number = self.running.number if self.running else -1
        block.calls = (number, block.calls[1] + 1 if block.calls[0] == number else 1)
        if block.calls[1] == 2:
            self.notes[block.name] = "the block is called several times in a pass: its depths are mixed"

    def _tokens(self, block: ObservedBlock, x: Tensor) -> PassTokens:
        """Which of (b, L) are tokens; worked out once a pass for each side of the model."""
        running, (b, length) = self.running, x.shape[:2]
        if running is None:
            raise RuntimeError(
                sentence("HiddenStateObserver", "a running pass", "none", "Call the model, not its blocks.")
            )
        side = "decoder_rows" if block.inside_decoder else "rows"
        if (side, b, length) in running.tokens:
            return running.tokens[side, b, length]
        mask = running.masks.get(side)
        if mask is not None and self.hears and side == "rows":
            mask = position_mask(mask, length)
        if mask is None or len(mask) != b or mask.shape[1] < length:
            mask = torch.ones(b, length, dtype=torch.bool)
        mask = mask.cpu()
        if running.texts is None or len(running.texts) != b:
            running.texts = torch.arange(self.texts, self.texts + b)
            self.texts += b
        rows, position = mask[:, -length:], (mask.cumsum(1) - 1)[:, -length:]
        order = priorities(self.seed, running.texts, torch.tensor(-1)).argsort()
        before = rows.sum(1)[order].cumsum(0) - rows.sum(1)[order]
        tokens = PassTokens(
            rows=rows,
            position=position,
            priority=priorities(self.seed, running.texts[:, None], position),
            texts=running.texts,
            sampled=running.sequences.get("sampled", order[before < SAMPLED_TOKENS].sort().values),
        )
        running.tokens[side, b, length] = tokens
        return tokens

    def _add_states(self, key: str, x: Tensor, tokens: PassTokens, *, ends: bool) -> None:
        before = self.statistics.get(f"{key}/sample")
        new = state_statistics(x, tokens, ends=ends, covariance=self.covariance, before=before)
        for quantity, statistic in new.items():
            self.add(f"{key}/{quantity}", statistic)

    def _add_norms(self, block: ObservedBlock, trace: BlockTrace, tokens: PassTokens) -> None:
        rows, position = tokens.rows[tokens.sampled], tokens.position[tokens.sampled]
        for call in trace.norms():
            if call.norm not in block.centred or not bool(rows.any()):
                continue
            x = call.input[tokens.sampled.to(call.input.device)]
            x = x.to(at_least_single(x.dtype))[rows.to(x.device)]
            x = x - x.mean(-1, keepdim=True) if block.centred[call.norm] else x
            sigma = torch.linalg.vector_norm(x, dim=-1) / x.shape[-1] ** 0.5
            key = f"{block.name}/norm {call.norm}"
            self.add(f"{key}/inverse", tally(1 / sigma, position[rows]))
            in_front = block.plan is not None and call.norm == block.plan.front
            if in_front and self.covariance and x.shape[-1] <= MAX_COVARIANCE_WIDTH:
                usable = sigma.isfinite() & (sigma > 0)
                self.add(f"{key}/spread", MeanScatter.of((x / sigma[:, None])[usable]))

    def _perturb(self, block, args, kwargs, key, values, trace, tokens) -> None:
        """Call a twin of the block on its own input plus a little, and tally how the difference grows."""
        x = values["in"]
        if x.dtype not in (torch.float32, torch.float64):
            self.notes.setdefault(block.name, "half precision cannot resolve a perturbation: no growth is measured")
            return
        call = without_cache(args, kwargs, x.shape[1])
        if call is None:
            return  # the cache held more than this pass has put in, so the call cannot be repeated
        # some sequences only: the second call then costs a part of the first
        args, kwargs = sequences_of(*call, len(x), tokens.sampled)
        x = x[tokens.sampled.to(x.device)]
        moved = x + perturbation(x, tokens.rows, self._seeds(tokens))
        args, kwargs = ((moved, *args[1:]), kwargs) if key is None else (args, {**kwargs, key: moved})
        block.twin, moved_trace = block.twin or twin(block.module), BlockTrace()
        handles = trace_norms(block.twin, moved_trace, x)
        try:
            out = state_of(block.twin(*args, **kwargs))
        except Exception as error:  # an observation that fails must not end the pass
            self.notes[block.name] = f"the block cannot be called twice ({type(error).__name__}): no growth is measured"
            return
        finally:
            for handle in handles:
                handle.remove()
        if out is not None:
            after = stage_values(block.plan, moved, out, moved_trace)
            for name, growth in growth_tallies(values, trace, after, moved_trace, block.centred, tokens):
                self.add(f"{block.name}/{name}", growth)

    def _seeds(self, tokens: PassTokens) -> int | list[int]:
        """Of a perturbation: of each sequence, from its text, if `expect` named them; else of the pass."""
        if self.running is None or self.running.texts is None or "perturbed" not in self.running.sequences:
            return self.seed + self.passes
        return priorities(self.seed, self.running.texts[tokens.sampled]).tolist()

    def add(self, key: str, new: Statistic) -> None:
        """Merge a statistic into what is kept under `block/stage/quantity`."""
        before = self.statistics.get(key)
        self.statistics[key] = new if before is None else before.merge(new)  # pyright: ignore[reportArgumentType]


@contextmanager
def observe_hidden_states(
    model: nn.Module, *, seed: int = 0, covariance: bool = True, perturb: bool = True
) -> Iterator[HiddenStateObserver]:
    """Collect statistics of the hidden states of ``model`` in every pass while inside.

    covariance   keep the spread (D, D) of each stage, for D ≤ 1024
    perturb      in the first pass and in one of 32 after it, call each block once more to measure its expansion
    """
    layers = HiddenStateObserver(model, seed, covariance=covariance, perturb=perturb)
    handles = [
        model.register_forward_pre_hook(layers.begin, with_kwargs=True),
        model.register_forward_hook(layers.end, with_kwargs=True),
    ]
    for block in layers.blocks:
        module = block.module
        before, after = _block_hooks(layers, block)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        yield layers
    finally:
        for handle in handles:
            handle.remove()
        for block in layers.blocks:
            block.release()
            block.twin = None


def merge_layers(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two states of a `HiddenStateObserver`, of the same model on different texts, as one."""
    return flatten(merge_statistics(unflatten(one), unflatten(other)))


def _block_hooks(layers: HiddenStateObserver, block: ObservedBlock):
    def before(module, args, kwargs):
        layers.enter(block, args, kwargs)

    def after(module, args, kwargs, output):
        layers.leave(block, args, kwargs, output)

    return before, after
