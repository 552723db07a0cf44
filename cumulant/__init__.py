"""Attention is the mean of an exponential family: its log-normalizer as an object to compute with.

G(η) = log ∫ e^⟨x,η⟩ h(dx)

Names are imported when they are first used, so that `cumulant --help` and shell completion need not wait for torch.
"""

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cumulant import (
        boltzmann,
        contrastive,
        duality,
        dynamics,
        filters,
        geometry,
        hopfield,
        link,
        nn,
        potentials,
        regression,
        residual,
        samplers,
        solve,
    )
    from cumulant.attention import Attended, attend, attention
    from cumulant.kernels import Moments, Ranks, deal, fisher_product, moments, sharded_moments
    from cumulant.measures import (
        Box,
        Empirical,
        Gaussian,
        Measure,
        Sharded,
        Sphere,
        convolve,
        from_distribution,
        independent,
        per_query,
        product,
        shard,
    )
    from cumulant.solve import Anderson, Damped, Picard, Solution, Status, fixed_point

__version__ = "0.1.0"

__all__ = [
    "Anderson",
    "Attended",
    "Box",
    "Damped",
    "Empirical",
    "Gaussian",
    "Measure",
    "Moments",
    "Picard",
    "Ranks",
    "Sharded",
    "Solution",
    "Sphere",
    "Status",
    "attend",
    "attention",
    "boltzmann",
    "contrastive",
    "convolve",
    "deal",
    "duality",
    "dynamics",
    "filters",
    "fisher_product",
    "fixed_point",
    "from_distribution",
    "geometry",
    "hopfield",
    "independent",
    "link",
    "moments",
    "nn",
    "per_query",
    "potentials",
    "product",
    "regression",
    "residual",
    "samplers",
    "shard",
    "sharded_moments",
    "solve",
]

_SOURCES = {  # module → public names that are not modules of this package themselves
    "attention": ("Attended", "attend", "attention"),
    "kernels": ("Moments", "Ranks", "deal", "fisher_product", "moments", "sharded_moments"),
    "measures": (
        *("Box", "Empirical", "Gaussian", "Measure", "Sharded", "Sphere", "convolve", "from_distribution"),
        *("independent", "per_query", "product", "shard"),
    ),
    "solve": ("Anderson", "Damped", "Picard", "Solution", "Status", "fixed_point"),
}
_SOURCE = {name: module for module, names in _SOURCES.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, or a module of this package."""
    if name.startswith("_") or (name not in __all__ and find_spec(f"{__name__}.{name}") is None):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_SOURCE.get(name, name)}")
    value = getattr(module, name) if name in _SOURCE else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """This package; importing the file attention.py does not take its name from the function `attention`."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _SOURCE and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
