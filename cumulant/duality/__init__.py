"""The convex duals of the log-normalizer: free energy, evidence bound, generalised divergence, boosting (§6).

    G(η)   = max_q { E_q⟨η,x⟩ − KL(q ‖ h) }                     the evidence bound is tight at q = p_η       (S3-F3)
    F      = −T log Σ e^{−E/T} = ⟨E⟩ − T S                       G with the sign and the unit of an energy   (S3-F1)
    Σq₀ − min_λ Σ q₀ e^{−Mλ} = min{D(p ‖ q₀): p ≥ 0, Mᵀp = 0}    the same without Σp = 1: boosting           (S3-F4)

The dual with a normalised law, maximum entropy, is `cumulant.geometry.maximum_entropy`. Under torch.autocast tables are
taken in float32, queries and atoms rounded as for a matrix product.
"""

from cumulant.duality.divergence import Boosting, boosting, generalized_kl
from cumulant.duality.energy import FreeEnergy, free_energy
from cumulant.duality.evidence import elbo, elbo_gap

__all__ = ["Boosting", "FreeEnergy", "boosting", "elbo", "elbo_gap", "free_energy", "generalized_kl"]
