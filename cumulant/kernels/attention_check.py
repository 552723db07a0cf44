"""Whether an attention kernel of torch computes on this device what `torch_attention` says it does.

Few users of attention look at its log-sum-exp, so that errors in it live long: flash attention on ROCm returned it in
base 2 before torch 2.8 (torch_migraphx pull request 274), FlexAttention's FLASH backend times ln 2 (pytorch issue
181645); rows are padded to multiples of 32, and rows without keys hold infinities. So before a kernel serves on a
device off the CPU, it is compared there with the reference in float64: G, means and gradients of one small problem,
without and with causal order, and with a mask that hides all keys from a query and the first block of keys from others.
Once in a process for each device and each pair of widths. What fails is not used, and the reason can be read:

    moments(q, k, v, backend="fused")     ValueError: … got torch's memory-efficient attention on CUDA is not used: …
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from cumulant.kernels.torch_attention import AttentionKernel, Operands

GROUPS, QUERIES, ATOMS = 2, 37, 150  # neither a multiple of a block nor of a vector; two blocks of keys
HIDDEN = 130  # leading keys that some queries do not see
TOLERANCE = 3e-5  # of the largest entry: float32 on the CPU stays below 3e-6, operands of ten bits (TF32) above 1e-4
FACTORS = {"in base 2": 1 / math.log(2), "times ln 2": math.log(2)}


def why_wrong(kernel: AttentionKernel, device: torch.device, width: int, value_width: int) -> str:
    """Why a kernel is not used on a device for keys and values of these widths; empty if it is right there."""
    if device.type == "cuda" and _capturing():
        return "it was not compared with the reference before a CUDA graph is captured; call it once outside"
    index = device.index if device.index is not None else -1
    return _verdict(type(kernel), device.type, index, width, value_width)


def check(kernel: AttentionKernel, device: torch.device, width: int, value_width: int) -> str:
    """What is wrong with a kernel on a device, in words; empty if nothing is.

    >>> from cumulant.kernels.torch_attention import kernel_of
    >>> check(kernel_of(torch.device("cpu")), torch.device("cpu"), 8, 8)
    ''
    """
    for case in ("plain", "causal", "mask"):
        x, row, empty = _problem(case, width, value_width)
        try:
            found = _computed(kernel, device, x, row, empty)
        except torch.OutOfMemoryError:  # says nothing about the kernel
            raise
        except (RuntimeError, AssertionError, IndexError) as error:  # no kernel for this device, width or layout
            lines = str(error).strip().splitlines()
            return f"{kernel.name} is not used: it failed ({lines[0][:200] if lines else type(error).__name__})"
        for name, right in _reference(x, row).items():
            wrong = _difference(name, found[name].double().cpu(), right, empty)
            if wrong:
                return f"{kernel.name} is not used: {wrong} ({case} attention, d={width}, torch {torch.__version__})"
    return ""


@cache
def _verdict(kind: type[AttentionKernel], device: str, index: int, width: int, value_width: int) -> str:
    target = torch.device(device) if index < 0 else torch.device(device, index)
    # a mode of the caller (fake tensors, a recording) is no reason to find a kernel wrong for the whole process
    with _disable_current_modes(), torch.no_grad():
        return check(kind(), target, width, value_width)


# what torch.compiler.assume_constant_result does, without importing the compiler; see operator._absence
_verdict.__dict__["_dynamo_marked_constant"] = True


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _problem(case: str, width: int, value_width: int) -> tuple[Operands, Tensor, Tensor]:
    """Operands in float64 with scores of order 1 and values of order 1, an incoming gradient, and the rows without
    keys."""

    def scattered(seed: float, *size: int) -> Tensor:
        """Uniform numbers of mean 0 and variance 1, exact in float32; by no generator, as transforms of torch.func
        refuse random numbers."""
        number = torch.arange(torch.Size((GROUPS, *size)).numel(), dtype=torch.float64, device="cpu")
        uniform = (1e4 * torch.sin(seed + number)) % 1
        return ((uniform - 0.5) * 12**0.5).reshape(GROUPS, *size).float().double()

    eta, atoms = (scattered(1, QUERIES, width) / width**0.5).float().double(), scattered(2, ATOMS, width)
    points, row = scattered(3, ATOMS, value_width), scattered(4, QUERIES, value_width)
    empty = torch.zeros(GROUPS, QUERIES, dtype=torch.bool, device="cpu")
    bias = None
    if case == "mask":
        bias = torch.zeros(GROUPS, QUERIES, ATOMS, dtype=torch.float64, device="cpu")
        bias[:, ::3, :HIDDEN] = -torch.inf
        bias[:, 5], empty[:, 5] = -torch.inf, True
        bias = bias[None]
    return Operands(eta, atoms, points, bias, case == "causal"), row.masked_fill(empty[..., None], 0), empty


def _computed(
    kernel: AttentionKernel, device: torch.device, x: Operands, row: Tensor, empty: Tensor
) -> dict[str, Tensor]:
    """By the kernel, in float32, as `fused` calls it."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device, torch.float32)

    bias = None if x.bias is None else moved(x.bias)
    there = Operands(moved(x.eta), moved(x.atoms), moved(x.points), bias, x.causal)
    hidden, row = empty.to(device), moved(row)
    mean, lse = kernel.forward(there)
    mean, finite = mean.masked_fill(hidden[..., None], 0), lse.masked_fill(hidden, 0)
    slopes = kernel.backward(there, row, mean, finite)
    names = ("log-sum-exp", "mean", "gradient of the queries", "gradient of the keys", "gradient of the values")
    return dict(zip(names, (finite, mean, *slopes), strict=True))


def _reference(x: Operands, row: Tensor) -> dict[str, Tensor]:
    """The same in float64 by the definitions, with closed forms of the gradients."""
    logit = x.eta @ x.atoms.mT
    if x.bias is not None:
        logit = logit + x.bias[0]
    if x.causal:
        logit = logit.masked_fill(torch.ones(QUERIES, ATOMS, dtype=torch.bool, device="cpu").triu(1), -torch.inf)
    g = torch.logsumexp(logit, -1)
    g = torch.where(g == -torch.inf, 0, g)
    p = torch.exp(logit - g[..., None])
    mean = p @ x.points
    slope = p * (row @ x.points.mT - (row * mean).sum(-1, keepdim=True))
    return {
        "log-sum-exp": g,
        "mean": mean,
        "gradient of the queries": slope @ x.atoms,
        "gradient of the keys": slope.mT @ x.eta,
        "gradient of the values": p.mT @ row,
    }


def _difference(name: str, found: Tensor, right: Tensor, empty: Tensor) -> str:
    """How a result differs from the right one, empty if it does not."""
    if found.shape != right.shape:
        return f"its {name} has shape {tuple(found.shape)} where {tuple(right.shape)} is right"
    scale = right.abs().max()
    gap = float((found - right).abs().max() / scale)
    if gap <= TOLERANCE:  # false for NaN
        return ""
    for words, factor in FACTORS.items():
        if float((found - factor * right).abs().max() / scale) <= 10 * TOLERANCE:
            return f"its {name} is {words}"
    return f"its {name} differs by {gap:.1e} of its largest entry"
