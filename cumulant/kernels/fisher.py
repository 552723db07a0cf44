"""∇²G(η) v = Cov_p(x) v, block by block, without weights or matrices in memory.

With u_j = ⟨x_j, v⟩:   ∇²G v = Σ_j p_j (u_j − ū) x_j.   One block gives it from three products; where the atoms need
several, each is centred on its own and blocks are merged by

    cov ← rest · cov + share · cov_b + rest · share · (ū_b − ū)(m_b − m)
"""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.kernels.dense import normalize, without_nonfinite
from cumulant.kernels.evaluate import ordinary_inputs
from cumulant.kernels.inputs import Inputs, Plan
from cumulant.kernels.native import flat as native
from cumulant.kernels.recompute import StripResults, cut, log_weights_of, or_zeros, part_of, present, strips, untracked
from cumulant.kernels.stream_function import fold, unfold
from cumulant.kernels.streaming import ranges, tiles


def fisher_sweep(x: Inputs, vector: Tensor, plan: Plan) -> Tensor:
    """∇²G(η) v for eta and vector (g, q, d)."""
    if plan.engine == "native":
        out, finite = native.fisher(x, vector, plan)
        if finite:
            return out
    x, ordinary = ordinary_inputs(x, plan, 3, vector)
    if not ordinary:
        results = StripResults(x, 1)
        for heads, rows in strips(x, plan):
            part, small = cut(x, plan, heads, rows)
            results.add(heads, rows, [], [reference_product(part, vector[heads, rows], small)])
        return results.rowwise()[0]
    groups, queries, _ = x.eta.shape
    step, rows, cols = tiles(groups, queries, x.atoms.shape[1])
    out = x.eta.new_zeros(x.eta.shape)
    support = x.support(plan.band)
    space = x.eta.new_empty(3, step, rows, cols)
    for heads in ranges(groups, step):
        for strip in ranges(queries, rows):
            spans = [s for s in ranges(x.atoms.shape[1], cols) if not plan.band.hides(strip, s)]
            blocks = (_block(x, vector, support, heads, strip, span, space, len(spans) > 1) for span in spans)
            if spans:
                out[heads, strip] = _merged(blocks)
    return out


def _block(x, vector, support, heads, rows, cols, space, several: bool):
    """Largest logit, mass, and in this block: covariance with the slope, mean slope, mean atom."""
    eta, atoms = x.eta[heads, rows], x.atoms[heads, cols]
    score, p, slope = (s[: eta.shape[0], : eta.shape[1], : atoms.shape[1]] for s in space)
    torch.bmm(eta, atoms.mT, out=score)
    logits = support.weigh(score, heads, rows, cols)
    top = logits.amax(-1) if several or logits is not score else None
    torch.softmax(logits, -1, out=p)
    if logits is not score and top is not None:
        p.masked_fill_((top == -torch.inf)[..., None], 0)
    torch.bmm(vector[heads, rows], atoms.mT, out=slope)
    mean, mass = None, None
    if several:
        peak = p.amax(-1)
        mean, mass = torch.bmm(p, atoms), torch.where(peak > 0, 1 / peak, 0)
    weighted = torch.mul(p, slope, out=slope)
    centre = weighted.sum(-1)
    weighted.sub_(p.mul_(centre[..., None]))
    return top, mass, torch.bmm(weighted, atoms), centre, mean


def _merged(blocks) -> Tensor:
    top, mass, cov, centre, mean = next(blocks)
    for new_top, new_mass, new_cov, new_centre, new_mean in blocks:
        ceiling = torch.maximum(top, new_top)
        floor = torch.where(ceiling == -torch.inf, 0, ceiling)
        old, new = mass * torch.exp(top - floor), new_mass * torch.exp(new_top - floor)
        total = old + new
        share = (new / torch.where(total > 0, total, 1))[..., None]
        rest = torch.where(total[..., None] > 0, 1 - share, 0)
        between = (new_centre - centre)[..., None] * (new_mean - mean)
        cov = rest * cov + share * new_cov + rest * share * between
        centre, mean = rest[..., 0] * centre + share[..., 0] * new_centre, rest * mean + share * new_mean
        top, mass = ceiling, total
    return cov


