"""The loss whose candidates are the words of a vocabulary."""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from cumulant.checks import sentence
from cumulant.contrastive.arguments import (
    check_vocabulary,
    counted_rows,
    in_range,
    known_reduction,
    largest_of,
    weights_of,
    without,
)
from cumulant.contrastive.sharded import sharded_cross_entropy
from cumulant.kernels.autocast import autocast
from cumulant.kernels.collectives import Group, Ranks
from cumulant.kernels.dense import accumulate
from cumulant.kernels.losses import LossPlan, losses


class VocabularyLoss(NamedTuple):
    """loss, and G(h) = log Σ_v e^{⟨w_v,h⟩ + b_v} of every position, as ``targets``; gradients flow through both."""

    loss: Tensor
    log_normalizer: Tensor


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = ...,
    ignore_index: int = ...,
    z_loss: float = ...,
    label_smoothing: float = ...,
    softcap: float | None = ...,
    reduction: str = ...,
    return_log_normalizer: Literal[False] = ...,
    group: Group | Ranks = ...,
) -> Tensor: ...


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = ...,
    ignore_index: int = ...,
    z_loss: float = ...,
    label_smoothing: float = ...,
    softcap: float | None = ...,
    reduction: str = ...,
    return_log_normalizer: Literal[True],
    group: Group | Ranks = ...,
) -> VocabularyLoss: ...


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_log_normalizer: bool = False,
    group: Group | Ranks = None,
) -> Tensor | VocabularyLoss:
    """Cross-entropy of a linear classifier over a vocabulary, without its logits.

        ℓ = G(h) − s_y + z G(h)²,      s_v = ⟨h, w_v⟩ + b_v,      G(h) = log Σ_v exp s_v

    hidden           (*batch, d)
    weight           (V, d); the atoms of the family
    targets          (*batch) integers in 0 … V−1, or ``ignore_index``: loss 0, gradient 0, not counted in the mean;
                     what hidden holds there, NaN included, reaches nothing else
    bias             (V,) log base weights; −inf removes a word, whatever its weight holds, softcap or not
    z_loss           z, keeps G near 0
    label_smoothing  ε: s_y becomes (1 − ε) s_y + ε · mean of s over the vocabulary, as in torch
    softcap          c: scores become c tanh(s/c). Bounded scores are not linear in h, so this is no exponential family
                     in h: the gradient is not mean − w_y
    reduction        "mean" over positions that are not ignored (0 if all are, where torch has NaN), "sum", or "none"
    return_log_normalizer   also return G, as `VocabularyLoss`; NaN where an ignored position may have infinite scores
    group            processes that hold parts of the vocabulary: a ProcessGroup, a DeviceMesh, or ``Ranks(group,
                     timeout)``. weight and bias are then the words of this rank, hidden and targets are the same on
                     every rank, targets count words rank after rank; loss and gradients are those of one process.
                     The gradient of hidden is whole on every rank, so that an encoder may be in
                     DistributedDataParallel (DDP) as it is; keep weight and bias, which differ by rank, out of it

    Under torch.autocast hidden, weight and bias are rounded as for torch.nn.functional.linear, sums are formed in
    float32.

    >>> import torch
    >>> h, w = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    >>> linear_cross_entropy(h, w, torch.tensor([0, 1]), reduction="none")          # log(1 + e⁻¹), log(1 + e⁻²)
    tensor([0.3133, 0.1269], dtype=torch.float64)
    >>> linear_cross_entropy(h, w, torch.tensor([0, -100]), return_log_normalizer=True).log_normalizer
    tensor([1.3133, 2.1269], dtype=torch.float64)
    """
    where = "linear_cross_entropy"
    (hidden, weight), (bias,) = autocast(hidden, weight), autocast(bias)
    check_vocabulary(hidden, weight, targets, bias)
    known_reduction(where, reduction)
    if not 0 <= label_smoothing <= 1:
        raise ValueError(sentence(f"{where}.label_smoothing", "a number in [0, 1]", label_smoothing, "0 is off."))
    if softcap is not None and not softcap > 0:
        raise ValueError(sentence(f"{where}.softcap", "a positive bound or None", softcap, "None is off."))
    rows, flat = accumulate(hidden).reshape(targets.numel(), hidden.shape[-1]), targets.reshape(-1).long()
    atoms, own = accumulate(weight), None if bias is None else accumulate(bias)
    if own is not None:
        atoms = without(atoms, own == -torch.inf)
    if group is not None:
        value, log_normalizer = sharded_cross_entropy(
            group if isinstance(group, Ranks) else Ranks(group),
            *(rows, atoms, flat),
            bias=own,
            ignored=ignore_index,
            z_loss=z_loss,
            smoothing=label_smoothing,
            softcap=softcap,
            reduction=reduction,
            with_log_normalizer=return_log_normalizer,
        )
    else:
        in_range(f"{where}.targets", flat, weight.shape[0], ignore_index)
        rows, lost = counted_rows(rows, flat == ignore_index, largest_of(atoms) if return_log_normalizer else None)
        index = torch.where(flat == ignore_index, -1, flat)
        counted = None if reduction == "none" else weights_of(index >= 0, reduction, rows)
        plan = LossPlan(softcap=softcap, smoothing=label_smoothing, z_loss=z_loss)
        value, log_normalizer = losses(rows, atoms, index, plan, bias=own, weight=counted)
        log_normalizer = torch.where(lost, torch.nan, log_normalizer)
    loss = value.reshape(targets.shape) if reduction == "none" else value
    return VocabularyLoss(loss, log_normalizer.reshape(targets.shape)) if return_log_normalizer else loss
