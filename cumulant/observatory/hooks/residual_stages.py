"""The stages of the residual stream in a block, found from the inputs and outputs of its modules in one pass.

    pre-norm    in → attention → out                                        x, x + attention(norm x), …
    post-norm   in → attention → attention normed → mlp → out               norm(x + attention(x)), …

Cross-attention adds one more. A norm on a branch (Gemma has some after attention, before the sum) is no stage; where
norms stand on branches only, or attention and MLP run in parallel, nothing but "in" and "out" can be seen. How a block
expands is measured along its stages: the states that go in are perturbed a little, and the differences followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cumulant.observatory.hooks.structure import attention_modules, norms_of, state_of
from cumulant.observatory.statistics.states import PassTokens, tally
from cumulant.observatory.statistics.tally import Tally

PERTURBATION_SIZE = 1e-3  # as a part of the state
COMPARED_TOKENS = 64  # two states whose first tokens are equal are the same


class NormCall(NamedTuple):
    """A call of a norm inside a block: its path in the block, the index among its calls, its input and output."""

    norm: str
    call_index: int
    input: Tensor
    output: Tensor


class Stage(NamedTuple):
    """A point of the stream: the input or output of one call of a norm; the ends of the block have no norm."""

    name: str
    norm: str | None = None
    call_index: int = 0
    is_output: bool = False


class BlockStages(NamedTuple):
    """The stages of a block.

    stages      from "in" to "out"
    post_norm   the stream itself is normed
    front       path of the norm that reads the state before attention, in pre-norm blocks
    note        what could not be found out, or nothing
    """

    stages: tuple[Stage, ...]
    post_norm: bool
    front: str | None
    note: str


@dataclass
class BlockTrace:
    """What happened in one call of a block, in order; a str stands for a call of the attention of that path."""

    events: list[NormCall | str] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)  # first tokens of the outputs of modules, in the first pass
    read: list[Tensor] = field(default_factory=list)  # and of their inputs
    inputs: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # first tokens of the inputs of norms, copied

    def norms(self) -> list[NormCall]:
        return [e for e in self.events if isinstance(e, NormCall)]


def trace_norms(block: nn.Module, trace: BlockTrace, like: Tensor) -> list:
    """Put hooks on the norms that fill ``trace`` with events of the size of ``like``; returns their handles."""
    handles, indices = [], {}

    def record_call(path: str):
        def hook(module, args, output):
            if args and isinstance(output, Tensor) and output.numel() == like.numel() == args[0].numel():
                index = indices[path] = indices.get(path, -1) + 1
                trace.events.append(NormCall(path, index, args[0].reshape(like.shape), output.reshape(like.shape)))
                trace.inputs[path, index] = first_tokens(args[0]).clone()

        return hook

    for path, norm in norms_of(block).items():
        handles.append(norm.register_forward_hook(record_call(path)))
    return handles


def trace_modules(block: nn.Module, trace: BlockTrace, like: Tensor) -> list:
    """Put hooks on everything in the block: when attention is called, and which states modules return."""

    def record_attention(path: str):
        def hook(module, args):
            trace.events.append(path)

        return hook

    def record_output(module, args, output):
        state = state_of(output)
        if state is not None and state.numel() == like.numel() and state.shape[-1] == like.shape[-1]:
            trace.outputs.append(first_tokens(state).clone())
        if args and isinstance(args[0], Tensor) and args[0].shape == like.shape:
            trace.read.append(first_tokens(args[0]).clone())

    paths = attention_modules(block)
    handles = [block.get_submodule(path).register_forward_pre_hook(record_attention(path)) for path in paths]
    skipped = set(norms_of(block).values()) | {block}
    return handles + [m.register_forward_hook(record_output) for m in block.modules() if m not in skipped]


def find_stages(x: Tensor, out: Tensor, trace: BlockTrace) -> BlockStages:
    """Which inputs and outputs of norms are states of the stream, from those that went into the block and came out."""
    calls = _by_key(trace)
    intact = {key for key, copied in trace.inputs.items() if torch.equal(first_tokens(calls[key].input), copied)}
    norms = [
        e for e in trace.norms() if (e.norm, e.call_index) in intact
    ]  # what was overwritten in place cannot be used
    ends = (Stage("in"), Stage("out"))
    if not norms:
        return BlockStages(ends, False, None, "no norm was seen inside the block")
    post = same_states(norms[-1].output, out)
    stages, current, ran, attended, front = [], x, "mlp", 0, None
    for event in trace.events:
        if isinstance(event, str):
            ran, attended = "attention" if attended == 0 else "cross attention", attended + 1
            continue
        if (event.norm, event.call_index) not in intact:
            continue
        if same_states(event.input, current):
            front = event.norm if not attended and front is None else front
            continue
        if _on_branch(event, current, norms, out, trace.outputs):
            continue
        name = _new_name(ran, [s.name for s in stages])
        stages.append(Stage(name, event.norm, event.call_index))
        current, ran = event.input, "mlp"
        if post and event is not norms[-1]:
            stages.append(Stage(f"{name} normed", event.norm, event.call_index, is_output=True))
            current = event.output
    note = (
        "" if stages else "attention and MLP run in parallel, or norms stand on branches only: only in and out are seen"
    )
    return BlockStages((ends[0], *stages, ends[1]), post and bool(stages), front, note)


def stage_values(stages: BlockStages, x: Tensor, out: Tensor, trace: BlockTrace) -> dict[str, Tensor]:
    """The state at each stage; one whose norm was not called this time is left out."""
    calls, values = _by_key(trace), {"in": x}
    for stage in stages.stages[1:-1]:
        call = calls.get((stage.norm or "", stage.call_index))
        if call is not None:
            values[stage.name] = call.output if stage.is_output else call.input
    return values | {"out": out}


def _on_branch(call: NormCall, current: Tensor, norms: list[NormCall], out: Tensor, outputs: list[Tensor]) -> bool:
    """Whether the input of the norm is not a state of the stream but something that is yet to be added to it."""
    later = [e.input for e in norms[next(i for i, e in enumerate(norms) if e is call) + 1 :]] + [out]
    if any(is_sum(state, current, call.output) for state in later):
        return True
    if not any(same_states(call.input, output) for output in outputs):
        return False  # the sum of an addition in the code of the block
    others = [output for output in outputs if not same_states(output, call.input)]
    return not any(is_sum(call.input, current, output) for output in others)


def _by_key(trace: BlockTrace) -> dict[tuple[str, int], NormCall]:
    return {(e.norm, e.call_index): e for e in trace.norms()}


def first_tokens(x: Tensor) -> Tensor:
    """(at most `COMPARED_TOKENS`, D) of states (…, D), by which states are compared."""
    return x.detach().reshape(-1, x.shape[-1])[:COMPARED_TOKENS]


def same_states(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of states are the same, to the bit."""
    return torch.equal(first_tokens(a), first_tokens(b))


