"""Layers that learn, on the functions of this library: attention, Hopfield memories, and blocks with a guarantee.

Masks mean what they mean in torch.nn: True is blocked. Every layer reports its attention calls to observers
(`on_attention`), and has a sentence of what holds for it (``guarantees``).
"""

from cumulant.kernels.arguments import Support
from cumulant.nn.attention import MultiheadAttended, MultiheadAttention
from cumulant.nn.calls import AttentionCall, on_attention, report_attention
from cumulant.nn.closures import approximate_by_gaussian, approximate_by_mixture
from cumulant.nn.contrastive_losses import MultipleNegativesRankingLoss, NTXentLoss
from cumulant.nn.convex import ConvexBlock
from cumulant.nn.energy import EnergyBlock
from cumulant.nn.equilibrium import EquilibriumBlock
from cumulant.nn.heads import GaussianHead, MixtureHead
from cumulant.nn.hopfield import Hopfield, Recall
from cumulant.nn.memories import HopfieldLayer, HopfieldPooling
from cumulant.nn.regularisers import entropy_floor, z_loss
from cumulant.nn.swap import swap

__all__ = [
    "AttentionCall",
    "ConvexBlock",
    "EnergyBlock",
    "EquilibriumBlock",
    "GaussianHead",
    "Hopfield",
    "HopfieldLayer",
    "HopfieldPooling",
    "MixtureHead",
    "MultiheadAttended",
    "MultiheadAttention",
    "MultipleNegativesRankingLoss",
    "NTXentLoss",
    "Recall",
    "Support",
    "approximate_by_gaussian",
    "approximate_by_mixture",
    "entropy_floor",
    "on_attention",
    "report_attention",
    "swap",
    "z_loss",
]
