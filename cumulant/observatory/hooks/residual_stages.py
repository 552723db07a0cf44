"""The stages of the residual stream in a block, found from what its modules read and wrote in one pass.

    pre-norm    in → attention → out                                        x, x + attention(norm x), …
    post-norm   in → attention → attention normed → mlp → out               norm(x + attention(x)), …

Cross-attention adds one more. A norm on a branch (Gemma has some after attention, before the sum) is no stage; where
norms stand on branches only, or attention and MLP run in parallel, nothing but "in" and "out" can be seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cumulant.observatory.hooks.blocks import attention_modules, norms_of, state_of

PEEK = 64  # tokens that decide whether two tensors are the same


class Event(NamedTuple):
    """A norm called inside a block: its path in the block, the how-manieth call of it, what it read and wrote."""

    norm: str
    turn: int
    read: Tensor
    wrote: Tensor


class Stage(NamedTuple):
    """A place on the stream. norm and turn say which call has it, wrote whether as output; the ends have no norm."""

    name: str
    norm: str | None = None
    turn: int = 0
    wrote: bool = False


class Plan(NamedTuple):
    """What is known of a block.

    stages      from "in" to "out"
    post_norm   the stream itself is normed
    front       path of the norm that reads the state before attention, in pre-norm blocks
    note        what could not be told, or nothing
    """

    stages: tuple[Stage, ...]
    post_norm: bool
    front: str | None
    note: str


@dataclass
class Trace:
    """What happened in one call of a block, in order; a str stands for a call of the attention of that path."""

    events: list[Event | str] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)  # the first tokens of what modules put out, in the first pass
    first: dict[tuple[str, int], Tensor] = field(default_factory=dict)  # a few numbers that norms read, when they did

    def norms(self) -> list[Event]:
        return [e for e in self.events if isinstance(e, Event)]


def trace_norms(block: nn.Module, trace: Trace, like: Tensor) -> list:
    """Put hooks on the norms that fill ``trace`` with events of the size of ``like``; returns their handles."""
    handles, turns = [], {}

    def hook(path: str):
        def seen(module, args, output):
            if args and isinstance(output, Tensor) and output.numel() == like.numel() == args[0].numel():
                turn = turns[path] = turns.get(path, -1) + 1
                trace.events.append(Event(path, turn, args[0].reshape(like.shape), output.reshape(like.shape)))
                trace.first[path, turn] = _few(args[0]).clone()

        return seen

    for path, norm in norms_of(block).items():
        handles.append(norm.register_forward_hook(hook(path)))
    return handles


def trace_modules(block: nn.Module, trace: Trace, like: Tensor) -> list:
    """Put hooks on everything in the block: when attention is called, and who made which state."""

    def attends(path: str):
        def seen(module, args):
            trace.events.append(path)

        return seen

    def makes(module, args, output):
        state = state_of(output)
        if state is not None and state.numel() == like.numel() and state.shape[-1] == like.shape[-1]:
            trace.made.append(_few(state).clone())

    paths = attention_modules(block)
    handles = [block.get_submodule(path).register_forward_pre_hook(attends(path)) for path in paths]
    skipped = set(norms_of(block).values()) | {block}
    return handles + [m.register_forward_hook(makes) for m in block.modules() if m not in skipped]


def find_stages(x: Tensor, out: Tensor, trace: Trace) -> Plan:
    """Which norm calls read or wrote states of the stream, given the state that went in and the one that came out."""
    intact = {key for key, few in trace.first.items() if torch.equal(_few(_call(trace, key).read), few)}
    norms = [e for e in trace.norms() if (e.norm, e.turn) in intact]  # what was overwritten in place cannot be used
    ends = (Stage("in"), Stage("out"))
    if not norms:
        return Plan(ends, False, None, "no norm was seen inside the block")
    post = _same(norms[-1].wrote, out)
    stages, current, ran, attended, front = [], x, "mlp", 0, None
    for event in trace.events:
        if isinstance(event, str):
            ran, attended = "attention" if attended == 0 else "cross attention", attended + 1
            continue
        if (event.norm, event.turn) not in intact:
            continue
        if _same(event.read, current):
            front = event.norm if not attended and front is None else front
            continue
        if _on_branch(event, current, norms, out, trace.made):
            continue
        name = _fresh(ran, [s.name for s in stages])
        stages.append(Stage(name, event.norm, event.turn))
        current, ran = event.read, "mlp"
        if post and event is not norms[-1]:
            stages.append(Stage(f"{name} normed", event.norm, event.turn, wrote=True))
            current = event.wrote
    note = (
        "" if stages else "attention and MLP run in parallel, or norms stand on branches only: only in and out are seen"
    )
    return Plan((ends[0], *stages, ends[1]), post and bool(stages), front, note)


def stage_values(plan: Plan, x: Tensor, out: Tensor, trace: Trace) -> dict[str, Tensor]:
    """The state at each stage; one whose norm was not called this time is left out."""
    calls = {(e.norm, e.turn): e for e in trace.norms()}
    values = {"in": x}
    for stage in plan.stages[1:-1]:
        call = calls.get((stage.norm or "", stage.turn))
        if call is not None:
            values[stage.name] = call.wrote if stage.wrote else call.read
    return values | {"out": out}


def _on_branch(event: Event, current: Tensor, norms: list[Event], out: Tensor, made: list[Tensor]) -> bool:
    """Whether what the norm read is not a state of the stream but something that is yet to be added to it."""
    later = [e.read for e in norms[next(i for i, e in enumerate(norms) if e is event) + 1 :]] + [out]
    if any(_adds(state, current, event.wrote) for state in later):
        return True
    if not any(_same(event.read, m) for m in made):
        return False  # made by an addition in the code of the block
    others = [m for m in made if not _same(m, event.read)]
    return not any(_adds(event.read, current, m) for m in others)


def _call(trace: Trace, key: tuple[str, int]) -> Event:
    return next(e for e in trace.norms() if (e.norm, e.turn) == key)


def _few(x: Tensor) -> Tensor:
    return x.detach().reshape(-1, x.shape[-1])[:PEEK]


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(_few(a), _few(b))


def _adds(total: Tensor, part: Tensor, more: Tensor) -> bool:
    """total = part + more, to rounding."""
    rounding = 4 * torch.finfo(total.dtype).eps
    total, part, more = (_few(t).double() for t in (total, part, more))
    return float((total - part - more).norm()) <= 1e-3 * float(more.norm()) + rounding * float(part.norm())


def _fresh(name: str, taken: list[str]) -> str:
    number = 1 + sum(t == name or (t.startswith(f"{name} ") and t.split()[-1].isdigit()) for t in taken)
    return name if number == 1 else f"{name} {number}"
