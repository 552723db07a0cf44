"""What every head, attention and MLP adds to the residual stream of its block.

Between two stages of a block (`residual_stages`) one sublayer is added to the stream, and their difference is what it
adds. What heads add goes through the output projection, and in some models through a norm on the branch or a constant
factor; which of these it is, is found in the first pass and checked against the stream, so that the heads and the bias
of a layer sum to what its attention adds. Blocks where attention and MLP run in parallel are split by what attention
adds, if the rest is what another module returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cumulant.nn.attention_interface import is_cross_attention
from cumulant.observatory.hooks.hidden_states import BlockPass, ModelPass
from cumulant.observatory.hooks.residual_stages import BlockStages, first_tokens, is_sum, same_states
from cumulant.observatory.hooks.structure import Norm, NotFound, attention_modules, norm_of
from cumulant.observatory.hooks.weights import head_outputs, output_projection
from cumulant.observatory.statistics.contributions import (
    CONTRIBUTIONS,
    SUBLAYERS,
    Contribution,
    HeadProjection,
    contribution,
    head_contributions,
)
from cumulant.observatory.statistics.states import Statistic, tally
from cumulant.observatory.statistics.tally import Tally
from cumulant.observatory.statistics.undefined import reason_in_words

CONTRIBUTION_TOKENS = 32  # one token in so many is taken
NOT_SEEN = "it is in no block whose states were observed"
BETWEEN = "between its output projection and the stream stands something that is neither a norm nor a factor"


class HeadWriter(NamedTuple):
    """How the heads of one attention module reach the stream.

    sublayer       "attention" or "cross_attention"
    before, after  stages of the block; None: attention and MLP are not seen apart
    parallel       then whether the MLP reads the stream without what attention adds
    projection     slices of the output projection, with gain of the norm and factor folded in
    factor         of what is projected; 1 where nothing stands between
    path, norm     in the block, of the norm on the branch, which divides by a number of each token; or None
    """

    sublayer: str
    before: str
    after: str | None
    parallel: bool
    projection: HeadProjection
    factor: float
    path: str | None
    norm: Norm | None


class ProjectionCall(NamedTuple):
    """What an output projection read, (b, L, heads · e), and returned, (b, L, D)."""

    read: Tensor
    made: Tensor


class ContributionObserver:
    """Statistics of what is added to the stream.

    model  in the passes that it is told of
    add    takes `block/out/quantity` and a tally of a sublayer
    exact  take every token, not one in `CONTRIBUTION_TOKENS`

    tallies  "attention module/quantity" → a cell for every head
    """

    def __init__(self, model: nn.Module, add: Callable[[str, Statistic], None], *, exact: bool = False):
        self.model, self.add, self.number = model, add, 1 if exact else CONTRIBUTION_TOKENS
        self.tallies: dict[str, Tally] = {}
        self.reasons: dict[str, str] = {}  # attention module or block → why nothing is known
        self.writers: dict[str, dict[str, HeadWriter]] = {}  # block → attention module → …
        self.additions: dict[str, dict[str, tuple[str, str]]] = {}  # block → sublayer → stages before and after
        self.projections: dict[str, nn.Module] = {}
        self.calls: dict[str, ProjectionCall] = {}
        for name in attention_modules(model):
            projection = output_projection(model, name)
            if isinstance(projection, NotFound):
                self.reasons[name] = projection.reason
            else:
                self.projections[name] = projection

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Keep what output projections read and return while inside."""

        def keep(name: str):
            def hook(module, args, output) -> None:
                if args and isinstance(output, Tensor):
                    self.calls[name] = ProjectionCall(args[0], output)

            return hook

        with ExitStack() as stack:
            for name, projection in self.projections.items():
                stack.callback(projection.register_forward_hook(keep(name)).remove)
            yield

    def end(self, running: ModelPass, output: object) -> None:
        """The pass has ended."""
        self.calls = {}

    def block(self, call: BlockPass) -> None:
        """Take in one call of a block."""
        if call.block not in self.writers:
            self._find(call)
        index = call.tokens.one_in(self.number)
        position = call.tokens.position[index]
        if not len(position):
            return
        values = {stage: _rows(x, index) for stage, x in call.values.items()}
        update = values["out"] - values["in"]
        for sublayer, (before, after) in self.additions[call.block].items():
            added = values[after] - values[before]
            self._add_sublayer(call.block, sublayer, contribution(added, values[before], update), position)
        for name, writer in self.writers[call.block].items():
            projected = self.calls.pop(name, None)
            if projected is None or projected.made.shape != call.values["in"].shape:
                continue
            added = self._factor(call, writer, projected, index)
            if added is None:
                continue
            factor, made = added
            if writer.after is None:
                attention = contribution(made, values["in"], update)
                self._add_sublayer(call.block, writer.sublayer, attention, position)
                stream = values["in"] if writer.parallel else values["in"] + made
                self._add_sublayer(call.block, "mlp", contribution(update - made, stream, update), position)
            heads = _rows(projected.read, index).unflatten(1, (len(writer.projection.gram), -1))
            found = head_contributions(heads, writer.projection, values[writer.before], update, factor)
            for quantity, numbers in zip(CONTRIBUTIONS, found, strict=True):
                self._merge(f"{name}/{quantity}", Tally.of(numbers, position))

    def undefined(self, modules: Sequence[str]) -> dict[str, str]:
        """Quantity → why it is not defined in some of these attention modules."""
        missing = [name for name in modules if f"{name}/{CONTRIBUTIONS[0]}" not in self.tallies]
        reasons = {name: self.reasons.get(name, NOT_SEEN) for name in missing}
        return dict.fromkeys(CONTRIBUTIONS, reason_in_words(reasons, len(modules))) if missing else {}

    # ------------------------------------------------------------------ the first pass

    def _find(self, call: BlockPass) -> None:
        self.additions[call.block] = additions = _additions(call.plan)
        self.writers[call.block] = {}
        inside = [name for name in self.projections if name.startswith(f"{call.block}.")]
        for name in inside:
            writer = self._writer(call, name, additions)
            if isinstance(writer, NotFound):
                self.reasons[name] = writer.reason
            else:
                self.writers[call.block][name] = writer

    def _writer(self, call: BlockPass, name: str, additions: dict[str, tuple[str, str]]) -> HeadWriter | NotFound:
        projected, output = self.calls.get(name), head_outputs(self.model, name)
        if isinstance(output, NotFound):
            return output
        if projected is None:
            return NotFound("its output projection is not called as a module")
        if projected.made.shape != call.values["in"].shape:
            return NotFound("what its output projection returns has another shape than the stream")
        sublayer = "cross_attention" if is_cross_attention(name) else "attention"
        before, after = additions.get(sublayer, ("in", None))
        whole = call.values[after or "out"]
        for made, weights, path, norm in self._ways(call, projected.made, output):
            factor = 1.0 if after is None else _multiple(whole, call.values[before], made)
            accounted = after is not None or any(is_sum(whole, call.values["in"] + made, y) for y in _others(call))
            if factor is not None and accounted:
                parallel = not any(is_sum(read, call.values["in"], made) for read in call.trace.read)
                projection = HeadProjection.of(weights.to(made.device) * factor)
                return HeadWriter(sublayer, before, after, parallel, projection, factor, path, norm)
        return NotFound(call.plan.note or BETWEEN if after is None else BETWEEN)

    def _ways(self, call: BlockPass, made: Tensor, output: Tensor) -> Iterator[tuple]:
        """What may be added to the stream: what was projected, or a norm of it, each with the weights of the heads."""
        yield made, output, None, None
        for event in call.trace.norms():
            if same_states(event.input, made):
                norm = norm_of(self.model.get_submodule(call.block).get_submodule(event.norm), made.shape[-1])
                if not isinstance(norm, NotFound):
                    weights = output - output.mean(1, keepdim=True) if norm.centred else output
                    yield event.output, norm.gain[:, None] * weights, event.norm, norm

    # ------------------------------------------------------------------ every pass

    def _factor(
        self, call: BlockPass, writer: HeadWriter, projected: ProjectionCall, index: tuple[Tensor, Tensor]
    ) -> tuple[Tensor | None, Tensor] | None:
        """(n,) by which the weights of the writer are to be multiplied, None for 1; and (n, D) what is added. None
        where the norm on the branch was not called this time."""
        made = _rows(projected.made, index)
        if writer.norm is None or writer.path is None:
            return None, made * writer.factor
        event = next((e for e in call.trace.norms() if e.norm == writer.path), None)
        if event is None:
            return None
        normed = _rows(event.output, index)
        shift = getattr(self.model.get_submodule(call.block).get_submodule(writer.path), "bias", None)
        bare = normed if shift is None else normed - shift.double()
        made = made - made.mean(1, keepdim=True) if writer.norm.centred else made
        scaled = writer.norm.gain.to(made.device) * made
        square = torch.linalg.vecdot(scaled, scaled)
        return torch.linalg.vecdot(bare, scaled) / square.clamp_min(torch.finfo(square.dtype).tiny), normed

    def _add_sublayer(self, block: str, sublayer: str, found: Contribution, position: Tensor) -> None:
        for quantity, numbers in zip(CONTRIBUTIONS, found, strict=True):
            self.add(f"{block}/out/{sublayer}_{quantity}", tally(numbers, position))

    def _merge(self, key: str, new: Tally) -> None:
        self.tallies[key] = self.tallies[key].merge(new) if key in self.tallies else new


