"""What the tests of the native kernel share: calls of `moments` as data, an answer with gradients, sums in NumPy."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from cumulant import Moments, moments
from cumulant.kernels.native.call import entries

native = pytest.mark.skipif(entries() is None, reason="no native kernel is built here: `cumulant doctor` says why")
FIELDS = ("eta", "atoms", "values", "log_weights", "sink")


@contextmanager
def threads(count: int):
    """torch with this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@dataclass(frozen=True)
class Problem:
    """Tensors of a call (eta, atoms, and values, log_weights, sink where they are given), and its other arguments."""

    tensors: dict[str, Tensor]
    options: dict = field(default_factory=dict)

    @staticmethod
    def of(q: int, n: int, d: int, e: int | None = None, *, lead=(), keys=None, seed: int = 0, **options) -> Problem:
        """Normal numbers; ``log_weights`` and ``sink`` are shapes, or tensors, or numbers for a sink."""
        keys = lead if keys is None else keys
        tensors = {"eta": normal(*lead, q, d, seed=seed), "atoms": normal(*keys, n, d, seed=seed + 1)}
        if e is not None:
            tensors["values"] = normal(*keys, n, e, seed=seed + 2)
        for name in ("log_weights", "sink"):
            given = options.pop(name, None)
            if isinstance(given, tuple):
                given = normal(*given, seed=seed + 3)
                given = given.masked_fill(normal(*given.shape, seed=seed + 4) > 0.9, -torch.inf)
            if isinstance(given, Tensor):
                tensors[name] = given
            elif given is not None:
                options[name] = given
        return Problem(tensors, options)

    def to(self, dtype: torch.dtype) -> Problem:
        return replace(self, tensors={name: t.to(dtype) for name, t in self.tensors.items()})

    def laid(self, lay) -> Problem:
        """The same numbers in other layouts."""
        return replace(self, tensors={name: lay(t) for name, t in self.tensors.items()})

    def leaves(self, needs=FIELDS) -> dict[str, Tensor]:
        return {name: t.detach().requires_grad_(name in needs) for name, t in self.tensors.items()}

    def answer(self, backend: str, statistics="all", needs=FIELDS) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Every statistic, and the gradient of a random linear function of all that are finite."""
        given = self.leaves(needs)
        found = held(moments(**given, **self.options, backend=backend, statistics=statistics))
        loss = [probe(found)] if any(t.requires_grad for t in found.values()) else []
        wanted = {name: t for name, t in given.items() if t.requires_grad}
        slopes = torch.autograd.grad(loss[0], list(wanted.values()), allow_unused=True) if loss and wanted else ()
        slopes = [torch.zeros_like(t) if s is None else s for s, t in zip(slopes, wanted.values(), strict=False)]
        return {name: t.detach() for name, t in found.items()}, dict(zip(wanted, slopes, strict=False))

    def check(self, tolerance: float = 1e-11, statistics="all", needs=FIELDS, backend: str = "native") -> None:
        """Values and gradients are those of the reference."""
        exact = replace(self, tensors={name: t.clone() for name, t in self.tensors.items()})  # its own layout
        ours = self.answer(backend, statistics, needs)
        with threads(1):
            same(ours, exact.answer("dense", statistics, needs), tolerance)


def held(record: Moments) -> dict[str, Tensor]:
    """Everything a record holds, by name."""
    found = {"log_normalizer": record.log_normalizer, **record.statistics}
    return found if record.sink_mass is None else found | {"sink_mass": record.sink_mass}


def probe(found: dict[str, Tensor], seed: int = 9) -> Tensor:
    """A random linear function of what is finite."""
    parts = []
    for i, (_, value) in enumerate(sorted(found.items())):
        if value.requires_grad:
            finite = torch.where(value.isfinite(), value, 0)
            parts.append((finite * normal(*value.shape, seed=seed + i).to(value.dtype)).sum())
    return torch.stack(parts).sum()


def same(ours, theirs, tolerance: float) -> None:
    """Equal statistics to a tolerance relative to their largest, and gradients to a hundred times that."""
    assert ours[0].keys() == theirs[0].keys()
    assert ours[1].keys() == theirs[1].keys()
    for part, factor in ((0, 1), (1, 100)):
        for name, expected in theirs[part].items():
            found = ours[part][name]
            assert found.shape == expected.shape
            size = torch.where(expected.isfinite(), expected, 0).abs().amax() if expected.numel() else 0.0
            bound = factor * tolerance * max(1.0, float(size))
            torch.testing.assert_close(
                found, expected, rtol=0, atol=bound, msg=lambda m, name=name, part=part: f"{name} ({part}): {m}"
            )


def by_sums(eta, atoms, values=None, log_weights=None, visible=None, sink=None) -> dict[str, np.ndarray]:
    """Every statistic of queries (q, d) over atoms (n, d) by its definition, row by row in NumPy."""
    eta, atoms = np.asarray(eta, float), np.asarray(atoms, float)
    q, n = len(eta), len(atoms)
    v = atoms if values is None else np.asarray(values, float)
    w = np.broadcast_to(np.zeros(n) if log_weights is None else np.asarray(log_weights, float), (q, n))
    seen = (w > -np.inf) & (True if visible is None else np.broadcast_to(np.asarray(visible), (q, n)))
    rows = []
    for i in range(q):
        x, y, u = atoms[seen[i]], v[seen[i]], w[i][seen[i]]
        if sink is not None and sink > -np.inf:
            x, y, u = np.vstack([x, 0 * eta[i]]), np.vstack([y, np.zeros(v.shape[1])]), np.append(u, sink)
        own = len(u) - (sink is not None and sink > -np.inf)
        s = x @ eta[i]
        p = np.exp(s + u - (s + u).max()) if len(u) else np.zeros(0)
        total = p.sum()
        p = p / total if len(u) else p
        m, a, mu = p @ y, p @ x, p @ s
        log_mass = (s + u).max() + np.log(total) if len(u) else -np.inf
        rows.append(
            {
                "log_normalizer": log_mass,
                "mean": m,
                "atom_mean": a,
                "mean_score": mu,
                "score_variance": p @ (s - mu) ** 2,
                "mean_log_weight": p @ u,
                "value_trace": p @ ((y - m) ** 2).sum(-1),
                "atom_trace": p @ ((x - a) ** 2).sum(-1),
                "max_score": s[:own].max() if own else -np.inf,
                "log_sum_square": np.log((p**2).sum()) + 2 * log_mass if len(u) else -np.inf,
                "entropy": -(p * np.log(np.where(p > 0, p, 1))).sum(),
                "effective_atoms": 1 / (p**2).sum() if len(u) else 0.0,
                **({} if sink is None else {"sink_mass": p[own:].sum()}),
            }
        )
    return {name: np.array([row[name] for row in rows]) for name in rows[0]} if rows else {}
