"""Symmetric roots of covariances and the symmetric map from one to another, differentiable where eigenvalues meet.

    S = A^½,      S dS + dS S = dA                   the root, and the Sylvester equation of its derivative

The derivative of an eigenvector divides by differences of eigenvalues, which are 0 for a whitened cloud; this one
divides by sums of roots.
"""

from __future__ import annotations

import torch
from torch import Tensor


def symmetric_root(a: Tensor) -> Tensor:
    """A^½, the symmetric positive definite S with S² = A:  (*batch, d, d) → (*batch, d, d).

    >>> import torch
    >>> symmetric_root(torch.tensor([[2.0, 1.0], [1.0, 2.0]])) @ symmetric_root(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
    tensor([[2.0000, 1.0000],
            [1.0000, 2.0000]])
    """
    return _SymmetricRoot.apply((a + a.mT) / 2)  # pyright: ignore[reportReturnType]


def symmetric_transport(a: Tensor, b: Tensor | None = None) -> Tensor:
    """The symmetric positive definite R with R A R = B: the optimal transport from N(0, A) to N(0, B) (X-5).

        R = A^{−½} (A^½ B A^½)^½ A^{−½},        = B^½ A^{−½} where A and B commute,        = A^{−½} for B = I

    a, b (*batch, d, d), positive definite; b is the identity if None.

    >>> import torch
    >>> symmetric_transport(torch.diag(torch.tensor([4.0, 1.0])), torch.diag(torch.tensor([1.0, 9.0])))
    tensor([[0.5000, 0.0000],
            [0.0000, 3.0000]])
    """
    root = symmetric_root(a)
    inverse = torch.linalg.inv(root)
    return inverse if b is None else inverse @ symmetric_root(root @ b @ root) @ inverse


class _SymmetricRoot(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(a)
        return (vectors * values.clamp_min(0).sqrt()[..., None, :]) @ vectors.mT

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx, grad):
        (s,) = ctx.saved_tensors
        return _Sylvester.apply(s, grad)

    @staticmethod
    def jvp(ctx, da):
        (s,) = ctx.saved_tensors
        return _Sylvester.apply(s, da)


class _Sylvester(torch.autograd.Function):
    """X with S X + X S = C for symmetric positive definite S."""

    generate_vmap_rule = True

    @staticmethod
    def forward(s: Tensor, c: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(s)
        turned = vectors.mT @ c @ vectors
        return vectors @ (turned / (values[..., :, None] + values[..., None, :])) @ vectors.mT

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx, grad):
        s, x = ctx.saved_tensors
        w = _Sylvester.apply(s, grad)
        return -(w @ x.mT + x.mT @ w), w  # pyright: ignore[reportOptionalOperand, reportOptionalMemberAccess]

    @staticmethod
    def jvp(ctx, ds, dc):
        s, x = ctx.saved_tensors
        change = torch.zeros_like(x) if dc is None else dc
        return _Sylvester.apply(s, change if ds is None else change - ds @ x - x @ ds)
