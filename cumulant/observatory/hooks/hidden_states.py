"""Hidden states over the depth of a model: their size, direction and spread, what blocks expand and norms contract.

`watch` looks at every block while the model runs. What it keeps has a fixed size however long the text is, can be
merged, and is plain tensors with names; the model's outputs do not change.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cumulant.checks import sentence, shape
from cumulant.observatory.hooks.blocks import (
    Unknown,
    attention_modules,
    block_of,
    input_of,
    norm_of,
    sequences_of,
    state_of,
    twin,
    without_cache,
)
from cumulant.observatory.hooks.residual_stages import (
    Plan,
    Trace,
    find_stages,
    stage_values,
    trace_modules,
    trace_norms,
)
from cumulant.observatory.statistics.stable_hash import priorities
from cumulant.observatory.statistics.states import (
    SAMPLE,
    Centred,
    Kept,
    Sample,
    Spread,
    Within,
    flatten,
    merge_places,
    unflatten,
)
from cumulant.observatory.statistics.tally import Tally

STEP = 1e-3  # length of a perturbation, as a part of the state
EVERY = 32  # perturb in one pass out of so many, the first among them
SOME = 2048  # tokens of a pass, in whole sequences, from which directions, covariances and norms are taken
WIDE = 1024  # states with more channels than this keep no covariance


class Tokens(NamedTuple):
    """Tokens of a pass: rows (b, L) where there is one, its position and priority; texts (b,), some (k,) of them."""

    rows: Tensor
    position: Tensor
    priority: Tensor
    texts: Tensor
    some: Tensor


class StageKey(NamedTuple):
    """A stage of a block, and the cell under which its statistics are kept; role is "state", "norm", or "front" for
    the norm that attention reads through."""

    block: str
    stage: str
    cell: str
    role: str


@dataclass
class Pass:
    """The running call of the model: which rows are tokens, and of which texts."""

    number: int
    masks: dict[str, Tensor]
    texts: Tensor | None
    chosen: dict[str, Tensor] = field(default_factory=dict)  # sequences that were named by `expect`
    tokens: dict[tuple[str, int, int], Tokens] = field(default_factory=dict)


@dataclass
class Block:
    """A block that is watched, and what has been found out about it."""

    name: str
    module: nn.Module
    inside_decoder: bool
    plan: Plan | None = None
    cell: str = ""  # where statistics of its input are: its own place, or the output of the block before
    centred: dict[str, bool] = field(default_factory=dict)  # per norm: LayerNorm or RMSNorm
    twin: nn.Module | None = None
    trace: Trace = field(default_factory=Trace)
    handles: list = field(default_factory=list)
    calls: tuple[int, int] = (-1, 0)  # the pass, and how often the block was called in it

    def release(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles, self.trace = [], Trace()


class LayerWatch:
    """Statistics per block and stage of the residual stream. Made by `watch`.

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
    norm in front of attention. Size sees every token; all else sees whole sequences, chosen by who runs the model
    (`expect`) or else at random, up to 2048 tokens of a pass. So the sample is of the tokens that `within` is of, which
    its comparison with Gaussian clouds rests on. Padding is left out; without tokens nothing changes.
    """

    def __init__(self, model: nn.Module, seed: int = 0, *, covariance: bool = True, perturb: bool = True):
        self.seed, self.covariance, self.perturb = seed, covariance, perturb
        self.two_sided = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self.signature = inspect.signature(model.forward)
        self.blocks: list[Block] = []
        self.notes: dict[str, str] = {}
        self.kept: dict[str, Kept] = {}
        self.running: Pass | None = None
        self.passes = self.texts = 0
        self.expected: dict[str, Tensor] = {}
        self.latest: tuple[Tensor, str] | None = None  # the last output, and its place
        for path in dict.fromkeys(block_of(model, name) for name in attention_modules(model)):
            if path is not None:
                inside = self.two_sided and "decoder" in path.split(".")
                self.blocks.append(Block(path, model.get_submodule(path), inside, cell=f"{path}/in"))
        if not self.blocks:
            self.notes["model"] = "no attention inside a list of blocks was found: hidden states are not looked at"

    def expect(
        self,
        *,
        texts: Tensor | None = None,
        rows: Tensor | None = None,
        decoder_rows: Tensor | None = None,
        some: Tensor | None = None,
        moved: Tensor | None = None,
    ) -> None:
        """Say what the next pass is about, in place of what its arguments say.

        texts (b,) numbers of the texts, by default counted up; rows (b, L) True where there is a token, by default the
        attention mask of the call. some, moved (b,) True for the sequences from which directions, covariances and norms
        are taken, and for those that are perturbed: who chooses them by what they are has the same statistics however
        sequences are put into passes.
        """
        given = {"texts": texts, "rows": rows, "decoder_rows": decoder_rows, "some": some, "moved": moved}
        for name, tensor in given.items():
            if tensor is not None and tensor.ndim != (2 if name.endswith("rows") else 1):
                expected = "shape (b, L)" if name.endswith("rows") else "shape (b,)"
                raise ValueError(
                    sentence(f"LayerWatch.expect.{name}", expected, shape(tensor), "One entry per sequence.")
                )
        self.expected = {k: v for k, v in given.items() if v is not None}

    def names(self) -> list[StageKey]:
        """Where things are, in the order of depth: block, stage, and the cell under which its cloud is kept."""
        out = []
        for block in self.blocks:
            if block.plan is None:
                continue
            places = [s.name for s in block.plan.stages] + [f"norm {path}" for path in block.centred]
            for stage in places:
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
        """Everything that was kept, as tensors; `merge_layers` joins two of them."""
        return flatten(self.kept)

    def merge(self, state: dict[str, Tensor]) -> None:
        """Take in what another watch of the same model has kept."""
        self.kept = merge_places(self.kept, unflatten(state))

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
        chosen = {k: v.nonzero()[:, 0] for k, v in self.expected.items() if k in ("some", "moved")}
        self.running, self.expected, self.latest = Pass(self.passes, masks, texts, chosen), {}, None

    def end(self, model: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        """Hook: the model has returned."""
        if self.running is not None:
            self.passes += 1
        self.running = self.latest = None

    def enter(self, block: Block, args: tuple, kwargs: dict) -> None:
        """Hook: a block is called."""
        block.release()
        x = input_of(args, kwargs)[0]
        if self.running is None or x is None:
            return
        block.handles = trace_norms(block.module, block.trace, x)
        if block.plan is None:
            block.handles += trace_modules(block.module, block.trace, x)

    @torch.no_grad()
    def leave(self, block: Block, args: tuple, kwargs: dict, output: object) -> None:
        """Hook: a block has returned."""
        trace, (x, key), out = block.trace, input_of(args, kwargs), state_of(output)
        block.release()
        if self.running is None:
            return
        if x is None or out is None or x.shape != out.shape or x.ndim != 3:
            self.notes[block.name] = "the block does not map states (b, L, D) to states: it is left out"
            return
        plan = self._learn(block, x, out, trace)
        self._count(block)
        tokens = self._tokens(block, x)
        values = stage_values(plan, x, out, trace)
        for stage, value in values.items():
            if stage != "in" or block.cell == f"{block.name}/in":
                self._cloud(f"{block.name}/{stage}", value.detach(), tokens, ends=stage in ("in", "out"))
        self._norms(block, trace, tokens)
        moved = self.running.chosen.get("moved", tokens.some if self.running.number % EVERY == 0 else tokens.some[:0])
        if self.perturb and len(moved) and not block.module.training:
            some = tokens._replace(rows=tokens.rows[moved], position=tokens.position[moved], some=moved)
            self._perturb(block, args, kwargs, key, values, trace, some)
        self.latest = (out, f"{block.name}/out")

    def _learn(self, block: Block, x: Tensor, out: Tensor, trace: Trace) -> Plan:
        if block.plan is None:
            block.plan = find_stages(x, out, trace)
            if block.plan.note:
                self.notes[block.name] = block.plan.note
            if self.latest is not None and self.latest[0] is x:
                block.cell = self.latest[1]
            for path in dict.fromkeys(e.norm for e in trace.norms()):
                norm = norm_of(block.module.get_submodule(path), x.shape[-1])
                if isinstance(norm, Unknown):
                    self.notes[f"{block.name}.{path}"] = norm.reason
                else:
                    block.centred[path] = norm.centred
        return block.plan

    def _count(self, block: Block) -> None:
        number = self.running.number if self.running else -1
        block.calls = (number, block.calls[1] + 1 if block.calls[0] == number else 1)
        if block.calls[1] == 2:
            self.notes[block.name] = "the block is called several times in a pass: its depths are mixed"

    def _tokens(self, block: Block, x: Tensor) -> Tokens:
        """Which of (b, L) are tokens; worked out once a pass for each side of the model."""
        running, (b, length) = self.running, x.shape[:2]
        if running is None:
            raise RuntimeError(sentence("LayerWatch", "a running pass", "none", "Call the model, not its blocks."))
        side = "decoder_rows" if block.inside_decoder else "rows"
        if (side, b, length) in running.tokens:
            return running.tokens[side, b, length]
        mask = running.masks.get(side)
        if mask is None or len(mask) != b or mask.shape[1] < length:
            mask = torch.ones(b, length, dtype=torch.bool)
        mask = mask.cpu()
        if running.texts is None or len(running.texts) != b:
            running.texts = torch.arange(self.texts, self.texts + b)
            self.texts += b
        rows, position = mask[:, -length:], (mask.cumsum(1) - 1)[:, -length:]
        order = priorities(self.seed, running.texts, torch.tensor(-1)).argsort()
        before = rows.sum(1)[order].cumsum(0) - rows.sum(1)[order]
        tokens = Tokens(
            rows=rows,
            position=position,
            priority=priorities(self.seed, running.texts[:, None], position),
            texts=running.texts,
            some=running.chosen.get("some", order[before < SOME].sort().values),
        )
        running.tokens[side, b, length] = tokens
        return tokens

    def _cloud(self, place: str, x: Tensor, tokens: Tokens, *, ends: bool) -> None:
        size = torch.linalg.vector_norm(x, dim=-1, dtype=_wide(x.dtype)).cpu()
        here = tokens.rows & size.isfinite()
        if not bool(here.any()):
            return
        self._add(f"{place}/size", _tally(size[here] / x.shape[-1] ** 0.5, tokens.position[here]))
        some = tokens.some
        x, size, here, position = x[some.to(x.device)].to(_wide(x.dtype)), size[some], here[some], tokens.position[some]
        if not bool(here.any()):
            return
        if not bool(size.isfinite().all()):
            x = x.masked_fill(~here[..., None].to(x.device), 0)
        weight = torch.where(here & (size > 0), 1 / size, 0).to(x.device)
        total = torch.einsum("bl,bld->bd", weight, x)  # sum of the unit vectors of a sequence
        length, n = torch.linalg.vector_norm(total, dim=-1), (weight > 0).sum(1)
        cosine = torch.einsum("bld,bd->bl", x, total) * weight / length[:, None]
        self._add(f"{place}/cosine", _tally(cosine.cpu()[here], position[here]))
        self._add(f"{place}/pairwise", _tally((length.square() - n) / (n * (n - 1))))
        vectors, wide = x[here.to(x.device)], x.shape[-1] > WIDE or not self.covariance
        if not ends and not wide:
            self._add(f"{place}/spread", Spread.of(vectors))
        if ends:
            names = tokens.texts[some, None].expand_as(here)[here]
            centred = Centred.of(vectors, names)
            self._sample(f"{place}/sample", centred, tokens.priority[some][here], names)
            if not wide:
                within = Within.of(centred)
                self._add(f"{place}/within", within)
                self._add(f"{place}/spread", Spread.of_sequences(within, centred))

    def _sample(self, place: str, centred: Centred, priority: Tensor, names: Tensor) -> None:
        kept, index = self.kept.get(place), (centred.length > 1).nonzero()[:, 0]  # one token alone is its own mean
        if isinstance(kept, Sample) and len(kept.priority) == SAMPLE:
            index = index[priority[index] < kept.priority[-1]]
        if len(index):
            self._add(place, Sample.of(centred.residual[index], priority[index], names[index], centred.length[index]))

    def _norms(self, block: Block, trace: Trace, tokens: Tokens) -> None:
        rows, position = tokens.rows[tokens.some], tokens.position[tokens.some]
        for event in trace.norms():
            if event.norm not in block.centred or not bool(rows.any()):
                continue
            x = event.read[tokens.some.to(event.read.device)].to(_wide(event.read.dtype))[rows.to(event.read.device)]
            x = x - x.mean(-1, keepdim=True) if block.centred[event.norm] else x
            sigma = torch.linalg.vector_norm(x, dim=-1) / x.shape[-1] ** 0.5
            place = f"{block.name}/norm {event.norm}"
            self._add(f"{place}/inverse", _tally(1 / sigma, position[rows]))
            if block.plan and event.norm == block.plan.front and self.covariance and x.shape[-1] <= WIDE:
                usable = sigma.isfinite() & (sigma > 0)
                self._add(f"{place}/spread", Spread.of((x / sigma[:, None])[usable]))

    def _perturb(self, block, args, kwargs, key, values, trace, tokens) -> None:
        """Call a twin of the block on its own input plus a little, and tally how the difference grows."""
        x = values["in"]
        if x.dtype not in (torch.float32, torch.float64):
            self.notes.setdefault(block.name, "half precision cannot resolve a perturbation: no growth is measured")
            return
        call = without_cache(args, kwargs, x.shape[1])
        if call is None:
            return  # the cache held more than this pass has put in, so the call cannot be repeated
        # tokens of some sequences only: the second call then costs a part of the first
        args, kwargs = sequences_of(*call, len(x), tokens.some)
        x = x[tokens.some.to(x.device)]
        moved = x + perturbation(x, tokens.rows, self._seeds(tokens))
        args, kwargs = ((moved, *args[1:]), kwargs) if key is None else (args, {**kwargs, key: moved})
        block.twin, other = block.twin or twin(block.module), Trace()
        handles = trace_norms(block.twin, other, x)
        try:
            out = state_of(block.twin(*args, **kwargs))
        except Exception as error:  # an observation that fails must not end the pass
            self.notes[block.name] = f"the block cannot be called twice ({type(error).__name__}): no growth is measured"
            return
        finally:
            for handle in handles:
                handle.remove()
        if out is not None:
            self._motion(block, values, trace, stage_values(block.plan, moved, out, other), other, tokens)

    def _seeds(self, tokens: Tokens) -> int | list[int]:
        """Of a perturbation: by what the sequences are if they were chosen so, else by the number of the pass."""
        if self.running is None or self.running.texts is None or "moved" not in self.running.chosen:
            return self.seed + self.passes
        return priorities(self.seed, self.running.texts[tokens.some]).tolist()

    def _motion(self, block, values, trace, moved, moved_trace, tokens) -> None:
        """Tally how far stages and norms of some sequences have moved; ``moved`` has them after a perturbation."""
        rows, at, some = tokens.rows, tokens.position[tokens.rows], tokens.some

        def length(after: Tensor, before: Tensor) -> Tensor:
            return torch.linalg.vector_norm((after - before[some.to(after.device)])[rows.to(after.device)], dim=-1)

        lengths = {stage: length(moved[stage], values[stage]) for stage in values if stage in moved}
        before = "in"
        for stage in list(lengths)[1:]:
            for quantity, base in (("growth", "in"), ("step", before)):
                ratio = (lengths[stage] / lengths[base]).log()
                self._add(f"{block.name}/{stage}/{quantity}", _tally(ratio, at))
            before = stage
        calls = {(e.norm, e.turn): e for e in moved_trace.norms()}
        for event in trace.norms():
            again = calls.get((event.norm, event.turn))
            if again is not None and event.norm in block.centred:
                ratio = length(again.wrote, event.wrote) / length(again.read, event.read)
                self._add(f"{block.name}/norm {event.norm}/contraction", _tally(ratio.log(), at))

    def _add(self, place: str, record: Kept) -> None:
        before = self.kept.get(place)
        self.kept[place] = record if before is None else before.merge(record)  # pyright: ignore[reportArgumentType]


@contextmanager
def watch(model: nn.Module, *, seed: int = 0, covariance: bool = True, perturb: bool = True) -> Iterator[LayerWatch]:
    """Look at the hidden states of ``model`` in every pass while inside.

    covariance   keep the spread (D, D) of each stage, for D ≤ 1024
    perturb      in the first pass and in one of 32 after it, call each block once more to measure its expansion
    """
    layers = LayerWatch(model, seed, covariance=covariance, perturb=perturb)
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
    """Two states of `LayerWatch`, of the same model on different texts, as one."""
    return flatten(merge_places(unflatten(one), unflatten(other)))


def perturbation(x: Tensor, rows: Tensor, seed: int | list[int]) -> Tensor:
    """A random direction for each token of x (b, L, D), as long as a thousandth of it; 0 where rows (b, L) is False.

    seed  one for all, or one for each sequence, whose directions then do not depend on how it is padded
    """
    if isinstance(seed, int):
        v = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    else:
        v = torch.ones(x.shape, dtype=x.dtype)
        for i, own in enumerate(seed):
            tokens, generator = int(rows[i].sum()), torch.Generator().manual_seed(own)
            v[i, rows[i]] = torch.randn(tokens, x.shape[-1], generator=generator, dtype=x.dtype)
    v = v.to(x.device)
    size = STEP * torch.linalg.vector_norm(x, dim=-1) / torch.linalg.vector_norm(v, dim=-1)
    return torch.where(rows.to(x.device), size, 0)[..., None] * v


def _block_hooks(layers: LayerWatch, block: Block):
    def before(module, args, kwargs):
        layers.enter(block, args, kwargs)

    def after(module, args, kwargs, output):
        layers.leave(block, args, kwargs, output)

    return before, after


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _tally(values: Tensor, positions: Tensor | None = None) -> Tally:
    return Tally.of(values[None], positions)
