"""How far the kernels are from numbers of higher precision: `python -m benchmarks.accuracy [PAGE]`.

Largest error over all queries, relative to the largest entry of the reference. Statistics are compared with the same
sums in NumPy's long double, gradients and Fisher products in float32 with the reference kernel in float64. With the
name of a Markdown page the tables are written between its marks, else they are printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.bounds import instruction_set
from benchmarks.results import machine
from cumulant.checks import sentence
from cumulant.files import insert, markdown_row, write
from cumulant.kernels import Moments, fisher_product, moments

MARK = "accuracy"
TOKENS, DIM = 2048, 64
BACKENDS = ("native", "streaming")
STATISTICS = {  # name → heading
    "log_normalizer": "G",
    "mean": "mean",
    "entropy": "entropy",
    "score_variance": "score variance",
    "value_trace": "value trace",
}
PULLED = ("mean", "log_normalizer", "entropy", "score_variance")


class Problem(NamedTuple):
    """One head in float64; ``hidden`` (q, n) is True where a query does not see a key."""

    name: str
    eta: Tensor
    atoms: Tensor
    values: Tensor
    hidden: Tensor
    causal: bool = False
    masked: bool = False

    def rounded(self, dtype: torch.dtype) -> Problem:
        eta, atoms, values = (t.to(dtype) for t in (self.eta, self.atoms, self.values))
        return self._replace(eta=eta, atoms=atoms, values=values)

    def moved(self, device: str) -> Problem:
        eta, atoms, values, hidden = (t.to(device) for t in (self.eta, self.atoms, self.values, self.hidden))
        return self._replace(eta=eta, atoms=atoms, values=values, hidden=hidden)

    @property
    def support(self) -> dict[str, Tensor | bool | None]:
        return {"causal": self.causal, "mask": ~self.hidden if self.masked else None}


def problems(tokens: int = TOKENS) -> Iterator[Problem]:
    """Normal queries, keys and values, and what makes them harder."""
    seed = torch.Generator().manual_seed(0)
    eta, atoms, values = torch.randn(3, tokens, DIM, generator=seed, dtype=torch.float64)
    eta = eta / DIM**0.5
    nothing = torch.zeros(tokens, tokens, dtype=torch.bool)
    yield Problem("ordinary", eta, atoms, values, nothing)
    yield Problem("sharp: scores 4 times as wide", 4 * eta, atoms, values, nothing)
    yield Problem("values with a common offset of 100", eta, atoms, values + 100, nothing)
    yield Problem("causal", eta, atoms, values, torch.ones_like(nothing).triu(1), causal=True)
    half = torch.rand(tokens, tokens, generator=seed) < 0.5
    yield Problem("half of all pairs masked", eta, atoms, values, half, masked=True)


# ---------------------------------------------------------------------- statistics


def exact(x: Problem) -> dict[str, NDArray[np.longdouble]]:
    """Every statistic by its definition, in long double."""
    eta, atoms, values = (t.numpy().astype(np.longdouble) for t in (x.eta, x.atoms, x.values))
    score = eta @ atoms.T
    logit = np.where(x.hidden.numpy(), -np.inf, score)
    top = logit.max(-1, keepdims=True)
    weight = np.exp(logit - top)
    mass = weight.sum(-1, keepdims=True)
    p = weight / mass
    g = (top + np.log(mass))[:, 0]
    mean_score, mean = (p * score).sum(-1), p @ values
    near = values - values.mean(0)
    of_near = p @ near
    return {
        "log_normalizer": g,
        "mean": mean,
        "entropy": g - mean_score,
        "score_variance": (p * (score - mean_score[:, None]) ** 2).sum(-1),
        "value_trace": p @ (near**2).sum(-1) - (of_near**2).sum(-1),
    }


def error(found: Tensor, right: NDArray[np.longdouble]) -> float:
    """The largest difference relative to the largest number."""
    return float(np.abs(found.numpy().astype(np.longdouble) - right).max() / np.abs(right).max())


def statistics(x: Problem, backend: str) -> Moments:
    names = tuple(STATISTICS)[1:]
    return moments(x.eta[None], x.atoms[None], x.values[None], statistics=names, backend=backend, **x.support)  # pyright: ignore[reportArgumentType]


def attention(x: Problem) -> Tensor:
    """torch's attention."""
    mask = ~x.hidden if x.masked else None
    eta, atoms, values = (t[None, None] for t in (x.eta, x.atoms, x.values))
    return scaled_dot_product_attention(eta, atoms, values, attn_mask=mask, is_causal=x.causal, scale=1.0)[0, 0]


