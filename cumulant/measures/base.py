"""`Measure`: the base class of all measures.

    G(η) = log ∫ e^⟨x,η⟩ h(dx)      the log-normalizer (cumulant generating function) of an intrinsic measure h
    ∇G(η) = E_η[x]                  `mean`: attention, when h counts the keys and η is the query
    ∇²G(η) = Cov_η[x]               `fisher`: Fisher information, expansion of the residual step
    G*(μ) = sup_η ⟨η,μ⟩ − G(η)      `conjugate`: maximum entropy;  its argmax η is `natural`, the canonical link

Here p_η(dx) = e^{⟨x,η⟩ − G(η)} h(dx) is h tilted by η and normalised. A measure implements `log_normalizer`; everything
else follows by differentiation, and a family overrides what it has in closed form.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from cumulant.checks import broadcast, from_numpy, holds, sentence, shape
from cumulant.display import html_table, one_line
from cumulant.solve import Solution
from cumulant.special import log_det_plus_identity
from cumulant.typing import Draws, Matrices, PerQuery, Queries

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound="Measure")


def per_query(method: Callable[Concatenate[M, Tensor, P], R]) -> Callable[Concatenate[M, Tensor, P], R]:
    """Decorator that passes η to a method as (*batch, q, d).

    η (and any further tensor argument) is checked and broadcast against the batch of the measure; a single query (d,)
    gets a query axis before the call and loses it after.

    >>> import torch
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, eq=False)
    ... class Coin(Measure):                                                # a unit mass on 0 and on 1
    ...     dim = 1
    ...     @per_query
    ...     def log_normalizer(self, eta):
    ...         return torch.nn.functional.softplus(eta[..., 0])            # (*batch, q, 1) → (*batch, q)
    >>> Coin().mean(torch.zeros(1)), Coin().mean(torch.zeros(5, 1)).shape
    (tensor([0.5000]), torch.Size([5, 1]))
    """

    @functools.wraps(method)
    def wrapped(self: M, eta: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            eta, *args = from_numpy(eta, *args)  # pyright: ignore[reportAssignmentType]
            kwargs = dict(zip(kwargs, from_numpy(*kwargs.values()), strict=True))  # pyright: ignore[reportAssignmentType]
        others = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if not torch.compiler.is_compiling():
            for tensor in (eta, *others):
                self.check_queries(tensor, method.__name__)
            for count in (a for a in args if isinstance(a, int) and a < 1):
                where = f"{type(self).__name__}.{method.__name__}"
                raise ValueError(sentence(where, "at least one draw per query", count, "Pass n ≥ 1."))
        single = all(t.ndim == 1 for t in (eta, *others))
        rows = [t[None] if t.ndim == 1 else t for t in (eta, *others)]
        full = broadcast(
            f"{type(self).__name__}.{method.__name__}",
            torch.Size([*self.batch_shape, self.query_rows or 1, self.dim]),
            *(t.shape for t in rows),
        )
        expanded = iter([t.expand(full) for t in rows])
        eta = next(expanded)
        args = tuple(next(expanded) if isinstance(a, Tensor) else a for a in args)  # pyright: ignore[reportAssignmentType]
        kwargs = {k: next(expanded) if isinstance(a, Tensor) else a for k, a in kwargs.items()}  # pyright: ignore[reportAssignmentType]
        out = method(self, eta, *args, **kwargs)
        return out.select(len(full) - 2, 0) if single else out  # pyright: ignore[reportAttributeAccessIssue]

    return wrapped


class Hull(NamedTuple):
    """The closed hull of the support, as `natural` needs it; q is 1 unless each query row has its own measure.

    diameter  (*batch, q)        a length scale of the support
    span      (*batch, q, d, d)  orthonormal basis of its directions in columns, padded by zero columns
    bound     (*batch, q)        sup of G* on the hull: a larger value proves a point outside; +inf if there is none
    """

    diameter: Tensor
    span: Tensor
    bound: Tensor


class Measure(ABC):
    """A σ-finite measure h on R^d. Subclasses are frozen dataclasses, either abstract or final.

        G(η) = log ∫ e^⟨x,η⟩ h(dx),    ∇G = E_η[x],    ∇²G = Cov_η[x],    G*(μ) = sup_η ⟨η,μ⟩ − G(η)

    ``dim`` is d, a field or a property. ``batch_shape`` are the axes of independent measures held in one object; they
    broadcast with the leading axes of η. ``query_rows`` is q where every query row has a measure of its own.
    """

    dim: int
    __array_ufunc__ = None  # NumPy arrays defer to our operators

    @property
    def batch_shape(self) -> torch.Size:
        return torch.Size()

    @property
    def query_rows(self) -> int | None:
        return None

    # ------------------------------------------------------------------ the one required method

    @abstractmethod
    def log_normalizer(self, eta: Queries) -> PerQuery:
        """G(η) = log ∫ e^⟨x,η⟩ h(dx):  (*batch, q, d) → (*batch, q).

        +inf outside the natural domain, −inf for the zero measure; never raises for a value of η.
        """

    # ------------------------------------------------------------------ derived by differentiation

    @per_query
    def mean(self, eta: Queries) -> Queries:
        """∇G(η) = E_η[x]:  (*batch, q, d) → (*batch, q, d)."""
        gradient, value = torch.func.grad_and_value(lambda e: self.log_normalizer(e).sum())(eta)
        self._check_domain(eta, value)
        return gradient

    @per_query
    def fisher_mv(self, eta: Queries, v: Queries) -> Queries:
        """∇²G(η) v = Cov_η[x] v without the matrix:  (*batch, q, d) → (*batch, q, d)."""
        return torch.func.grad(lambda e: (self.mean(e) * v).sum())(eta)

    @per_query
    def fisher(self, eta: Queries) -> Matrices:
        """∇²G(η) = Cov_η[x]:  (*batch, q, d) → (*batch, q, d, d)."""
        basis = torch.eye(self.dim, dtype=eta.dtype, device=eta.device)
        return torch.func.vmap(lambda e: self.fisher_mv(eta, e.expand_as(eta)), out_dims=-1)(basis)

    def log_volume(self, eta: Queries) -> PerQuery:
        """log det(I + ∇²G(η)): how much the residual step η + ∇G(η) expands volume (X-1)."""
        return log_det_plus_identity(self.fisher(eta))

    @per_query
    def kl(self, eta1: Queries, eta2: Queries) -> PerQuery:
        """KL(p_η1 ‖ p_η2) = G(η2) − G(η1) − ⟨∇G(η1), η2 − η1⟩ (S1-I1 with its order corrected).

        Infinite where η2 leaves the natural domain; zero for the zero measure.
        """
        g1, g2 = self.log_normalizer(eta1), self.log_normalizer(eta2)
        empty = g1 == -torch.inf
        gap = torch.where(empty, 0, g2) - torch.where(empty, 0, g1)
        return gap - (self.mean(eta1) * (eta2 - eta1)).sum(-1)

    @per_query
    def kl_to_base(self, eta: Queries) -> PerQuery:
        """KL(p_η ‖ h/h(R^d)) = ⟨η, ∇G(η)⟩ − G(η) + G(0): how far the query moved the measure."""
        return self.kl(eta, torch.zeros_like(eta))

    @property
    def log_mass(self) -> PerQuery:
        """G(0) = log h(R^d):  (*batch), or (*batch, q) where each query row has its own measure."""
        like = self.empty_tensor()
        zero = torch.zeros(self.dim, dtype=like.dtype, device=like.device)
        return self.log_normalizer(zero if self.query_rows is None else zero.expand(self.query_rows, -1))

    # ------------------------------------------------------------------ duality

    @per_query
    def natural(self, mean: Queries, *, max_steps: int = 100) -> Solution:
        """η with ∇G(η) = μ, the canonical link ∇G*:  (*batch, q, d) → `Solution` of (*batch, q, d).

        The status is CONVERGED, BOUNDARY (η at infinity) or OUTSIDE (no η) per query. Differentiable to first order
        in μ and in the parameters of the measure, by the implicit function theorem: dη = ∇²G⁻¹ (dμ − d∇G).
        See `cumulant.measures.dual` for the method and the width of the undecided band.
        """
        from cumulant.measures.dual import natural

        return natural(self, mean, max_steps)

    @per_query
    def conjugate(self, mean: Queries) -> PerQuery:
        """G*(μ) = sup_η ⟨η,μ⟩ − G(η):  (*batch, q, d) → (*batch, q).

        The smallest KL to h among laws of mean μ if h has mass 1 (X-11). Finite on the boundary where the face carries
        mass, +inf outside the hull. ∇G* is `natural`.
        """
        from cumulant.measures.dual import conjugate

        return conjugate(self, mean)

    def hull(self) -> Hull:
        """Scale, directions and conjugate bound of the support; by default from the covariance of h at η = 0."""
        from cumulant.measures.dual import hull_from_fisher

        return hull_from_fisher(self)

    # ------------------------------------------------------------------ sampling

    def sample(self, eta: Queries, n: int, *, generator: torch.Generator | None = None) -> Draws:
        """n independent draws from p_η for every query:  (*batch, q, d) → (*batch, q, n, d)."""
        where, advice = f"{type(self).__name__}.sample", "Implement sample(eta, n, *, generator) on it."
        got = "one that defines log_normalizer only"
        raise TypeError(sentence(where, "a measure that can be sampled", got, advice))

    # ------------------------------------------------------------------ algebra: acts on h, what happens to G follows

    def __add__(self, other: Measure) -> Measure:
        """h + g: the union of two sets of atoms.  G = logaddexp(G_h, G_g)."""
        from cumulant.measures.compose import Sum

        return Sum.of(self, other)

    def __radd__(self, other: object) -> Measure:
        if isinstance(other, int) and other == 0:  # the start value of Python's sum()
            return self
        return self + other  # pyright: ignore[reportOperatorIssue]

    def __mul__(self, mass: int | float | Tensor) -> Measure:
        """c · h with c ≥ 0.  G + log c."""
        from cumulant.measures.transform import Scaled

        return Scaled.by(self, mass)

    __rmul__ = __mul__

    def __rmatmul__(self, matrix: Tensor) -> Measure:
        """A @ h, the image of h under x ↦ A x.  G(Aᵀη)."""
        from cumulant.measures.transform import Image

        return Image(self, torch.as_tensor(matrix))

    def shift(self, offset: Tensor) -> Measure:
        """h translated by b.  G + ⟨b, η⟩."""
        from cumulant.measures.transform import Shifted

        return Shifted(self, offset)

    def tilt(self, eta0: Tensor) -> Measure:
        """e^⟨x,η0⟩ h(dx), not renormalised.  G(η + η0)."""
        from cumulant.measures.transform import Tilted

        return Tilted(self, eta0)

    def normalized(self) -> Measure:
        """h / h(R^d), a probability.  G − G(0)."""
        from cumulant.measures.transform import Scaled

        log_mass = self.log_mass
        if not holds(log_mass.isfinite()):
            where, advice = f"{type(self).__name__}.normalized", "A measure of mass 0 or ∞ cannot be a probability."
            raise ValueError(sentence(where, "a finite positive mass", f"log mass {log_mass.tolist()}", advice))
        # a measure without tensors serves every dtype, and stays so
        return Scaled(self, -log_mass if first_tensor(self) is not None else -log_mass.item())

    # ------------------------------------------------------------------ housekeeping

    def to(self: M, target: torch.dtype | torch.device | str) -> M:
        """The same measure with every floating tensor in another dtype or on another device."""
        if not is_dataclass(self):
            if first_tensor(tuple(vars(self).values())) is not None:
                where, advice = f"{type(self).__name__}.to", "Decorate it with @dataclass(frozen=True)."
                raise TypeError(sentence(where, "a dataclass", "a plain class", advice))
            return self
        moved = {f.name: _moved(getattr(self, f.name), target) for f in fields(self) if f.init}
        return replace(self, **moved)  # pyright: ignore[reportReturnType]

    def __repr__(self) -> str:
        return one_line(type(self).__name__, self._parts())

    def _repr_html_(self) -> str:
        title = f"{type(self).__name__}: a measure on R^{self.dim}"
        return html_table(title, {"batch": tuple(self.batch_shape), **self._parts()})

    def _parts(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self)} if is_dataclass(self) else {}

    def accept_numpy(self) -> None:
        """Fields that are NumPy arrays become tensors over the same memory; for `__post_init__`."""
        if not torch.compiler.is_compiling() and is_dataclass(self):
            for f in fields(self):
                value = getattr(self, f.name)
                if not isinstance(value, Tensor):
                    object.__setattr__(self, f.name, *from_numpy(value))

    def empty_tensor(self) -> Tensor:
        """An empty tensor with the dtype and device of the measure; float64 where it holds no tensor."""
        own = first_tensor(self)
        return torch.empty(0, dtype=torch.float64) if own is None else own.new_empty(0)

    def check_queries(self, eta: object, method: str) -> None:
        where = f"{type(self).__name__}.{method}"
        if not isinstance(eta, Tensor) or not eta.is_floating_point():
            got = eta.dtype if isinstance(eta, Tensor) else type(eta).__name__
            expected, advice = "queries as a floating torch.Tensor", "Call .to(torch.float64) on them."
            raise TypeError(sentence(where, expected, got, advice))
        if eta.ndim == 0 or eta.shape[-1] != self.dim:
            expected = f"queries of shape (*batch, q, d={self.dim}) or (d={self.dim},)"
            raise ValueError(sentence(where, expected, shape(eta), "Check the last axis."))
        own = first_tensor(self)
        if own is not None and eta.dtype != own.dtype:
            advice = f"Call .to({own.dtype}) on the queries or .to({eta.dtype}) on the measure."
            raise TypeError(sentence(where, f"dtype {own.dtype} as the measure", eta.dtype, advice))
        if own is not None and eta.device != own.device:
            expected, advice = f"device {own.device} as the measure", f"Call .to({str(own.device)!r}) on it."
            raise ValueError(sentence(where, expected, eta.device, advice))
        rows = self.query_rows
        if rows is not None and ((eta.ndim == 1 and rows != 1) or (eta.ndim > 1 and eta.shape[-2] not in (1, rows))):
            expected = f"q={rows} query rows, one for each row of log_weights"
            raise ValueError(sentence(where, expected, shape(eta), f"Pass eta of shape (*batch, {rows}, {self.dim})."))

    def _check_domain(self, eta: Tensor, log_normalizer: Tensor) -> None:
        """Means, covariances and samples need G(η) < ∞."""
        if not holds(log_normalizer < torch.inf):
            expected = "natural parameters inside the domain, where G is finite"
            got = f"G = +inf for at least one of {shape(eta)}"
            advice = "Keep η inside the domain (log_normalizer itself returns +inf there)."
            raise ValueError(sentence(f"{type(self).__name__}.eta", expected, got, advice))


def first_tensor(value: object) -> Tensor | None:
    """The first floating tensor a measure holds, searched through its parts."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, Measure) and is_dataclass(value):
        value = tuple(getattr(value, f.name) for f in fields(value))
    if isinstance(value, tuple):
        return next((t for t in map(first_tensor, value) if t is not None), None)
    return None


def _moved(value: object, target: torch.dtype | torch.device | str) -> object:
    if isinstance(value, Tensor):
        return value.to(target) if value.is_floating_point() or not isinstance(target, torch.dtype) else value
    if isinstance(value, Measure):
        return value.to(target)
    if type(value) is tuple:
        return tuple(_moved(v, target) for v in value)
    return value
