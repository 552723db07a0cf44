"""Checks of the arguments of the losses, and their reductions."""

from __future__ import annotations

import torch
from torch import Tensor

from cumulant.checks import holds, known_on_cpu, require_alike, require_device, require_float, sentence, shape
from cumulant.kernels.dense import accumulate

REDUCTIONS = ("mean", "sum", "none")
GRADIENTS = ("sum", "mean")


def known_reduction(where: str, reduction: str) -> None:
    if reduction not in REDUCTIONS:
        expected = f"one of {', '.join(map(repr, REDUCTIONS))}"
        raise ValueError(sentence(f"{where}.reduction", expected, repr(reduction), "Pick one."))


def known_gradients(where: str, gradients: str) -> None:
    if gradients not in GRADIENTS:
        advice = "DistributedDataParallel averages over ranks: pass 'mean' under it."
        raise ValueError(sentence(f"{where}.gradients", "'sum' or 'mean'", repr(gradients), advice))


def reduce(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    return loss.sum() / (max(1, loss.numel()) if reduction == "mean" else 1)


def weights_of(counts: Tensor, reduction: str, like: Tensor) -> Tensor:
    """1 for every line that has positives, divided by their number for a mean."""
    has = (counts > 0).to(like.dtype)
    return has / has.sum().clamp_min(1) if reduction == "mean" else has


def without(rows: Tensor, absent: Tensor) -> Tensor:
    """Zeros in the rows that are absent, with gradient 0: what they hold, NaN included, does not reach the others."""
    return rows if known_on_cpu(~absent) else torch.where(absent[:, None], 0, rows)


def may_overflow(rows: Tensor, largest: Tensor) -> Tensor:
    """(n,): rows that some atom may meet in a score that is infinite or NaN, by Σ_k |η_k| max_j |x_jk|.

    ``largest`` (d,) is that maximum, `largest_of` the atoms.
    """
    bound = (rows.detach().abs() * largest).sum(-1)
    return ~(bound < torch.finfo(rows.dtype).max / 4)  # so also NaN


def counted_rows(rows: Tensor, ignored: Tensor, largest: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows with zeros in those that are ignored, and which these are; with ``largest`` only where they may overflow."""
    lost = ignored if largest is None else ignored & may_overflow(rows, largest)
    return without(rows, lost), lost


def largest_of(atoms: Tensor) -> Tensor:
    """max_j |x_jk|: (d,)."""
    x = atoms.detach()
    return torch.maximum(x.amax(0), -x.amin(0)) if len(x) else x.sum(0)


def matrix_pair(where: str, first: str, a: Tensor, second: str, b: Tensor) -> None:
    for name, tensor in ((first, a), (second, b)):
        if require_float(f"{where}.{name}", tensor).ndim != 2:
            raise ValueError(sentence(f"{where}.{name}", "shape (N, d)", shape(tensor), "Flatten the leading axes."))
    if a.shape[1] != b.shape[1]:
        expected = f"dimension d={a.shape[1]} as {first}"
        raise ValueError(sentence(f"{where}.{second}", expected, shape(b), "Project both into one space."))
    require_alike(f"{where}.{second}", b, first, a)


def positive_temperature(where: str, temperature: float | Tensor, query: Tensor) -> float | Tensor:
    where, advice = f"{where}.temperature", "Smaller is sharper; 0.07 is common for unit vectors."
    if isinstance(temperature, Tensor):
        if temperature.ndim:
            raise ValueError(sentence(where, "a number or a tensor without axes", shape(temperature), advice))
        require_float(where, temperature)
        if not temperature.is_cpu:  # a number on the CPU serves every device
            require_device(where, temperature, "query", query)
        good = holds((temperature > 0) & temperature.isfinite())
        temperature = accumulate(temperature).to(accumulate(query[:0]).dtype)
    else:
        good = 0 < temperature < float("inf")
    if not good:
        raise ValueError(sentence(where, "a positive finite number", temperature, advice))
    return temperature


def target_of(positives: Tensor | None, query: Tensor, m: int, exclude_self: bool) -> Tensor:
    """(N,) indices or a Boolean (N, M)."""
    n, where = query.shape[0], "info_nce.positives"
    if positives is None:
        if exclude_self:
            advice = "Key i is excluded for query i, so pass the positives."
            raise ValueError(sentence(where, "indices or a Boolean matrix with exclude_self", None, advice))
        if n > m:
            expected = f"indices, as key has {m} rows for {n} queries"
            raise ValueError(sentence(where, expected, None, "Give the positive of each query."))
        return torch.arange(n, device=query.device)
    if not isinstance(positives, Tensor) or positives.is_floating_point() or positives.is_complex():
        got = positives.dtype if isinstance(positives, Tensor) else type(positives).__name__
        raise TypeError(sentence(where, "an integer or Boolean tensor", got, "Indices are (N,), a mask is (N, M)."))
    mask = positives.dtype == torch.bool
    if positives.shape != ((n, m) if mask else (n,)):
        expected = f"shape (N={n}, M={m}) for a Boolean matrix" if mask else f"shape (N={n},) for indices"
        raise ValueError(sentence(where, expected, shape(positives), "Rows are queries, columns are keys."))
    require_device(where, positives, "query", query)
    if mask:
        return positives
    in_range(where, positives, m, None)
    if exclude_self and not holds(positives != torch.arange(n, device=positives.device)):
        got, advice = "positives[i] == i", "Leave exclude_self off."
        raise ValueError(sentence(where, "no point as its own positive", got, advice))
    return positives.long()


def in_range(where: str, index: Tensor, size: int, ignored: int | None) -> None:
    inside = (index >= 0) & (index < size)
    if not holds(inside if ignored is None else inside | (index == ignored)):
        expected = f"indices in 0 … {size - 1}" + ("" if ignored is None else f", or ignore_index={ignored}")
        raise ValueError(sentence(where, expected, f"values from {index.min()} to {index.max()}", "Check the labels."))


def check_vocabulary(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    where = "linear_cross_entropy"
    require_float(f"{where}.hidden", hidden)
    require_alike(f"{where}.weight", require_float(f"{where}.weight", weight), "hidden", hidden)
    if hidden.ndim == 0 or weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        expected = f"shape (V, d) with d the last axis of hidden {shape(hidden)}"
        advice = "Rows are words, as in nn.Linear.weight."
        raise ValueError(sentence(f"{where}.weight", expected, shape(weight), advice))
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.dtype == torch.bool:
        got = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
        advice = "Class probabilities are not supported."
        raise TypeError(sentence(f"{where}.targets", "an integer tensor", got, advice))
    require_device(f"{where}.targets", targets, "hidden", hidden)
    if targets.shape != hidden.shape[:-1]:
        expected = f"shape {tuple(hidden.shape[:-1])} as the leading axes of hidden"
        raise ValueError(sentence(f"{where}.targets", expected, shape(targets), "One word per position."))
    if bias is not None:
        require_alike(f"{where}.bias", require_float(f"{where}.bias", bias), "hidden", hidden)
        if bias.shape != weight.shape[:1]:
            raise ValueError(sentence(f"{where}.bias", f"shape (V={weight.shape[0]},)", shape(bias), "One per word."))