def statistics_rows(dtype: torch.dtype) -> Iterator[list[str]]:
    for problem in problems():
        x = problem.rounded(dtype)
        right = exact(x)
        found = [statistics(x, backend) for backend in BACKENDS]
        cells = [_cell([error(getattr(m, name)[0], right[name]) for m in found]) for name in STATISTICS]
        yield [problem.name, *cells, _cell([error(attention(x), right["mean"])])]


# ---------------------------------------------------------------------- gradients and Fisher products


def gradients(x: Problem, backend: str, names: Sequence[str]) -> list[Tensor]:
    """Of eta, atoms and values, through these statistics."""
    inputs = [t.clone().requires_grad_() for t in (x.eta, x.atoms, x.values)]
    wanted = [name for name in names if name != "log_normalizer"]
    m = moments(*inputs, statistics=wanted, backend=backend, **x.support)  # pyright: ignore[reportArgumentType]
    outputs = [getattr(m, name) for name in names]
    return list(torch.autograd.grad(outputs, inputs, _directions(outputs)))


def torch_gradients(x: Problem) -> list[Tensor]:
    inputs = [t.clone().requires_grad_() for t in (x.eta, x.atoms, x.values)]
    output = attention(x._replace(eta=inputs[0], atoms=inputs[1], values=inputs[2]))
    return list(torch.autograd.grad([output], inputs, _directions([output])))


def product(x: Problem, backend: str) -> list[Tensor]:
    vector = _directions([x.eta])[0]
    return [fisher_product(x.eta, x.atoms, vector, backend=backend, **x.support)]  # pyright: ignore[reportArgumentType]


def _directions(outputs: Sequence[Tensor]) -> list[Tensor]:
    seed = torch.Generator().manual_seed(1)
    return [torch.randn(t.shape, generator=seed).to(t) for t in outputs]


def gradient_rows() -> Iterator[list[str]]:
    def worst(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
        pairs = zip(found, right, strict=True)
        return max(error(a.detach(), b.detach().numpy().astype(np.longdouble)) for a, b in pairs)

    for problem in problems():
        x = problem.rounded(torch.float32)
        double = x.rounded(torch.float64)
        through_mean, through_all = gradients(double, "dense", ["mean"]), gradients(double, "dense", PULLED)
        mean = [worst(gradients(x, backend, ["mean"]), through_mean) for backend in BACKENDS]
        every = [worst(gradients(x, backend, PULLED), through_all) for backend in BACKENDS]
        fisher = [worst(product(x, backend), product(double, "dense")) for backend in BACKENDS]
        cells = [_cell(mean), _cell([worst(torch_gradients(x), through_mean)]), _cell(every), _cell(fisher)]
        yield [problem.name, *cells]


# ---------------------------------------------------------------------- the tables


def _cell(errors: Sequence[float]) -> str:
    return " / ".join(f"{e:.1e}" for e in errors)


def tables() -> str:
    lines = [f"One head, {TOKENS} tokens, d = {DIM}; {machine()['cpu']}, native kernel for {instruction_set()}.", ""]
    columns = [f"{heading}, {' / '.join(BACKENDS)}" for heading in STATISTICS.values()]
    for dtype in (torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        lines += _table([name, *columns, "mean, SDPA"], list(statistics_rows(dtype)))
    both = " / ".join(BACKENDS)
    header = ["float32", f"gradients through the mean, {both}", "the same, SDPA"]
    header += [f"through mean, G, entropy, variance, {both}", f"Fisher product, {both}"]
    return "\n".join([*lines, *_table(header, list(gradient_rows()))]).strip()


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [markdown_row(header), markdown_row("---" for _ in header), *(markdown_row(row) for row in rows), ""]


def main(arguments: Sequence[str]) -> None:
    if np.finfo(np.longdouble).eps >= np.finfo(np.float64).eps:
        advice = "Run it on a processor that has one (x86)."
        raise SystemExit(sentence("accuracy", "a long double with more digits than float64", "none", advice))
    found = tables()
    if not arguments:
        print(found)
        return
    page = Path(arguments[0])
    write(page, insert(page.read_text(encoding="utf-8"), MARK, found))


if __name__ == "__main__":
    main(sys.argv[1:])
