"""The bounds of examples/certificate_bounds.py hold: against sums written out, and laws that attain them."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
BOUNDS = runpy.run_path(str(ROOT / "examples" / "certificate_bounds.py"))
f64 = torch.float64


def phi(x):
    return (x.expm1() - x) / x.square()


def random_law(generator, atoms=6):
    """Centred δ with weights: its mean of e^δ, variance, m and M."""
    weight = torch.rand(atoms, generator=generator, dtype=f64) ** 3
    weight = weight / weight.sum()
    delta = torch.randn(atoms, generator=generator, dtype=f64) * 10 ** (2.5 * torch.rand(1, generator=generator) - 1.5)
    delta = delta - weight @ delta
    return weight @ delta.exp(), weight @ delta.square(), -delta.min(), delta.max()


def test_the_mean_of_an_exponential_lies_between_two_laws_of_two_atoms_and_these_within_bennett():
    generator = torch.Generator().manual_seed(0)
    for _ in range(500):
        mean, variance, below, above = random_law(generator)
        low, high = BOUNDS["log_lower"](variance, below).exp(), BOUNDS["log_upper"](variance, above).exp()
        chain = torch.stack([1 + variance * phi(-below), low, mean, high, 1 + variance * phi(above)])
        assert bool((chain.diff() >= -1e-9 * chain[1:].abs()).all()), chain


@pytest.mark.parametrize("above", [1e-3, 0.3, 2.0, 30.0])
def test_two_atoms_attain_both_bounds(above):
    """At M with probability q, else at −qM/(1 − q)."""
    q = torch.tensor(0.2, dtype=f64)
    weight, delta = torch.stack([q, 1 - q]), torch.stack([above + 0 * q, -q * above / (1 - q)])
    mean, variance = weight @ delta.exp(), weight @ delta.square()
    assert float(BOUNDS["log_upper"](variance, delta[0])) == pytest.approx(float(mean.log()), rel=1e-9)
    assert float(BOUNDS["log_lower"](variance, -delta[1])) == pytest.approx(float(mean.log()), rel=1e-9)


def test_bounds_widen_with_what_is_not_known():
    variance = torch.linspace(0.01, 4, 50, dtype=f64)
    reach = torch.tensor(2.5, dtype=f64)
    assert bool((BOUNDS["log_upper"](variance, reach).diff() > 0).all())
    assert bool((BOUNDS["log_upper"](reach, variance + 1).diff() > 0).all())
    assert bool((BOUNDS["log_lower"](variance, reach).diff() > 0).all())  # a larger floor: a larger mean
    assert bool((BOUNDS["log_lower"](reach, variance).diff() < 0).all())
    assert float(BOUNDS["log_upper"](0 * reach, 0 * reach)) == float(BOUNDS["log_lower"](0 * reach, reach)) == 0


def test_no_choice_of_signs_is_longer_than_the_bound_on_sums_of_vectors():
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(20, 8, 3, generator=generator, dtype=f64)
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=f64)] * 8)
    longest = torch.linalg.vector_norm(torch.einsum("sm,qme->qse", signs, vectors), dim=-1).amax(1)
    bound = BOUNDS["longest_sum"](vectors)
    assert bool((longest <= bound).all())
    assert bool((bound <= torch.linalg.vector_norm(vectors, dim=-1).sum(1) + 1e-12).all())


class Case:
    """Tokens in clusters, queries around a typical one, and something held beside them."""

    def __init__(self, seed, spread, tokens=40, number=9, dim=5, width=3, queries=32):
        g = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=g, dtype=f64)  # noqa: E731
        centres, typical = 2 * draw(number, dim), draw(dim)
        cluster = torch.cat([torch.arange(number), torch.randint(number - 2, (tokens - number,), generator=g)])
        self.keys, self.values = centres[cluster] + spread * draw(tokens, dim), draw(tokens, width)
        self.clusters = BOUNDS["tangent_clusters"](self.keys, self.values, cluster, typical)
        self.asked = BOUNDS["Attending"](typical + draw(queries, dim), draw(queries), draw(queries, width))

    def knowledge(self):
        """By name: what is known of δ and of values."""
        c, eta = self.clusters, self.asked.eta
        zeta, radius = eta - c.typical, BOUNDS["radii"](c.values, c)
        length, top = torch.linalg.vector_norm(zeta, dim=1), BOUNDS["largest_eigenvalue"]
        within = BOUNDS["covariances"](c.offset, c)
        of_values = BOUNDS["covariances"](c.values, c)
        least = torch.ones_like(radius).scatter_reduce(0, c.cluster, c.weight, "amin")
        by_radius = BOUNDS["radius_spread"](BOUNDS["radii"](c.offset, c), length)
        exact, known = BOUNDS["exact_spread"](c, eta), BOUNDS["ValueSpread"]
        deviation = top(of_values).sqrt()
        scalar = BOUNDS["narrowed"](by_radius, length.square()[:, None] * top(within), least, exact=False)
        full = BOUNDS["narrowed"](by_radius, BOUNDS["quadratic"](within, zeta), least, exact=True)
        return {
            "radii": (by_radius, known(radius, radius)),
            "variance": (scalar, known(radius, deviation)),
            "full": (full, known(radius, deviation, of_values)),
            "codes": (BOUNDS["coded_spread"](c, c.offset, zeta), known(radius, deviation)),
            "oracle": (exact, known(radius, deviation, of_values)),
        }


@pytest.mark.parametrize("spread", [1e-3, 0.03, 0.3, 1.0, 8.0])
@pytest.mark.parametrize("seed", range(4))
def test_no_error_is_above_its_bound(seed, spread):
    case = Case(seed, spread)
    output = BOUNDS["attended"](case.keys, case.values, case.asked)
    small = BOUNDS["certificate"](case.clusters, *case.knowledge()["oracle"], case.asked).output
    error, bounds = torch.linalg.vector_norm(small - output, dim=-1), {}
    for name, known in case.knowledge().items():
        found = BOUNDS["certificate"](case.clusters, *known, case.asked)
        assert torch.equal(found.output, small)  # what is known changes the bound alone
        assert bool((error <= found.bound * (1 + 1e-9) + 1e-12).all()), name
        bounds[name] = found.bound
    assert float((bounds["oracle"] / bounds["radii"]).mean()) <= 1 + 1e-9
    if spread == 1e-3:
        assert bool((bounds["oracle"] < 10 * error + 1e-9).any())  # not vacuous where clusters are narrow


@pytest.mark.parametrize("spread", [0.03, 0.5, 3.0])
def test_what_is_stored_holds_for_every_token_of_every_cluster(spread):
    """σ², m and M from all keys lie within what radii, variances and least weights allow."""
    case = Case(7, spread)
    known = {name: spread for name, (spread, _) in case.knowledge().items()}
    exact = known.pop("oracle")
    for name, other in known.items():
        for part in ("variance", "below", "above"):
            assert bool((getattr(exact, part) <= getattr(other, part) * (1 + 1e-9) + 1e-12).all()), (name, part)
        assert bool((other.floor <= exact.variance * (1 + 1e-9) + 1e-12).all()), name


def test_the_mass_of_every_cluster_lies_between_its_bounds():
    case = Case(3, 0.7)
    scores = case.asked.eta @ case.keys.T
    tangent = case.asked.eta @ case.clusters.key.T + case.clusters.log_mass
    for c in range(len(case.clusters.key)):
        gap = scores[:, case.clusters.cluster == c].logsumexp(1) - tangent[:, c]
        for name, (spread, _) in case.knowledge().items():
            low = BOUNDS["log_lower"](spread.floor, spread.below)[:, c]
            high = BOUNDS["log_upper"](spread.variance, spread.above)[:, c]
            assert bool((low - 1e-9 <= gap).all()), name
            assert bool((gap <= high + 1e-9).all()), name


def test_entries_of_one_token_are_certified_to_be_right():
    case = Case(5, 1.0)
    clusters = BOUNDS["tangent_clusters"](case.keys, case.values, torch.arange(len(case.keys)), case.clusters.typical)
    case.clusters = clusters
    for name, known in case.knowledge().items():
        found = BOUNDS["certificate"](clusters, *known, case.asked)
        assert float(found.bound.max()) < 1e-12, name


@pytest.mark.long
def test_no_bound_on_real_keys_is_below_its_error():
    """The script of docs/cache.md on few tokens: it fails where a bound does, and an oracle knows more than radii."""
    command = [sys.executable, str(ROOT / "examples" / "cache_certificate.py"), "--documents", "1", "--keep", "0.5"]
    sizes = ["--prefix", "128", "--continuation", "16", "--threads", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *sizes], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    shares = dict(re.findall(r"\| bound from (\w+) \| (\d+)%", done.stdout))
    assert int(shares["radii"]) <= int(shares["codes"]) <= int(shares["oracle"]) <= 100
