"""Losses whose candidates are the other points of a batch: InfoNCE, SupCon, CLIP, NT-Xent."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cumulant.checks import sentence, shape
from cumulant.contrastive.arguments import (
    known_gradients,
    known_reduction,
    matrix_pair,
    positive_temperature,
    reduce,
    target_of,
    weights_of,
    without,
)
from cumulant.contrastive.sharded import first_row, sharded_info_nce
from cumulant.kernels import moments
from cumulant.kernels.autocast import autocast, without_autocast
from cumulant.kernels.collectives import Group, Ranks
from cumulant.kernels.dense import accumulate
from cumulant.kernels.losses import LossPlan, losses
from cumulant.kernels.strips import positives_of


def info_nce(
    query: Tensor,
    key: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    symmetric: bool = False,
    exclude_self: bool = False,
    positives: Tensor | None = None,
    reduction: str = "mean",
    group: Group | Ranks = None,
    gradients: str = "sum",
) -> Tensor:
    """The InfoNCE loss of queries and keys; with several positives SupCon, symmetric CLIP.

        ℓ_i = G(q_i/τ) − mean over positives k⁺ of ⟨q_i, k⁺⟩/τ,        G(η) = log Σ_j exp⟨η, k_j⟩

    query         (N, d)
    key           (M, d)
    temperature   τ > 0, a number or a tensor without axes, which may require a gradient
    symmetric     ½ (mean of ℓ over queries + mean of ℓ over keys, with roles exchanged); needs N = M
    exclude_self  query i and key i are one point: no candidate for itself (log weight −inf), no positive; needs N = M
    positives     None: key i belongs to query i (N ≤ M); integers (N,): key positives[i] does; Boolean (N, M): all
                  that are True, averaged outside the logarithm (L_out of SupCon)
    reduction     "mean" over queries that have positives (0 if none has), "sum", or "none": (N,)
    group         processes that hold parts of the batch: a ProcessGroup, a DeviceMesh, or ``Ranks(group, timeout)``.
                  query and key are then the rows of this rank, the keys of all ranks are candidates, and the loss is
                  that of the whole batch on every rank, with the gradients of one process. positives: None pairs rows
                  of one rank; integers and columns count keys rank after rank; symmetric needs None
    gradients     "sum" where the gradients of an encoder are added up over the ranks of a ``group``; "mean" where they
                  are averaged, as by DistributedDataParallel (docs/scale.md). That of the temperature is whole on
                  every rank: do not add it up

    A query without positives or without candidates has loss 0 and gradient 0, and where it is no candidate itself
    (symmetric), what it holds, NaN included, reaches nothing else. Under torch.autocast query and key are rounded as
    for a matrix product, sums are formed in float32.

    >>> import torch
    >>> x = torch.eye(3, dtype=torch.float64)
    >>> info_nce(x, x, temperature=0.5)                          # log(e² + 2) − 2
    tensor(0.2395, dtype=torch.float64)
    >>> info_nce(x, x[:2] + x[1:], positives=torch.tensor([0, 1, 1]), reduction="none")
    tensor([0.3133, 0.6931, 0.3133], dtype=torch.float64)
    """
    where = "info_nce"
    query, key = autocast(query, key)
    matrix_pair(where, "query", query, "key", key)
    known_reduction(where, reduction)
    known_gradients(where, gradients)
    n, m = query.shape[0], key.shape[0]
    if (symmetric or exclude_self) and n != m:
        name = "symmetric" if symmetric else "exclude_self"
        got, advice = f"{n} and {m}", "Leave it off, or match them."
        raise ValueError(sentence(f"{where}.{name}", "as many queries as keys", got, advice))
    if group is not None:
        ranks = group if isinstance(group, Ranks) else Ranks(group)
        options = (temperature, symmetric, exclude_self, positives, reduction, gradients)
        return sharded_info_nce(ranks, query, key, *options)
    target = target_of(positives, query, m, exclude_self)
    counts, rows = positives_of(target, m, exclude_self), accumulate(query)
    sides = [counts.row_counts, counts.column_counts] if symmetric else [counts.row_counts]
    if target.dtype == torch.bool and not symmetric:
        rows = without(rows, counts.row_counts == 0)
    eta = rows / positive_temperature(where, temperature, query)
    weight = None if reduction == "none" else torch.cat([weights_of(c, reduction, eta) for c in sides]) / len(sides)
    plan = LossPlan(exclude_self=exclude_self, two_sided=symmetric)
    value = losses(eta, accumulate(key), target, plan, weight=weight).value
    return (value[:n] + value[n:]) / 2 if symmetric and reduction == "none" else value


def nt_xent(
    view1: Tensor,
    view2: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    reduction: str = "mean",
    group: Group | Ranks = None,
    gradients: str = "sum",
) -> Tensor:
    """The NT-Xent loss of SimCLR: the positive of each of 2N points is its other view, the rest are negatives.

        ℓ_i = G(z_i/τ) − ⟨z_i, z_i'⟩/τ,        G(η) = log Σ_{j≠i} exp⟨η, z_j⟩

    view1, view2 (N, d); row i of both shows the same thing. Unit vectors give the cosine form, others are taken as they
    are. "none" returns (2N,), first view first. With a ``group`` the points of all its processes are candidates; both
    views of a thing are on one rank. ``gradients`` is "mean" under DistributedDataParallel (see `info_nce`).

    >>> import torch
    >>> x = torch.eye(2, dtype=torch.float64)
    >>> nt_xent(x, x)                                            # log(e + 2) − 1
    tensor(0.5514, dtype=torch.float64)
    """
    view1, view2 = autocast(view1, view2)
    known_gradients("nt_xent", gradients)
    matrix_pair("nt_xent", "view1", view1, "view2", view2)
    if view1.shape != view2.shape:
        expected = f"shape {shape(view1)} as view1"
        raise ValueError(sentence("nt_xent.view2", expected, shape(view2), "Row i of both views shows the same thing."))
    points = accumulate(torch.cat([view1, view2]))  # before it is used twice: two gradients meet in float32
    other = torch.arange(len(points), device=points.device).roll(len(view1))
    if group is not None:
        ranks = group if isinstance(group, Ranks) else Ranks(group)
        other = other + first_row("nt_xent", ranks, len(points))
        group = ranks
    with without_autocast(points):
        return info_nce(
            *(points, points),
            temperature=temperature,
            exclude_self=True,
            positives=other,
            reduction=reduction,
            group=group,
            gradients=gradients,
        )


class Parts(NamedTuple):
    """alignment + uniformity = loss; gradients flow through both."""

    alignment: Tensor
    uniformity: Tensor


def alignment_uniformity(query: Tensor, key: Tensor, *, temperature: float | Tensor = 1.0) -> Parts:
    """The two terms of InfoNCE, alignment of pairs and uniformity of the keys around queries.

        alignment = −mean ⟨q_i, k_i⟩/τ,        uniformity = mean G(q_i/τ),        info_nce = alignment + uniformity

    query (N, d), key (M ≥ N, d), key i belongs to query i; temperature as in `info_nce`. On unit vectors ⟨q,k⟩ = 1 −
    ½|q−k|², so that both are those of Wang and Isola with the Gaussian potential e^{−|q−k|²/2τ}, shifted by ∓1/τ (and
    log M). Linear memory, twice differentiable; both are 0 without queries.

    >>> import torch
    >>> x = torch.eye(3, dtype=torch.float64)
    >>> alignment_uniformity(x, x, temperature=0.5)                              # −2, log(e² + 2)
    Parts(alignment=tensor(-2., dtype=torch.float64), uniformity=tensor(2.2395, dtype=torch.float64))
    """
    where = "alignment_uniformity"
    query, key = autocast(query, key)
    matrix_pair(where, "query", query, "key", key)
    n, m = query.shape[0], key.shape[0]
    if n > m:
        raise ValueError(sentence(f"{where}.key", f"at least {n} rows, one per query", m, "Key i belongs to query i."))
    eta, atoms = accumulate(query) / positive_temperature(where, temperature, query), accumulate(key)
    with without_autocast(eta):
        log_normalizer = moments(eta, atoms, statistics=()).log_normalizer
    return Parts(-reduce((eta * atoms[:n]).sum(-1), "mean"), reduce(log_normalizer, "mean"))


def mutual_information_bound(loss: float | Tensor, candidates: int) -> Tensor:
    """The lower bound on mutual information by an InfoNCE loss: I(query; key) ≥ log N − loss, in nats.

    loss is the mean of `info_nce` with one positive among N candidates, itself included, drawn independently. The bound
    never exceeds log N, however much the views share: it saturates, and needs N ≥ e^I.

    >>> mutual_information_bound(0.5, 100)
    tensor(4.1052)
    """
    if candidates < 1:
        got, advice = candidates, "Count the positive too."
        raise ValueError(sentence("mutual_information_bound.candidates", "at least one", got, advice))
    return math.log(candidates) - torch.as_tensor(loss)