def is_sum(total: Tensor, part: Tensor, more: Tensor) -> bool:
    """Whether total = part + more, to rounding."""
    rounding = 4 * torch.finfo(total.dtype).eps
    total, part, more = (first_tokens(t).double() for t in (total, part, more))
    return float((total - part - more).norm()) <= 1e-3 * float(more.norm()) + rounding * float(part.norm())


def _new_name(name: str, taken: list[str]) -> str:
    number = 1 + sum(t == name or (t.startswith(f"{name} ") and t.split()[-1].isdigit()) for t in taken)
    return name if number == 1 else f"{name} {number}"


def perturbation(x: Tensor, rows: Tensor, seed: int | list[int]) -> Tensor:
    """A random direction for each token of x (b, L, D), as long as a thousandth of it; 0 where rows (b, L) is False.

    seed  one for all, or one for each sequence, whose directions then do not depend on how it is padded
    """
    if isinstance(seed, int):
        v = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    else:
        v = torch.ones(x.shape, dtype=x.dtype)
        for i, sequence_seed in enumerate(seed):
            tokens, generator = int(rows[i].sum()), torch.Generator().manual_seed(sequence_seed)
            v[i, rows[i]] = torch.randn(tokens, x.shape[-1], generator=generator, dtype=x.dtype)
    v = v.to(x.device)
    size = PERTURBATION_SIZE * torch.linalg.vector_norm(x, dim=-1) / torch.linalg.vector_norm(v, dim=-1)
    return torch.where(rows.to(x.device), size, 0)[..., None] * v


def growth_tallies(
    values: dict[str, Tensor],
    trace: BlockTrace,
    moved: dict[str, Tensor],
    moved_trace: BlockTrace,
    norms: dict[str, bool],
    tokens: PassTokens,
) -> Iterator[tuple[str, Tally]]:
    """Logarithms of how a perturbation grows from stage to stage and through each of ``norms``, per token.

    values, trace       states of all sequences of the pass, by stage, and the calls of the norms
    moved, moved_trace  the same of the sampled sequences, after a perturbation of the state that goes in
    """
    rows, position, index = tokens.rows, tokens.position[tokens.rows], tokens.sampled

    def length(after: Tensor, before: Tensor) -> Tensor:
        return torch.linalg.vector_norm((after - before[index.to(after.device)])[rows.to(after.device)], dim=-1)

    lengths = {stage: length(moved[stage], values[stage]) for stage in values if stage in moved}
    before = "in"
    for stage in list(lengths)[1:]:
        for quantity, base in (("growth", "in"), ("step", before)):
            yield f"{stage}/{quantity}", tally((lengths[stage] / lengths[base]).log(), position)
        before = stage
    again = {(call.norm, call.call_index): call for call in moved_trace.norms()}
    for call in trace.norms():
        other = again.get((call.norm, call.call_index))
        if other is not None and call.norm in norms:
            ratio = length(other.output, call.output) / length(other.input, call.input)
            yield f"norm {call.norm}/contraction", tally(ratio.log(), position)
