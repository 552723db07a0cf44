"""torch's attention kernels that return the log-sum-exp, behind one interface.

    forward(η, x, v)   →   Σ_j p_ij v_j   and   G_i = log Σ_j exp(⟨η_i,x_j⟩ + bias_ij)

`CpuFlash` is the one of the CPU. `CudaEfficient` is the one of CUDA that takes float32; the other two (flash and
cuDNN) take and return half precision only, and an entropy G − ⟨η, mean of the keys⟩ from a mean of eight bits would be
wrong in its second digit. What each of them asks of its operands is kept from the caller: widths, memory, padding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from cumulant.kernels.layout import readable_rows

VECTOR = 4  # float32 numbers that CUDA's kernel loads at once: widths are multiples of it
BIAS_ROW = 16  # entries that rows of a bias are multiples of, in memory
LSE_ROW = 32  # entries that rows of the log-sum-exp are multiples of
MOST_GROUPS = 65535  # of a grid of CUDA along the axis that heads have


class Operands(NamedTuple):
    """Queries (g, q, d), keys (g, n, d), values (g, n, e), a float bias (1, g, q, n) or None, and the causal order in
    which query 0 sees key 0."""

    eta: Tensor
    atoms: Tensor
    points: Tensor
    bias: Tensor | None
    causal: bool


class AttentionKernel(ABC):
    """One attention kernel of torch and its backward pass."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    any_width: bool  # whether values may be wider or narrower than keys without a copy of all three

    @abstractmethod
    def forward(self, x: Operands) -> tuple[Tensor, Tensor]:
        """Σ p v (g, q, e) and G (g, q); rows without keys hold anything."""

    @abstractmethod
    def backward(self, x: Operands, row: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of eta, atoms and points, of a loss whose gradient in ``out`` (g, q, e) is ``row``."""


class CpuFlash(AttentionKernel):
    """`_scaled_dot_product_flash_attention_for_cpu`: values as wide as keys, rows read by pointer."""

    name = "torch's flash attention on the CPU"
    dtypes = (torch.float32, torch.float64)
    any_width = False

    def forward(self, x: Operands) -> tuple[Tensor, Tensor]:
        tensors = (readable_rows(t)[None] for t in x[:3])
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *tensors, 0.0, x.causal, attn_mask=x.bias, scale=1.0
        )
        return out[0].contiguous(), lse[0].contiguous()

    def backward(self, x: Operands, row: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        widths = [t.shape[-1] for t in x[:3]]
        tensors = [readable_rows(_widened(t, max(widths)))[None] for t in (row, *x[:3], out)]
        slopes = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, lse.contiguous()[None], 0.0, x.causal, attn_mask=x.bias, scale=1.0
        )
        return _narrowed(slopes, widths)


class CudaEfficient(AttentionKernel):
    """`_scaled_dot_product_efficient_attention`: widths in multiples of 4, a bias whose rows are padded in memory, and
    a log-sum-exp whose rows are padded to multiples of 32 (not on ROCm)."""

    name = "torch's memory-efficient attention on CUDA"
    dtypes = (torch.float32,)
    any_width = True

    def forward(self, x: Operands) -> tuple[Tensor, Tensor]:
        eta, atoms, points = (_aligned(t)[None] for t in x[:3])
        out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
            eta, atoms, points, spaced_rows(x.bias), True, 0.0, x.causal, scale=1.0
        )
        queries, width = x.eta.shape[1], x.points.shape[-1]
        return out[0, ..., :width].contiguous(), lse[0, :, :queries].contiguous()

    def backward(self, x: Operands, row: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        widths = [t.shape[-1] for t in x[:3]]
        row, eta, atoms, points, out = (_aligned(t)[None] for t in (row, *x[:3], out))
        more = 0 if torch.version.hip else -lse.shape[-1] % LSE_ROW
        lse = pad(lse, (0, more), value=torch.inf)[None]
        nothing = torch.zeros((), dtype=torch.int64, device=lse.device)  # seed and offset of a dropout that is off
        slopes = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            *(row, eta, atoms, points, spaced_rows(x.bias), out, lse, nothing, nothing),
            *(0.0, [True, True, True, False], x.causal),
            scale=1.0,
        )
        return _narrowed(slopes[:3], widths)


def kernel_of(device: torch.device) -> AttentionKernel | None:
    """The kernel that serves tensors on a device; None where torch has none that returns the log-sum-exp."""
    return {"cpu": CpuFlash(), "cuda": CudaEfficient()}.get(device.type)


def _aligned(tensor: Tensor) -> Tensor:
    """Rows of a multiple of `VECTOR` entries, side by side; columns of zeros change no score, and are cut off again."""
    return _widened(tensor, tensor.shape[-1] + -tensor.shape[-1] % VECTOR).contiguous()


def _widened(tensor: Tensor, width: int) -> Tensor:
    return tensor if tensor.shape[-1] == width else pad(tensor, (0, width - tensor.shape[-1]))


def _narrowed(slopes, widths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    eta, atoms, points = (slope[0, ..., :width].contiguous() for slope, width in zip(slopes, widths, strict=True))
    return eta, atoms, points


def spaced_rows(bias: Tensor | None) -> Tensor | None:
    """The bias in memory whose rows start at multiples of `BIAS_ROW` entries; axes of stride 0 stay so."""
    if bias is None:
        return None
    own = bias[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in bias.stride())]
    return pad(own, (0, -own.shape[-1] % BIAS_ROW))[..., : own.shape[-1]].expand(bias.shape)
