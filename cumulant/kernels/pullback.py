"""The backward pass of the streaming sweep: first derivatives in closed form, block by block.

For statistics T_i = Σ_j p_ij t_ij with incoming gradients g_T, every block needs

    X_ij = g_G + Σ_T g_T (t_ij − T_i) = left_i · right_j + constant_i + (terms in the score itself)
    ∂L/∂logit = p ∘ X,    ∂L/∂η = (p ∘ X) x,    ∂L/∂x = (p ∘ X)ᵀ η + pᵀ left

where `right` holds values, atoms, squared distances and log weights side by side, and `left` their incoming gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.kernels.columns import AtomColumns
from cumulant.kernels.inputs import Inputs, Plan
from cumulant.kernels.streaming import ranges, tiles
from cumulant.kernels.support import FlatSupport

TRACES = ("value_trace", "atom_trace")


class Factors:
    """`left` (g, q, k), `right` (g, n, k) and the constant (g, q) of X, and the columns of each part among the k."""

    def __init__(self, x: Inputs, columns: AtomColumns, out: dict[str, Tensor], grad: dict[str, Tensor]):
        self.columns = columns
        self.parts: dict[str, slice] = {}
        left, right, expected = [], [], []
        spots = (("mean", "value_trace", x.values), ("atom_mean", "atom_trace", x.atoms))
        for name, trace, points in spots:
            if points is None or not ({name, trace} & grad.keys()):
                continue
            row = grad.get(name, torch.zeros_like(out[name]))
            if trace in grad:
                row = row - 2 * grad[trace][..., None] * (out[name] - self.columns.centre[trace])
            left.append(row)
            right.append(points)
            expected.append((row * out[name]).sum(-1))
            self._append(name, points.shape[-1])
        for i, name in enumerate(self.columns.names):
            if name in grad:
                left.append(grad[name][..., None])
                right.append(self.columns.table[..., i : i + 1])  # pyright: ignore[reportOptionalSubscript]
                expected.append(grad[name] * self._column_mean(name, out))
                self._append(name, 1)
        zero = torch.zeros_like(out["log_normalizer"])
        self.left = torch.cat(left, -1) if left else None
        self.right = torch.cat(right, -1) if right else None
        self.constant = grad.get("log_normalizer", zero) - (sum(expected) if expected else 0)

    def _append(self, name: str, width: int) -> None:
        start = max((s.stop for s in self.parts.values()), default=0)
        self.parts[name] = slice(start, start + width)

    def _column_mean(self, name: str, out: dict[str, Tensor]) -> Tensor:
        if name == "mean_log_weight":
            return out[name]
        points = "mean" if name == "value_trace" else "atom_mean"
        return out[name] + (out[points] - self.columns.centre[name]).square().sum(-1)


def pull_back(
    x: Inputs,
    plan: Plan,
    columns: AtomColumns,
    out: dict[str, Tensor],
    best: Tensor | None,
    grad: dict[str, Tensor],
    needs: tuple[bool, ...],
) -> list[Tensor | None]:
    """Gradients of eta, atoms, values, per_atom and per_pair (None where not needed); not those through the traces of
    rows that ``columns`` leaves out."""
    # a row without atoms has no gradient, whatever comes in
    alive = out["log_normalizer"] > -torch.inf
    grad = {k: torch.where(alive if v.ndim == alive.ndim else alive[..., None], v, 0) for k, v in grad.items()}
    if columns.without_trace is not None:
        grad |= {k: grad[k].masked_fill(columns.without_trace, 0) for k in TRACES if k in grad}
    factors = Factors(x, columns, out, grad)
    total = [t.new_zeros(t.shape) if t is not None and need else None for t, need in zip(x[:5], needs, strict=True)]
    direct = None if factors.right is None else factors.right.new_zeros(factors.right.shape)
    groups, queries, _ = x.eta.shape
    step, rows, cols = tiles(groups, queries, x.atoms.shape[1])
    space = x.eta.new_empty(2, step, rows, cols)
    support = x.support(plan.band)
    for heads in ranges(groups, step):
        for strip in ranges(queries, rows):
            for span in ranges(x.atoms.shape[1], cols):
                if not plan.band.hides(strip, span):
                    _block(x, factors, support, out, grad, total, direct, (heads, strip, span), space)
    if direct is not None:
        _direct(x, factors, direct, total)
    if "max_score" in grad and best is not None:
        add_best(x, grad["max_score"], best, total)
    return total


def _block(x: Inputs, factors: Factors, support: FlatSupport, out, grad, total, direct, where, space) -> None:
    heads, rows, cols = where
    eta, atoms = x.eta[heads, rows], x.atoms[heads, cols]
    score, p = (s[: eta.shape[0], : eta.shape[1], : atoms.shape[1]] for s in space)
    torch.bmm(eta, atoms.mT, out=score)
    logits = support.weigh(score, heads, rows, cols)
    top = logits.amax(-1)
    torch.softmax(logits, -1, out=p)
    g = out["log_normalizer"][heads, rows]
    here = top > -torch.inf
    if logits is not score:
        p.masked_fill_(~here[..., None], 0)
    # this block's share of the row, e^{G_block − G}; it scales the short rows instead of the long ones
    share = torch.where(here, torch.exp(top - torch.where(here, g, 0)) / p.amax(-1).clamp_min(1e-38), 0)
    slope = (factors.constant[heads, rows] * share)[..., None]
    left = None
    if factors.left is not None and factors.right is not None:
        left = factors.left[heads, rows] * share[..., None]
        slope = torch.baddbmm(slope, left, factors.right[heads, cols].mT)
    slope, extra = _score_terms(slope, score, p, share, out, grad, heads, rows)
    if "mean_log_weight" in grad and x.per_pair is not None:
        incoming = (grad["mean_log_weight"][heads, rows] * share)[..., None]
        w = support.log_weight(heads, rows, cols)
        centred = w - out["mean_log_weight"][heads, rows, None]
        slope = slope + incoming * centred
    _accumulate(x, total, direct, where, eta, atoms, p, slope, extra, left, grad, share)


def _score_terms(slope, score, p, share, out, grad, heads, rows):
    """Terms of X in the score, and the direct dependence of score statistics on it."""
    extra = None
    if "log_sum_square" in grad:
        ratio = torch.exp(2 * out["log_normalizer"] - out["log_sum_square"])[heads, rows]
        ratio = torch.where(ratio.isfinite(), ratio, 0)
        slope = slope + p * (2 * grad["log_sum_square"][heads, rows] * share.square() * ratio)[..., None]
    if "mean_score" in grad or "score_variance" in grad:
        centred = score - out["mean_score"][heads, rows, None]
        linear = grad.get("mean_score")
        if linear is not None:
            linear = (linear[heads, rows] * share)[..., None]
            slope = slope + linear * centred
            extra = linear
        if "score_variance" in grad:
            quadratic = (grad["score_variance"][heads, rows] * share)[..., None]
            slope = slope + quadratic * (centred.square() - out["score_variance"][heads, rows, None])
            bent = 2 * quadratic * centred
            extra = bent if extra is None else extra + bent
    return slope, extra


def _accumulate(x, total, direct, where, eta, atoms, p, slope, extra, left, grad, share) -> None:
    heads, rows, cols = where
    d_logit = p * slope
    d_score = d_logit if extra is None else p * (slope + extra)
    if total[0] is not None:
        total[0][heads, rows] += torch.bmm(d_score, atoms)
    if total[1] is not None:
        total[1][heads, cols] += torch.bmm(d_score.mT, eta)
    if direct is not None:
        direct[heads, cols] += torch.bmm(p.mT, left)
    if x.per_pair is not None and "mean_log_weight" in grad:
        d_logit = d_logit + p * (grad["mean_log_weight"][heads, rows] * share)[..., None]
    if total[3] is not None:
        total[3][heads, cols] += d_logit.sum(1)
    if total[4] is not None:
        if total[4].shape[0] == 1:
            total[4][:, rows, cols] += d_logit.sum(0, keepdim=True)
        else:
            total[4][heads, rows, cols] += d_logit


def _direct(x: Inputs, factors: Factors, direct: Tensor, total: list[Tensor | None]) -> None:
    """What reaches values, atoms and weights without passing through the logits: pᵀ left."""
    for slot, points, name, trace in ((2, x.values, "mean", "value_trace"), (1, x.atoms, "atom_mean", "atom_trace")):
        sink = total[slot]
        if sink is None or points is None or name not in factors.parts:
            continue
        sink += direct[..., factors.parts[name]]
        if trace in factors.parts:
            sink += 2 * (points - factors.columns.centre[trace]) * direct[..., factors.parts[trace]]
    if total[3] is not None and "mean_log_weight" in factors.parts:
        total[3] += direct[..., factors.parts["mean_log_weight"]][..., 0]


def add_best(x: Inputs, grad: Tensor, best: Tensor, total: list[Tensor | None]) -> None:
    """The maximum moves with the atom that attains it (the first one, on ties)."""
    if not x.atoms.shape[1]:
        return
    index = best[..., None].expand(*best.shape, x.atoms.shape[-1])
    if total[0] is not None:
        total[0] += grad[..., None] * x.atoms.gather(1, index)
    if total[1] is not None:
        total[1].scatter_add_(1, index, grad[..., None] * x.eta)
