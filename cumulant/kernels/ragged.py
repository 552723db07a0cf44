"""Heads with atoms of their own number, one after another in one storage: no padding is held, and none is read."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack  # pyright: ignore[reportMissingImports]

from cumulant.kernels.autocast import autocast
from cumulant.kernels.dense import accumulate
from cumulant.kernels.moments import Moments
from cumulant.kernels.native.arguments import Call
from cumulant.kernels.native.call import PLAIN, entries, recorded
from cumulant.kernels.native.direct import PLANS, Arguments, DirectPlan, MomentsSettings, Shapes, make_plan
from cumulant.kernels.operator import as_record, scaled_moments


class RaggedAtoms(NamedTuple):
    """The measures of all key heads of a batch: Σ_j e^{w_j} δ_(x_j, v_j) over the rows j of each.

    atoms           (total, d)
    values          (total, e)
    log_weights     (total,) in the precision that sums are formed in, or None: 0
    starts, lengths (batch, key heads) int64 on the CPU: head h of sequence b has the rows starts, …,
                    starts + lengths − 1. Several may share rows
    """

    atoms: Tensor
    values: Tensor
    log_weights: Tensor | None
    starts: Tensor
    lengths: Tensor

    def head(self, batch: int, key_head: int) -> slice:
        """The rows of one head."""
        start = int(self.starts[batch, key_head])
        return slice(start, start + int(self.lengths[batch, key_head]))


def ragged_moments(eta: Tensor, x: RaggedAtoms, settings: MomentsSettings, cap: float | None = None) -> Moments:
    """`moments` of every query over the atoms of its own head, all visible.

        G_i = log Σ_j exp(scale · ⟨η_i,x_j⟩ + w_j),      mean_i = Σ_j p_ij v_j

    eta       (batch, heads, q, d); consecutive heads share a key head
    settings  names of statistics, with "mean", and the factor of eta; no order and no window
    cap       scores are cap · tanh(scale · ⟨η,x⟩ / cap)

    A decoding step costs what the atoms of the heads together cost, by one call of the native kernel; with gradients, a
    cap, or without that kernel it is one call of `moments` for each key head.

    >>> x = RaggedAtoms(torch.zeros(3, 2), torch.tensor([[1.0], [2.0], [4.0]]), None, torch.tensor([[0, 1]]),
    ...                 torch.tensor([[1, 2]]))
    >>> ragged_moments(torch.zeros(1, 2, 1, 2), x, MomentsSettings(frozenset({"mean"}), 1.0, False, None, None)).mean
    tensor([[[[1.]],
    <BLANKLINE>
             [[3.]]]])
    """
    eta, atoms, values = autocast(eta, x.atoms, x.values)
    x = x._replace(atoms=atoms, values=values)  # masses stay in the precision of sums
    found = _by_kernel(eta, x, settings) if cap is None else None
    return _by_head(eta, x, settings, cap) if found is None else found


_plans: dict[tuple, DirectPlan | None] = {}


def _by_kernel(eta: Tensor, x: RaggedAtoms, settings: MomentsSettings) -> Moments | None:
    tensors = (eta, x.atoms, x.values, x.log_weights)
    if entries() is None or recorded() or peek_interpreter_stack() is not None or not x.atoms.shape[0]:
        return None
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return None
    given = Arguments(eta, x.atoms, x.values, x.log_weights, None, None)
    layout = (None if t is None else (type(t), t.shape, t.stride(), t.dtype, t.is_cpu, t.is_neg()) for t in tensors)
    key = (settings, x.starts.shape, *layout)
    plan = _plans.get(key)
    if plan is None and key not in _plans:
        if len(_plans) >= PLANS:
            _plans.clear()
        plan = _plans[key] = _plan(given, x, settings)
    if plan is None:
        return None

    def point(call: Call) -> None:
        call.starts, call.lengths = x.starts.data_ptr(), x.lengths.data_ptr()

    out, _, irregular = plan.forward(given, point)
    return None if irregular else as_record(given, out, nonempty=False)


def _plan(given: Arguments, x: RaggedAtoms, settings: MomentsSettings) -> DirectPlan | None:
    if any(t is not None and type(t) not in PLAIN for t in given):
        return None
    batch, heads = given.eta.shape[:2]
    shapes = Shapes((batch, heads), heads // x.starts.shape[1], False, None, 0)
    return make_plan(given, settings, lambda *_: shapes, {"starts": x.starts})


def _by_head(eta: Tensor, x: RaggedAtoms, settings: MomentsSettings, cap: float | None) -> Moments:
    batch, key_heads = x.starts.shape
    grouped = eta.reshape(batch, key_heads, -1, *eta.shape[2:])  # (batch, key heads, heads of a group, q, d)
    records = [_head(grouped[b, h], x, x.head(b, h), settings, cap) for b, h in product(range(batch), range(key_heads))]

    def stacked(tensors: list[Tensor]) -> Tensor:
        return torch.stack(tensors).reshape(*eta.shape[:3], *tensors[0].shape[2:])

    statistics = {name: stacked([r.statistics[name] for r in records]) for name in records[0].statistics}
    return Moments(stacked([r.log_normalizer for r in records]), statistics)


def _head(eta: Tensor, x: RaggedAtoms, rows: slice, settings: MomentsSettings, cap: float | None) -> Moments:
    """Of the queries (heads of a group, q, d) of one key head."""
    atoms, values = x.atoms[rows], x.values[rows]
    weights = None if x.log_weights is None else x.log_weights[rows]
    if weights is not None:
        eta, atoms, values = accumulate(eta), accumulate(atoms), accumulate(values)
    if cap is not None:
        eta, atoms, values = accumulate(eta) * settings.scale, accumulate(atoms), accumulate(values)
        scores = cap * torch.tanh(eta @ atoms.mT / cap)
        weights = scores if weights is None else scores + weights
        eta, settings = torch.zeros_like(eta), settings._replace(scale=1.0)
    return scaled_moments(Arguments(eta, atoms, values, weights, None, None), None, settings, "auto")
