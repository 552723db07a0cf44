"""Can a compressed cache certify its own error? Bounds per head and query on real keys, beside the errors themselves.

    python examples/cache_certificate.py                 # two documents, three budgets: some minutes of one thread

Heads hold tangents of G on clusters of keys, with the budgets and the clusters of `backtest+norepeat`; values are means
and log-masses those of the tangents, so that the bounds of certificate_bounds.py hold. They are computed from what a
compressor could store of every cluster, the more the better, and from all keys, which is the most that any certificate
made of variance and range can know:

    radii     of keys and of values                                           8 bytes a cluster
    variance  also the largest eigenvalue of either covariance, least weight  20 bytes a cluster
    full      both covariances in place of their eigenvalues                  2 d(d + 1) + 2 e(e + 1) + 12 a cluster
    codes     every key in 8 bits, with its step and its weight               d + 8 bytes a token, and 8 a cluster
    oracle    σ², m and M at every query from all keys, and the covariance of values

Radii and eigenvalues of keys are in one metric for each key head, the best on average: A^½, A the geometric mean of the
second moment of η − η₀ and of the inverse of the covariance within clusters. No bound may lie below its error; if one
does, the script fails.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from certificate_bounds import (
    Attending,
    Clusters,
    Spread,
    ValueSpread,
    certificate,
    coded_spread,
    covariances,
    exact_spread,
    largest_eigenvalue,
    narrowed,
    quadratic,
    radii,
    radius_spread,
    tangent_clusters,
)
from torch import Tensor

from cumulant.cache import Backtest, HeadEntries, LayerPrefix, on_cumulant, prefill
from cumulant.cache.audit.continuation import read_on
from cumulant.cache.audit.head_errors import FullReading, read_full
from cumulant.cache.audit.texts import CHARACTERS, default_documents, windows
from cumulant.cache.budget import budget
from cumulant.cache.fitted.atoms import k_means
from cumulant.cache.fitted.readings import KeyHeads, LawQueries, read
from cumulant.cache.fitted.recipe import SINKS
from cumulant.observatory import load

KINDS = ("radii", "variance", "full", "codes", "oracle")
SMALL = 0.1  # of |o|: what a bound should be below
PRODUCT = "backtest"  # whose error is measured beside that of the tangents
ROUNDING = 1e-9


class Pair(NamedTuple):
    """One head and query: lengths over |o|.

    error    of the tangents
    product  of `backtest+norepeat` with as many entries: fitted values, expected masses
    whole    whether the head holds every token
    bounds   by kind: bound, its part from masses, its part from values; and M in nats, mean over clusters
    """

    error: float
    product: float
    whole: bool
    bounds: dict[str, tuple[float, ...]]


def clusters_of(tokens: KeyHeads, law: LawQueries, entries: int, recent: int) -> Clusters:
    """The first and the last tokens alone, and the clusters that `backtest` makes of the others, at the mean query."""
    length = tokens.keys.shape[1]
    if entries >= length:
        cluster = torch.arange(length)
    else:
        readings, recent = read(tokens, law), max(0, min(recent, entries - SINKS - 1))
        middle, alone = slice(SINKS, length - recent), SINKS + recent
        inner = k_means(readings.points[:, middle], readings.rms[:, middle], entries - alone, 3)[0]
        cluster = torch.cat([torch.arange(SINKS), alone + inner, torch.arange(SINKS, alone)])
        cluster = cluster.unique(return_inverse=True)[1]  # some of the clusters may be empty
    return tangent_clusters(tokens.keys[0].double(), tokens.values[0].double(), cluster, law.eta[0].double().mean(0))


def metric_roots(clusters: Clusters, zeta: Tensor) -> tuple[Tensor, Tensor]:
    """A^½ and A^−½, A the geometric mean of E ζζᵀ and the inverse of the covariance within clusters: of all metrics
    E |A^−½ζ|² · E |A^½x|² is least."""
    x = clusters.offset * clusters.weight.sqrt()[:, None]
    queries, within = _regular(zeta.mT @ zeta), _regular(x.mT @ x)
    root, inverse = _power(within, 0.5), _power(within, -0.5)
    metric = inverse @ _power(root @ queries @ root, 0.5) @ inverse
    return _power(metric, 0.5), _power(metric, -0.5)


def _regular(moment: Tensor) -> Tensor:
    scale = moment.diagonal().mean().clamp_min(1e-12)
    return moment / scale + 1e-4 * torch.eye(len(moment), dtype=moment.dtype)


def _power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    return (vectors * values.clamp_min(1e-12) ** exponent) @ vectors.mT


def spreads(clusters: Clusters, law: Tensor, eta: Tensor, bits: int) -> Iterator[tuple[str, Spread, ValueSpread]]:
    """What is known of keys and values, by kind; law (r, d) are queries that a compressor has."""
    root, inverse = metric_roots(clusters, law - clusters.typical)
    x, zeta = clusters.offset @ root, eta - clusters.typical
    length, radius = torch.linalg.vector_norm(zeta @ inverse, dim=1), radii(clusters.values, clusters)
    by_radius = radius_spread(radii(x, clusters), length)
    yield "radii", by_radius, ValueSpread(radius, radius)
    least = torch.ones_like(radius).scatter_reduce(0, clusters.cluster, clusters.weight, "amin")
    top = largest_eigenvalue(covariances(x, clusters))
    of_values = covariances(clusters.values, clusters)
    deviation = largest_eigenvalue(of_values).sqrt()
    known = ValueSpread(radius, deviation, of_values)
    scalar = length.square()[:, None] * top
    yield "variance", narrowed(by_radius, scalar, least, exact=False), known._replace(covariance=None)
    variance = quadratic(covariances(clusters.offset, clusters), zeta)
    yield "full", narrowed(by_radius, variance, least, exact=True), known
    yield "codes", coded_spread(clusters, x, zeta @ inverse, bits), known._replace(covariance=None)
    yield "oracle", exact_spread(clusters, eta), known


def length_of(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1)


def product_error(entries: HeadEntries, asked: Attending, output: Tensor) -> Tensor:
    """(q,) |ô − o| of entries of a compressor."""
    keys, values = entries.keys.double(), entries.values.double()
    scores = asked.eta @ keys.mT + (0 if entries.log_mass is None else entries.log_mass.double())
    total = torch.logaddexp(scores.logsumexp(-1), asked.local)
    share, rest = (scores - total[:, None]).exp(), (asked.local - total).exp()
    return length_of(share @ values + rest[:, None] * asked.local_output - output)


def of_key_head(
    layer: LayerPrefix,
    number: int,
    law: LawQueries,
    full: FullReading,
    made: HeadEntries,
    plan: tuple[int, int],
    bits: int,
) -> list[Pair]:
    """All pairs of the heads that share one key head."""
    of, one = slice(number * layer.groups, (number + 1) * layer.groups), slice(number, number + 1)
    tokens = KeyHeads.tokens(layer.keys[one].float(), layer.values[one].float())
    own = LawQueries(*(x[one] for x in law))
    clusters = clusters_of(tokens, own, *plan)
    parts = full.queries[of], full.local[of], full.local_output[of]
    asked, output = Attending(*(x.flatten(0, 1) for x in parts)), full.output[of].flatten(0, 1)
    size, product, bounds, error = length_of(output), product_error(made, asked, output), {}, None
    for kind, spread, values in spreads(clusters, own.eta[0].double(), asked.eta, bits):
        found = certificate(clusters, spread, values, asked)
        error = length_of(found.output - output)
        if bool((found.bound < error - ROUNDING * size).any()):
            raise AssertionError(f"{layer.name}, key head {number}: a bound from {kind} is below the error")
        bounds[kind] = torch.stack([found.bound / size, found.mass / size, found.value / size, found.reach])
    whole = len(clusters.key) == len(clusters.offset)
    columns = {kind: [tuple(x) for x in rows.T.tolist()] for kind, rows in bounds.items()}
    return [
        Pair(float(error[i] / size[i]), float(product[i] / size[i]), whole, {k: c[i] for k, c in columns.items()})  # pyright: ignore[reportOptionalSubscript]
        for i in range(len(size))
    ]


@torch.no_grad()
def pairs_of(loaded, ids: Tensor, options: argparse.Namespace) -> Iterator[tuple[float, list[Pair]]]:
    """All heads and queries of a text, at every budget."""
    length = options.prefix
    compressor = Backtest(repeat=False, name="backtest+norepeat")
    prefix = prefill(loaded.model, ids[:length], loaded.tokenizer)
    later = read_on(prefix, ids[length:], options.every)
    evidence = compressor.evidence(prefix)
    readings = [read_full(*x) for x in zip(prefix.layers, later.layers, strict=True)]
    for keep in options.keep:
        room, found = budget(prefix, keep, with_mass=True), []
        plan, made = compressor.plan(prefix, room, evidence), compressor.compress(prefix, room, evidence)
        plans = iter(zip(plan.entries.tolist(), plan.recent.tolist(), strict=True))
        for n, layer in enumerate(prefix.layers):
            law = LawQueries.of(evidence.samples.following[n], length, layer.rotation, len(layer.keys))
            for head, entries in enumerate(made[n]):
                found += of_key_head(layer, head, law, readings[n], entries, next(plans), options.bits)
        yield keep, found


def table(pairs: dict[float, list[Pair]]) -> str:
    """Markdown: what share of pairs is below a tenth of |o|, and the median of bounds over errors."""
    lines = [f"| below \\|o\\|/10; median over the error | {' | '.join(f'keep {keep:g}' for keep in pairs)} |"]
    lines += ["|---" * (len(pairs) + 1) + "|"]

    def add(words: str, cell: Callable[[list[Pair]], str]) -> None:
        lines.append(f"| {words} | {' | '.join(cell(some) for some in pairs.values())} |")

    def bounds(kind: str) -> Callable[[list[Pair]], str]:
        def cell(some: list[Pair]) -> str:
            ratios = [p.bounds[kind][0] / p.error for p in some if not p.whole and p.error > ROUNDING]
            return f"{share(p.bounds[kind][0] < SMALL for p in some):.0%}; {statistics.median(ratios):.3g}"

        return cell

    add("pairs of heads that hold every token", lambda some: f"{share(p.whole for p in some):.0%}")
    add("the error itself", lambda some: f"{share(p.error < SMALL for p in some):.0%}")
    add("the error of `backtest+norepeat`", lambda some: f"{share(p.product < SMALL for p in some):.0%}")
    for kind in KINDS:
        add(f"bound from {kind}", bounds(kind))
    return "\n".join(lines)


def parts(pairs: dict[float, list[Pair]]) -> str:
    """Markdown: medians of pairs that are not held whole: what masses add to the bound, what values add, and M."""
    lines = [f"| masses; values; M | {' | '.join(f'keep {keep:g}' for keep in pairs)} |"]
    lines += ["|---" * (len(pairs) + 1) + "|"]
    for kind in KINDS:
        cells = []
        for some in pairs.values():
            rows = zip(*(p.bounds[kind][1:] for p in some if not p.whole), strict=True)
            cells.append("; ".join(f"{statistics.median(row):.2g}" for row in rows))
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def share(values: Iterable[bool]) -> float:
    return statistics.fmean(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--documents", type=int, default=2, help="of the audit's texts, of a kind each")
    parser.add_argument("--prefix", type=int, default=1024, help="tokens that are compressed")
    parser.add_argument("--continuation", type=int, default=128, help="tokens after them, with the queries")
    parser.add_argument("--every", type=int, default=8, help="one query in so many")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.5, 0.25, 0.125], help="shares of the bytes")
    parser.add_argument("--bits", type=int, default=8, help="of the codes of keys")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load(options.model)
    needed = options.prefix + options.continuation
    texts = windows(
        default_documents(CHARACTERS * needed, options.documents),
        loaded.tokenizer,
        options.prefix,
        options.continuation,
        options.documents,
    )
    pairs: dict[float, list[Pair]] = {keep: [] for keep in options.keep}
    with on_cumulant(loaded.model):
        for text in texts:
            ids = text.input_ids[:needed]
            for keep, found in pairs_of(loaded, ids, options):
                pairs[keep] += found
                print(f"{text.name} at {keep:g}: {len(found)} pairs", flush=True)
    print(
        "",
        table(pairs),
        "",
        "Medians of pairs that are not held whole, masses and values over |o|, M in nats:",
        "",
        parts(pairs),
        sep="\n",
    )


if __name__ == "__main__":
    main()
