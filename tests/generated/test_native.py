"""The native kernel on calls of any rank, broadcast on either side, in any layout and on any number of threads, beside
the reference on contiguous copies: every statistic and every gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from tests.generated.properties import holds_for
from tests.generated.tensors import Layout, layouts, normal, seeds
from tests.kernels.native.problems import FIELDS, Problem, native, threads

SIZES = (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 100, 257, 600)


@dataclass(frozen=True)
class Call:
    """A call of `moments` with batch axes ``lead``; ``shared``: along which of them each tensor has size 1."""

    lead: tuple[int, ...] = ()
    shared: tuple[tuple[bool, ...], ...] = ((), (), (), (), ())  # eta, atoms, values, log weights or mask, sink
    heads: int = 1  # queries per key head on the last axis
    q: int = 3
    n: int = 4
    d: int = 2
    e: int | None = None
    weights: str = "none"  # per key | per pair | shared by queries
    mask: str = "none"  # keys | pairs | queries | all
    sink: str = "none"  # number | absent | tensor
    band: tuple[bool, int | None, int] = (False, None, 0)
    layouts: tuple[Layout, ...] = (Layout(),) * 4
    needs: tuple[str, ...] = FIELDS
    threads: int = 1
    sharpness: float = 1.0
    shift: float = 0.0
    seed: int = 0

    def _batch(self, slot: int, of_keys: bool = False) -> tuple[int, ...]:
        full = self.lead
        if self.heads > 1:
            full = (*full[:-1], full[-1] if of_keys else full[-1] * self.heads)
        sizes = [1 if one else size for one, size in zip(self.shared[slot], full, strict=True)]
        if self.heads > 1:
            sizes[-1] = full[-1]
        return tuple(sizes)

    def problem(self) -> Problem:
        s, q, n = self.seed, self.q, self.n
        tensors = {"eta": normal(s, *self._batch(0), q, self.d) * self.sharpness}
        tensors["atoms"] = normal(s + 1, *self._batch(1, True), n, self.d)
        if self.e is not None:
            tensors["values"] = normal(s + 2, *self._batch(2, True), n, self.e) + self.shift
        pairs = {"per pair": (q, n), "shared by queries": (1, n)}.get(self.weights)
        w = None
        if pairs is not None:
            w = normal(s + 3, *self._batch(3), *pairs)
        elif self.weights == "per key":
            w = normal(s + 3, *self._batch(3, True), n)
        if w is not None:
            tensors["log_weights"] = w.masked_fill(normal(s + 4, *w.shape) > 1, -torch.inf)
        laid = {name: layout.of(t) for (name, t), layout in zip(tensors.items(), self.layouts, strict=False)}
        causal, window, offset = self.band
        options: dict = {"causal": causal, "window": window, "offset": offset}
        shape = {"keys": (n,), "pairs": (*self._batch(3), q, n), "queries": (q, 1), "all": (*self._batch(3), 1, n)}
        if self.mask in shape:
            options["mask"] = normal(s + 5, *shape[self.mask]) > -0.5
        if self.sink == "tensor":
            sizes = zip(self._batch(0), self._batch(4), strict=True)
            sink = normal(s + 6, *(min(size, own) for size, own in sizes))  # no axis that the answer has not
            laid["sink"] = sink.masked_fill(normal(s + 7, *sink.shape) > 1, -torch.inf)
        elif self.sink != "none":
            options["sink"] = {"number": 0.5, "absent": -torch.inf}[self.sink]
        return Problem(laid, options)


@st.composite
def calls(draw) -> Call:
    rank = draw(st.sampled_from([0, 1, 2, 2, 3, 4, 6]))
    lead = tuple(draw(st.sampled_from([1, 2, 2, 3, 0] if rank < 4 else [1, 2, 2])) for _ in range(rank))
    q, n = draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES))
    scores = q * n * max(1, torch.Size(lead).numel())
    case = Call(
        lead=lead,
        shared=tuple(tuple(draw(st.booleans()) for _ in lead) for _ in range(5)),
        heads=draw(st.sampled_from([1, 1, 2, 3])) if lead and lead[-1] > 1 else 1,
        q=q if scores <= 20_000 else min(q, 17),
        n=n if scores <= 20_000 else min(n, 33),
        d=draw(st.sampled_from([0, 1, 2, 3, 5, 8, 9, 17, 33])),
        e=draw(st.sampled_from([None, 0, 1, 3, 8, 17])),
        weights=draw(st.sampled_from(["none", "none", "per key", "per pair", "shared by queries"])),
        mask=draw(st.sampled_from(["none", "none", "keys", "pairs", "queries", "all"])),
        sink=draw(st.sampled_from(["none", "none", "number", "absent", "tensor"])),
        band=draw(
            st.tuples(st.booleans(), st.sampled_from([None, None, 1, 7, 40]), st.sampled_from([0, 3, n - q, -5, n + 4]))
        ),
        layouts=tuple(replace(draw(layouts()), shared="none") for _ in range(4)),
        needs=tuple(sorted(draw(st.sets(st.sampled_from(FIELDS), min_size=1)))),
        threads=draw(st.sampled_from([1, 2, 3])),
        sharpness=draw(st.sampled_from([0.3, 1.0, 10.0])),
        shift=draw(st.sampled_from([0.0, 0.0, 1e3])),
        seed=draw(seeds()),
    )
    return case


@native
@holds_for(calls(), examples=40)
def test_values_and_gradients_are_those_of_the_reference(case: Call) -> None:
    with threads(case.threads):
        case.problem().check(1e-10, needs=case.needs)
