"""`moments` on tensors of a GPU as they lie: the plan of the native kernel, and its call by the kernels in Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from cumulant.kernels.native.arguments import Call
from cumulant.kernels.native.call import PLAIN
from cumulant.kernels.native.direct import TRACES, Arguments, DirectPlan, MomentsSettings, Shapes, make_plan
from cumulant.kernels.triton import library

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDEST = 256


class TritonPlan(DirectPlan):
    """Results are not looked at: that would wait for the device. Queries that see what is not finite have NaN by the
    kernel's own account, and nothing is computed again."""

    @classmethod
    def reads(cls, x: Arguments) -> bool:
        if any(t is not None and (type(t) not in PLAIN or t.device != x.eta.device or t.is_neg()) for t in x):
            return False
        if x.eta.dtype not in DTYPES or max(x.eta.shape[-1], 0 if x.values is None else x.values.shape[-1]) > WIDEST:
            return False
        return not library.refusal(x.eta.device.type, x.eta.device.index)

    @classmethod
    def forms(cls, names: Set[str], x: Arguments) -> bool:
        return not names & set(TRACES) and (x.values is None or "atom_mean" not in names)

    def forward(
        self, x: Sequence[Tensor | None], more: Callable[[Call], object] | None = None
    ) -> tuple[dict[str, Tensor], Call, bool]:
        from cumulant.kernels.triton import launch

        c, tensors = self._call(x)
        device = x[1].device  # pyright: ignore[reportOptionalMemberAccess]
        out = {name: torch.empty(shape, dtype=self.dtype, device=device) for name, shape in self.outputs.items()}
        launch.forward(c, self._named(tensors), out)
        return out, c, False

    def backward(
        self, x: Sequence[Tensor | None], out: dict[str, Tensor], grad: dict[str, Tensor], needs: Sequence[bool]
    ) -> list[Tensor | None] | None:
        from cumulant.kernels.triton import launch

        if not out["log_normalizer"].numel():
            return [torch.zeros_like(t) if need and t is not None else None for t, need in zip(x, needs, strict=True)]
        c, tensors = self._call(x)
        new = partial(torch.zeros, dtype=self.dtype, device=out["log_normalizer"].device)
        made: list[Tensor | None] = [None] * 6
        if needs[0]:
            made[0] = new((*self.outputs["log_normalizer"], c.width))
        if needs[1]:
            made[1] = new((*self.groups, c.keys, c.width))
        if needs[2] and grad.keys() & {"mean"}:
            made[2] = new((*self.groups, c.keys, c.value_width))
        if needs[3] and self.per_pair:
            made[3] = self.of_pairs(c, new(x[3].shape))  # pyright: ignore[reportOptionalMemberAccess]
        elif needs[3]:
            made[3] = new((*self.groups, c.keys))
        launch.backward(c, self._named(tensors), out, grad, self._named(made))
        if needs[5]:
            made[5] = _of_sink(self._of_rows(x[5]), out, grad)
        return self._summed(x, made)

    def _of_rows(self, sink: Tensor | None) -> Tensor:
        """The sink of each query."""
        assert sink is not None
        wide = sink.detach().to(self.dtype).reshape(self.targets[5] or ()).expand(self.lead)
        return wide.reshape(self.outputs["log_normalizer"][:-1])[..., None]

    def _named(self, x: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
        eta, atoms, values, w, mask, sink = x
        per_atom, per_pair = (None, w) if self.per_pair else (w, None)
        named = {"eta": eta, "atoms": atoms, "values": values, "per_atom": per_atom, "per_pair": per_pair}
        return named | {"mask": mask, "sink": sink}


def with_max_logit(x: Arguments, settings: MomentsSettings, shapes: Shapes) -> dict[str, Tensor] | None:
    """The statistics by name, with "max_logit"; None where the kernels do not serve."""
    plan = make_plan(x, settings, lambda *_: shapes, kind=TritonPlan)
    if plan is None:
        return None
    more = {**plan.outputs, "max_logit": plan.outputs["log_normalizer"]}
    return replace(plan, outputs=more).forward(x)[0]


def _of_sink(sink: Tensor, out: dict[str, Tensor], grad: dict[str, Tensor]) -> Tensor:
    """The gradient of the sink's log weight by each query: of an atom with score 0 and value 0 (see `backward`)."""
    from cumulant.kernels.triton.launch import statistics_of

    g = out["log_normalizer"]
    there = (sink > -torch.inf) & (g != -torch.inf)
    p = torch.where(there, torch.exp(sink - g), 0)
    factors = statistics_of(out, grad)
    slope = factors.constant + 0 * p
    if factors.mean_score is not None:
        y = -factors.mean_score
        slope = slope + y * (grad.get("mean_score", 0) + grad.get("score_variance", 0) * y)
    if factors.d_log_sum_square is not None:
        slope = slope + factors.d_log_sum_square * p
    if factors.d_mean_log_weight is not None:
        slope = slope + factors.d_mean_log_weight * (torch.where(there, sink, 0) + 1)
    return torch.where(there, p * slope, 0)
