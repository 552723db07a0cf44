"""Every statistic in one sweep over blocks of queries × atoms: exact, twice differentiable, O(q + n) memory.

A block is normalised on its own (torch.softmax is the one fused exponential torch has on CPU, and it does not slow down
on sharp scores as torch.exp does), its statistics are formed while it is in cache, and blocks are merged online. The
backward sweep recomputes the blocks and uses closed forms. With p the weights and L the loss,

    ∂L/∂logit_ij = p_ij ( Σ_T g_T,i (t_T,ij − T_i) + g_G,i )         for statistics of the form T_i = Σ_j p_ij t_T,ij

so all of them share one pass: the inner products in t_T are one matrix product of `left` rows and `right` columns.
Second derivatives recompute the reference kernel on a few rows at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.kernels.columns import AtomColumns
from cumulant.kernels.inputs import Inputs, Plan
from cumulant.kernels.support import FlatSupport

BLOCK = 1 << 18  # scores in a block: 1 MiB in float32
ROWS = 256
WHOLE = 2048  # atoms up to which one thread takes them all at once


def tiles(groups: int, queries: int, atoms: int) -> tuple[int, int, int]:
    """Sizes of a block: heads together, rows, columns.

    One thread takes one head at a time, all atoms at once while they are few. Several threads share each operation, so
    they are given all heads together. The figures are measured; see `cumulant bench`.
    """
    alone = torch.get_num_threads() == 1
    if alone and atoms <= WHOLE:
        cols = max(1, atoms)
        rows = max(1, min(queries, BLOCK // cols))
    elif alone or groups == 1:
        rows = max(1, min(queries, 2 * ROWS))
        cols = max(1, min(atoms, 2 * BLOCK // rows))
    else:
        rows = max(1, min(queries, ROWS))
        cols = max(1, min(atoms, BLOCK // (2 * rows)))
    return max(1, min(groups, (BLOCK if alone else 4 * BLOCK) // (rows * cols))), rows, cols


def ranges(total: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, total)) for i in range(0, total, step)]


# ---------------------------------------------------------------------- forward


def sweep(x: Inputs, plan: Plan, columns: AtomColumns) -> tuple[list[Tensor], Tensor | None]:
    """The requested outputs in order, and the index of the best atom where ``max_score`` is wanted."""
    groups, queries, _ = x.eta.shape
    step, rows, cols = tiles(groups, queries, x.atoms.shape[1])
    out = {name: empty_output(x, name) for name in plan.outputs}
    best = x.eta.new_zeros((groups, queries), dtype=torch.int64) if "max_score" in plan.statistics else None
    support = x.support(plan.band)
    space = x.eta.new_empty(3, step, rows, cols)
    for heads in ranges(groups, step):
        for strip in ranges(queries, rows):
            total = Strip(x, plan, columns, support, heads, strip)
            for span in ranges(x.atoms.shape[1], cols):
                if not plan.band.hides(strip, span):
                    total.absorb(span, space)
            total.write(out, best)
    return [out[name] for name in plan.outputs], best


def empty_output(x: Inputs, name: str) -> Tensor:
    groups, queries, dim = x.eta.shape
    if name == "mean" and x.values is not None:
        return x.eta.new_empty(groups, queries, x.values.shape[-1])
    return x.eta.new_empty(groups, queries, dim) if name in ("mean", "atom_mean") else x.eta.new_empty(groups, queries)


class Strip:
    """Running statistics of some rows: sums relative to ``top`` with total weight ``mass``; means already divided."""

    def __init__(self, x: Inputs, plan: Plan, columns: AtomColumns, support: FlatSupport, heads: slice, rows: slice):
        self.x, self.plan, self.columns, self.support = x, plan, columns, support
        self.heads, self.rows = heads, rows
        self.eta = x.eta[heads, rows]
        self.top: Tensor | None = None  # largest logit so far
        self.mass: Tensor | None = None  # Σ exp(logit − top)
        self.means: dict[str, Tensor] = {}
        self.variance: Tensor | None = None
        self.square: Tensor | None = None  # Σ p²
        self.best: tuple[Tensor, Tensor] | None = None

    def absorb(self, cols: slice, space: Tensor) -> None:
        """Add the atoms of some columns."""
        wanted = self.plan.statistics
        score, p, spare = (s[: self.eta.shape[0], : self.eta.shape[1], : cols.stop - cols.start] for s in space)
        atoms = self.x.atoms[self.heads, cols]
        torch.bmm(self.eta, atoms.mT, out=score)
        logits = self.support.weigh(score, self.heads, self.rows, cols)
        top = logits.amax(-1)
        torch.softmax(logits, -1, out=p)
        if logits is not score:
            empty = top == -torch.inf
            p.masked_fill_(empty[..., None], 0)
            top = torch.where(empty, -torch.inf, top)
        peak = p.amax(-1)
        means = self._means(p, atoms, cols)
        square = torch.mul(p, p, out=spare).sum(-1) if "log_sum_square" in wanted else None
        if "max_score" in wanted:
            self._keep_best(score, logits, cols)
        variance = None
        if self._needs_scores:
            means["mean_score"], variance = self._score_moments(score, p, spare, means.get("atom_mean"))
        self._merge(top, peak, means, variance, square)

    @property
    def _needs_scores(self) -> bool:
        """mean_score is ⟨η, mean of the atoms⟩ where that mean is known."""
        wanted = self.plan.statistics
        return "score_variance" in wanted or ("mean_score" in wanted and "atom_mean" not in wanted)

    def _means(self, p: Tensor, atoms: Tensor, cols: slice) -> dict[str, Tensor]:
        means, wanted = {}, self.plan.statistics
        if "atom_mean" in wanted:
            means["atom_mean"] = torch.bmm(p, atoms)
        if self.x.values is not None and "mean" in wanted:
            means["mean"] = torch.bmm(p, self.x.values[self.heads, cols])
        if self.columns.table is not None:
            means["columns"] = torch.bmm(p, self.columns.table[self.heads, cols])
        w = self.support.log_weight(self.heads, self.rows, cols) if self.x.per_pair is not None else None
        if w is not None and "mean_log_weight" in wanted:
            means["mean_log_weight"] = (p * w).sum(-1)
        return means

    def _score_moments(
        self, score: Tensor, p: Tensor, spare: Tensor, atom_mean: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance of the score in this block, centred; destroys all buffers."""
        mean = torch.mul(p, score, out=spare).sum(-1) if atom_mean is None else (self.eta * atom_mean).sum(-1)
        if "score_variance" not in self.plan.statistics:
            return mean, torch.zeros_like(mean)
        score.sub_(mean[..., None]).square_()
        return mean, p.mul_(score).sum(-1)

    def _keep_best(self, score: Tensor, logits: Tensor, cols: slice) -> None:
        seen = score if logits is score else torch.where(logits == -torch.inf, -torch.inf, score)
        value, index = seen.max(-1)
        index = index + cols.start
        if self.best is not None:
            better = value > self.best[0]
            value, index = torch.where(better, value, self.best[0]), torch.where(better, index, self.best[1])
        self.best = value, index

    def _merge(self, top: Tensor, peak: Tensor, means: dict, variance: Tensor | None, square: Tensor | None) -> None:
        """Mix with what is there; a block's own mass is 1/peak relative to its top."""
        mass = torch.where(peak > 0, 1 / peak, 0)
        if self.top is None or self.mass is None:
            self.top, self.mass, self.means, self.variance, self.square = top, mass, means, variance, square
            return
        ceiling = torch.maximum(self.top, top)
        floor = torch.where(ceiling == -torch.inf, 0, ceiling)
        old, new = self.mass * torch.exp(self.top - floor), mass * torch.exp(top - floor)
        total = old + new
        share = new / torch.where(total > 0, total, 1)  # of the new block
        rest = torch.where(total > 0, 1 - share, 0)
        if variance is not None and self.variance is not None:
            gap = means["mean_score"] - self.means["mean_score"]
            self.variance = self.variance * rest + variance * share + gap.square() * share * rest
        if square is not None and self.square is not None:
            self.square = self.square * rest.square() + square * share.square()
        for name, value in means.items():
            wide = value.ndim > share.ndim
            u, v = (rest[..., None], share[..., None]) if wide else (rest, share)
            self.means[name] = (self.means[name] * u).addcmul_(value, v)
        self.top, self.mass = ceiling, total

    def write(self, out: dict[str, Tensor], best: Tensor | None) -> None:
        """Store this strip's rows."""
        where = (self.heads, self.rows)
        if self.top is None or self.mass is None:  # no block was visible
            for name, tensor in out.items():
                tensor[where] = -torch.inf if name in EMPTY else 0
            return
        g = torch.where(self.mass > 0, self.top + torch.log(self.mass), -torch.inf)
        means = dict(self.means)
        for i, name in enumerate(self.columns.names):
            means[name] = means["columns"][..., i]
        if "mean_score" not in means and "atom_mean" in means:
            means["mean_score"] = (self.eta * means["atom_mean"]).sum(-1)
        for name, points in (("value_trace", "mean"), ("atom_trace", "atom_mean")):
            if name in means:
                offset = means[points] - self.columns.centre[name][self.heads]
                means[name] = torch.where(g > -torch.inf, (means[name] - offset.square().sum(-1)).clamp_min(0), 0)
                if self.columns.single is not None:
                    means[name] = means[name].masked_fill(self.columns.single[where], 0)
        known = means | {"log_normalizer": g}
        known.setdefault("mean_log_weight", torch.zeros_like(g))
        if self.variance is not None:
            known["score_variance"] = self.variance
        if self.square is not None:
            known["log_sum_square"] = torch.log(self.square) + 2 * g
        if self.best is not None and best is not None:
            known["max_score"], best[where] = self.best
        for name, tensor in out.items():
            tensor[where] = known[name]


EMPTY = ("log_normalizer", "max_score", "log_sum_square")