def _additions(plan: BlockStages) -> dict[str, tuple[str, str]]:
    """sublayer → the stages before and after it; none where only the ends of a block are seen."""
    if len(plan.stages) <= 2:
        return {}
    out = {}
    for before, after in pairwise(plan.stages):
        if after.is_output or (plan.post_norm and after.name == "out"):
            continue  # a norm on the stream adds nothing
        out[("mlp" if after.name == "out" else after.name).replace(" ", "_")] = (before.name, after.name)
    return {sublayer: stages for sublayer, stages in out.items() if sublayer in SUBLAYERS}


def _others(call: BlockPass) -> list[Tensor]:
    """First tokens of what modules of the block returned, norms among them."""
    return [*call.trace.outputs, *(first_tokens(event.output) for event in call.trace.norms())]


def _multiple(total: Tensor, part: Tensor, more: Tensor) -> float | None:
    """m with total = part + m · more, to rounding: 1, or what some models multiply branches by; None if there is none.

    >>> x = torch.eye(2)
    >>> _multiple(x + 0.5, x, torch.ones(2, 2)), _multiple(x, torch.zeros(2, 2), torch.ones(2, 2))
    (0.5, None)
    """
    if is_sum(total, part, more):
        return 1.0
    added, one = (first_tokens(t).double() for t in (total - part, more))
    square = float(one.square().sum())
    factor = float((added * one).sum()) / square if square > 0 else 0.0
    return factor if factor and is_sum(total, part, factor * more) else None


def _rows(x: Tensor, index: tuple[Tensor, Tensor]) -> Tensor:
    """(n, D) double."""
    return x.detach()[index[0].to(x.device), index[1].to(x.device)].double()
