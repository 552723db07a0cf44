"""
Fisher information is the covariance of attention
=================================================

One matrix answers three questions about a query η. How are the keys spread under its attention weights? How does the
output m move if the query moves? How far apart are the distributions of two neighbouring queries? ::

    ∇²G(η) = Σ_n p_n (k_n − m)(k_n − m)ᵀ = ∂m/∂η,        KL(p_η ‖ p_{η+δ}) ≈ ½ δᵀ ∇²G(η) δ

A diffuse query has a wide ellipse and a sensitive output; one that has settled on a key has neither. The residual step
η + m expands volume by det(I + ∇²G), never below 1. The text claims that the covariance is the derivative of torch's
`scaled_dot_product_attention` in the query, over its scale, to 1e-12; for values V ≠ K the cross-covariance is.

Run with a file name to save the figure (needs matplotlib).
"""

import sys
from importlib.util import find_spec

import torch
from torch.func import jacrev
from torch.nn.functional import scaled_dot_product_attention

from cumulant import Empirical

keys = torch.tensor([[1.6, 0.3], [0.6, 1.4], [-1.0, 1.0], [-1.4, -0.5], [0.2, -1.3], [1.1, -0.9]], dtype=torch.float64)
values = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(6, 3).sin()
direction = torch.tensor([1.0, 0.45], dtype=torch.float64)
h, times = Empirical(keys), torch.linspace(0, 8, 161, dtype=torch.float64)
log_volume = h.log_volume(times[:, None] * direction)

# %%
# The covariance under the weights of one query, beside derivatives taken by torch, whose scores carry 1/√2.

scale, eta = keys.shape[-1] ** -0.5, 0.9 * direction
weights = torch.softmax(keys @ eta, 0)
centred = keys - weights @ keys
own, cross = (x.T @ (weights[:, None] * centred) for x in (keys, values))
slope = jacrev(scaled_dot_product_attention)(eta[None] / scale, keys, torch.cat([keys, values], -1))[0, :, 0] / scale

# %%
# A ring of queries around η, and its divergence from η beside the quadratic form.

angle = torch.linspace(0, 2 * torch.pi, 73, dtype=torch.float64)
ring = torch.stack([angle.cos(), angle.sin()], -1)
kl_ratio = h.kl(eta.expand(73, 2), eta + 1e-3 * ring) / (0.5e-6 * (ring @ own * ring).sum(-1))


def figure(path: str) -> None:
    import matplotlib.pyplot as plt

    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(12.5, 4.2), layout="constrained")
    left.scatter(*keys.T, s=60, color="gray", alpha=0.6, label="keys")
    for t, colour in {0: "tab:blue", 0.9: "tab:orange", 3: "tab:red"}.items():
        mean, root = h.mean(t * direction), torch.linalg.cholesky(h.fisher(t * direction))
        left.fill(*(mean + ring @ root.T).T, color=colour, alpha=0.25, label=f"η = {t} · (1, 0.45)")
        left.plot(*mean, "+", color=colour, ms=9, mew=2)
    left.set(title="1. Spread of the keys around the output (+)", aspect="equal", xlim=(-2.2, 2.3), ylim=(-1.9, 2.6))
    for radius, shade in {0.2: 1.0, 0.6: 0.5}.items():
        middle.plot(
            *h.mean(eta + radius * ring).T, color="tab:orange", alpha=shade, lw=2, label=f"exact, |δ| = {radius}"
        )
        middle.plot(*(h.mean(eta) + radius * ring @ own).T, "k:", alpha=shade, label=f"m + ∇²G δ, |δ| = {radius}")
    middle.set(title="2. Outputs for a ring of queries η + δ", aspect="equal", xlim=(0.2, 1.6), ylim=(-0.7, 0.9))
    spectrum = torch.linalg.eigvalsh(h.fisher(times[:, None] * direction))
    right.plot(times, spectrum, lw=2, label=["smaller eigenvalue of ∇²G", "larger eigenvalue of ∇²G"])
    right.plot(times, log_volume, "k--", label="log det(I + ∇²G): residual step")
    right.set(title="3. It fades as the query settles on a key", xlabel="t, with η = t · (1, 0.45)", xlim=(0, 8))
    for axis, place in ((left, "upper left"), (middle, "lower left"), (right, "upper right")):
        axis.legend(loc=place, fontsize=8)
    fig.savefig(path, dpi=120)


if __name__ == "__main__" and len(sys.argv) > 1 and find_spec("matplotlib"):
    figure(sys.argv[1])

assert max((h.fisher(eta) - own).abs().max(), (slope - torch.cat([own, cross])).abs().max()) < 1e-12
assert (kl_ratio - 1).abs().max() < 2e-3
assert (log_volume > 0).all()
