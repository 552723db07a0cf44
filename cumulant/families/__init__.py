"""Exponential families of a variable x in their usual parameters, for filters, samplers and `from_distribution`.

    p(x | θ) = e^{⟨θ, u(x)⟩ − A(θ)} h(dx)

| family              | x     | parameters | u(x)                | θ                     | A(θ)                       |
|---------------------|-------|------------|---------------------|-----------------------|----------------------------|
| `GammaFamily`       | x > 0 | α, β       | x, log x            | −β, α                 | logΓ(α) − α log β          |
| `NormalFamily`      | x     | m, v       | x, x²               | m/v, −1/(2v)          | m²/(2v) + ½log v           |
| `DirichletFamily`   | x ∈ Δ | a          | log x_1, …, log x_K | a                     | Σ logΓ(a_i) − logΓ(Σ a_i)  |
| `NormalGammaFamily` | μ, τ  | m, κ, α, β | log τ, τ, τμ, τμ²   | α−½, −β−½κm², κm, −½κ | logΓ(α) − α log β − ½log κ |

Δ is the simplex of K probabilities. Densities are taken against dx/x for the Gamma law, ∏ dx_i/x_i for the Dirichlet
law, dx/√2π and dμ dτ/√2π for the others. Who uses them:

    measures    `from_distribution(…, full=True)`: the law of u(X) as a measure, G(η) = A(θ + η) − A(θ)
    filters     the belief about x of a conjugate pair: the posterior is a shift of θ, the collapse an M-projection
    samplers    the law of η under a conjugate prior is the image of a member

What holds for every family (∇A is the mean, inverses, the M-projection matches means) is in tests/families.
"""

from cumulant.families.base import ExponentialFamily, StateMoments
from cumulant.families.gamma import DirichletFamily, GammaFamily
from cumulant.families.normal import NormalFamily, NormalGammaFamily

__all__ = [
    "DirichletFamily",
    "ExponentialFamily",
    "GammaFamily",
    "NormalFamily",
    "NormalGammaFamily",
    "StateMoments",
]