class FisherProduct(torch.autograd.Function):
    """(inputs, vector) → ∇²G v; its first derivative recomputes a few rows at a time, and there it ends."""

    @staticmethod
    def forward(eta, atoms, per_atom, per_pair, mask, vector, plan: Plan):
        return fisher_sweep(Inputs(eta, atoms, None, per_atom, per_pair, mask), vector, plan)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.plan = inputs
        ctx.save_for_backward(*tensors, output)
        ctx.save_for_forward(*tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        eta, atoms, per_atom, per_pair, mask, vector, product = untracked(ctx.saved_tensors)
        x = Inputs(eta, atoms, None, per_atom, per_pair, mask)
        if ctx.plan.engine == "native":
            (d_eta, d_atoms, _, d_atom_w, d_pair_w), d_vector, finite = native.fisher_backward(
                x, vector, ctx.plan, product.detach(), grad
            )
            if finite:
                return d_eta, d_atoms, d_atom_w, d_pair_w, None, d_vector, None
        results = StripResults(x, 1)
        for heads, rows in strips(x, ctx.plan):
            primal, function = _rows(x, ctx.plan, heads, rows)
            back = torch.func.vjp(function, *primal, vector[heads, rows])[1]
            slopes = back(grad[heads, rows])
            results.add(heads, rows, slopes[:-1], slopes[-1:])
        d_eta, d_atoms, _, d_atom_w, d_pair_w = results.inputs()
        return d_eta, d_atoms, d_atom_w, d_pair_w, None, results.rowwise()[0], None

    @staticmethod
    def jvp(ctx, d_eta, d_atoms, d_atom_w, d_pair_w, _mask, d_vector, _plan):
        eta, atoms, per_atom, per_pair, mask, vector = ctx.saved_tensors
        x = Inputs(eta, atoms, None, per_atom, per_pair, mask)
        tangents = Inputs.of((d_eta, d_atoms, None, d_atom_w, d_pair_w))
        results = StripResults(x, 1)
        for heads, rows in strips(x, ctx.plan):
            primal, function = _rows(x, ctx.plan, heads, rows)
            primal = tuple(t.contiguous() for t in (*primal, vector[heads, rows]))
            moving = [*present(part_of(tangents, heads, rows), x), None if d_vector is None else d_vector[heads, rows]]
            moving = tuple(or_zeros(t, p) for t, p in zip(moving, primal, strict=True))
            results.add(heads, rows, [], [torch.func.jvp(function, primal, moving)[1]])
        return results.rowwise()[0]

    @staticmethod
    def vmap(info, in_dims, *args):
        *tensors, plan = args
        folded = fold(info.batch_size, in_dims[:6], tensors)
        return unfold(info.batch_size, FisherProduct.apply(*folded, plan)), 0


def _rows(x: Inputs, plan: Plan, heads: slice, rows: slice):
    """The tensors of some rows, and ∇²G v as a plain function of them."""
    part, small = cut(x, plan, heads, rows)
    slots = [i for i in range(5) if part[i] is not None]

    def function(*arguments: Tensor) -> Tensor:
        fields = list(part)
        for slot, tensor in zip(slots, arguments[:-1], strict=True):
            fields[slot] = tensor
        return reference_product(Inputs(*fields), arguments[-1], small)  # pyright: ignore[reportArgumentType]

    return present(part), function


def reference_product(x: Inputs, vector: Tensor, plan: Plan) -> Tensor:
    """∇²G v with queries × atoms in memory."""
    eta, atoms, bias = x.eta, x.atoms, log_weights_of(x, plan)
    if bias is None:
        slope = vector @ atoms.mT
        _, p = normalize(eta @ atoms.mT)
    else:  # as in `dense_moments`
        absent = bias == -torch.inf
        eta, atoms, _ = without_nonfinite(eta, atoms, atoms, ~absent)
        slope = torch.where(absent, 0, vector @ atoms.mT)
        _, p = normalize(torch.where(absent, -torch.inf, eta @ atoms.mT + bias))
        p = torch.where(absent, 0, p)
    slope = p * (slope - (p * slope).sum(-1, keepdim=True))
    return slope @ atoms - slope.sum(-1, keepdim=True) * (p @ atoms)
