"""Losses with their gradients: ours, plain torch, and libraries. Each function maps inputs to what is timed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.case import Run, Unavailable, ours, peer
from benchmarks.inputs import Classes

CHUNKS = (32, 64, 128, 256, 512, 1024)


def info_nce(x: Classes) -> Run:
    """`cumulant.contrastive.info_nce`."""
    loss = ours("cumulant.contrastive", "info_nce")
    return _with_gradient(x, lambda: loss(x.rows, x.columns, temperature=x.temperature))


def plain_info_nce(x: Classes) -> Run:
    """The matrix of similarities, then cross-entropy."""
    return _with_gradient(x, lambda: cross_entropy(x.rows @ x.columns.T / x.temperature, x.targets))


def ntxent(x: Classes) -> Run:
    """pytorch-metric-learning; it forms positives × negatives."""
    losses = peer("pytorch_metric_learning.losses")
    n = len(x.rows)
    _require_memory(20 * n * n * (n - 1))  # five float32 tables, gradients among them
    loss = losses.NTXentLoss(temperature=x.temperature)
    keys = x.targets.clone()  # the same tensor would mean that queries and keys are one set
    value = _with_gradient(x, lambda: loss(x.rows, x.targets, ref_emb=x.columns, ref_labels=keys))
    return lambda: {"loss": value()["loss"]}  # its gradient is also taken through its own normalisation


def linear_loss(x: Classes) -> Run:
    """`cumulant.contrastive.linear_cross_entropy`."""
    loss = ours("cumulant.contrastive", "linear_cross_entropy")
    return _with_gradient(x, lambda: loss(x.rows, x.columns, x.targets))


def plain_linear_loss(x: Classes) -> Run:
    """The matrix of logits, then cross-entropy."""
    return _with_gradient(x, lambda: cross_entropy(x.rows @ x.columns.T, x.targets))


def torch_linear_loss(x: Classes) -> Run:
    """torch's chunked loss with the chunk it picks."""
    return _torch_chunked(x, None)


def torch_linear_loss_best(x: Classes) -> Run:
    """torch's chunked loss with the quickest of several chunks, found by trying."""
    return min((_torch_chunked(x, rows) for rows in CHUNKS if rows <= len(x.rows)), key=_quickest)


def _torch_chunked(x: Classes, rows: int | None) -> Run:
    if not hasattr(nn, "LinearCrossEntropyOptions"):
        raise Unavailable(f"torch {torch.__version__} has no linear_cross_entropy")
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
    loss = nn.functional.linear_cross_entropy
    return _with_gradient(x, lambda: loss(x.rows, x.columns, x.targets, options=options))


def _with_gradient(x: Classes, loss: Callable[[], Tensor]) -> Run:
    def run():
        value = loss()
        rows, columns = torch.autograd.grad(value, (x.rows, x.columns))
        return {"loss": value.detach(), "gradient of rows": rows, "gradient of columns": columns}

    return run


def _quickest(run: Run) -> float:
    def once() -> float:
        start = time.process_time()
        run()
        return time.process_time() - start

    return min(once(), once())


def _require_memory(size: float) -> None:
    """Refuse what would not fit into half of this machine."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > installed / 2:
        raise Unavailable(f"needs about {size / (1 << 30):.0f} GiB, the machine has {installed / (1 << 30):.0f}")
