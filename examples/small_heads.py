"""Which heads can be small? Entries that `backtest` gives every key head, beside what is known of the head otherwise.

    python examples/small_heads.py                       # the first eight documents of the audit's texts: ten minutes
    python examples/small_heads.py --table               # the tables from the runs beside this file
    python examples/small_heads.py --skip 8 --documents 8           # others, to see whether the tables hold there

Of every document the first 1024 tokens are read and compressed, by the law of `backtest` and of `backtest+norepeat`.
The same tokens are observed: entropy, distance and types of heads as on the page of `cumulant observe`, the R² of one
Gaussian in the place of the keys, and |W_O o|² over |x|² on the 128 tokens that follow. A key head has the mean of the
heads that share it. Correlations are of ranks, over key heads, of means over documents; their intervals draw documents
again, the null permutes key heads. A run is a line of JSON beside this file; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from cumulant.cache import Backtest, on_cumulant, prefill
from cumulant.cache.audit.continuation import read_on
from cumulant.cache.audit.head_errors import read_full
from cumulant.cache.audit.texts import CHARACTERS, TextWindow, default_documents, windows
from cumulant.cache.budget import budget
from cumulant.observatory import attach, load
from cumulant.observatory.hooks.structure import NotFound
from cumulant.observatory.hooks.weights import head_outputs
from cumulant.observatory.record.bootstrap import draw_counts
from cumulant.observatory.record.tables import head_rows
from cumulant.observatory.runs.repeated import with_probe
from cumulant.observatory.statistics.head_types import NEAR, head_types
from cumulant.observatory.statistics.quantities import distance_names

RUNS = Path(__file__).with_suffix(".jsonl")
LAWS = {"norepeat": Backtest(repeat=False), "repeat": Backtest()}
KEEPS = (0.25, 0.125)
PREFIX, NEXT = 1024, 128
QUANTITIES = ("entropy", "first_mass", "kl_to_base", "fisher_top", "targets")  # the fourth brings the fits
FAR = [name for name in distance_names() if int(name.split("_")[1]) > NEXT]
DRAWS = 2000

# ---------------------------------------------------------------------- runs


def budgets_of(prefix) -> dict[str, list[int]]:
    """Law and budget → entries of all key heads, layer by layer."""
    found = {}
    for law, compressor in LAWS.items():
        evidence = compressor.evidence(prefix)
        for keep in KEEPS:
            plan = compressor.plan(prefix, budget(prefix, keep, with_mass=True), evidence)
            found[f"{law} {keep:g}"] = plan.entries.tolist()
    return found


def writing_of(model, prefix, ids: Tensor) -> dict[str, list[float]]:
    """Sums of |W_O o|² and |x|² on the tokens that follow, by key head."""
    written, stream = [], []
    for layer, asked in zip(prefix.layers, read_on(prefix, ids, 4).layers, strict=True):
        outputs, full = head_outputs(model, layer.name), read_full(layer, asked)
        if isinstance(outputs, NotFound) or asked.stream is None:
            raise TypeError(f"{layer.name}: W_O or the residual stream is not known")
        of_head = (full.output @ outputs.to(full.output).mT).square().sum(-1).mean(-1)
        written += of_head.unflatten(0, (-1, layer.groups)).mean(1).tolist()
        stream += [asked.stream] * len(layer.keys)
    return {"written": written, "stream": stream}


def statistics_of(loaded, ids: Tensor, groups: int) -> tuple[dict[str, list[float]], list[str]]:
    """Numbers of every key head, and the types of every head."""
    with attach(loaded.model, QUANTITIES, hidden_states=False) as recorder:
        loaded.model(input_ids=ids[None])
    record = with_probe(recorder.record(weights=False), loaded.model, tuple(loaded.tokenizer.all_special_ids))
    rows = head_rows(record)
    columns: dict[str, Callable] = {
        "entropy": lambda r: r.value("entropy"),
        "first": lambda r: r.value("first_mass"),
        "previous": lambda r: r.value("previous_mass"),
        "induction": lambda r: r.value("repeated_induction"),
        "same": lambda r: r.value("same_token_mass"),
        "local": lambda r: sum(r.value(name) for name in NEAR),
        "distance": lambda r: r.value("mean_distance"),
        "far": lambda r: sum(r.value(name) for name in FAR),
        "focus": lambda r: r.value("kl_to_base"),
        "depth": lambda r: float(r.layer),
    }
    numbers = {name: grouped([of(row) for row in rows], groups) for name, of in columns.items()}
    for part in ("left", "whole"):
        of_heads = [x for layer in record.modules for x in record.sums[f"{layer.name}/gauss/{part}"].tolist()]
        numbers[part] = grouped(of_heads, groups)
    return numbers, [", ".join(kind.name for kind in head_types(row)) for row in rows]


def grouped(of_heads: list[float], groups: int) -> list[float]:
    return torch.tensor(of_heads, dtype=torch.float64).unflatten(0, (-1, groups)).mean(1).tolist()


@torch.no_grad()
def run_of(loaded, window: TextWindow) -> dict:
    """A line: entries, numbers and types of one document."""
    ids, start = window.input_ids, time.perf_counter()
    with on_cumulant(loaded.model):
        prefix = prefill(loaded.model, ids[:PREFIX], loaded.tokenizer)
        entries, numbers = budgets_of(prefix), writing_of(loaded.model, prefix, ids[PREFIX : PREFIX + NEXT])
    groups = prefix.layers[0].groups
    observed, types = statistics_of(loaded, ids[:PREFIX], groups)
    numbers = {name: [float(f"{x:.4g}") for x in values] for name, values in (numbers | observed).items()}
    about = {"document": window.document, "name": window.name, "kind": window.kind, "groups": groups}
    seconds = round(time.perf_counter() - start)
    return about | {"seconds": seconds, "entries": entries, "numbers": numbers, "types": types}


def measure(options: argparse.Namespace) -> None:
    """Run what is missing."""
    torch.set_num_threads(options.threads)
    loaded, last = load("smollm2"), options.skip + options.documents
    texts = default_documents(CHARACTERS * (PREFIX + NEXT), last)
    there = {run["document"] for run in saved()}
    for window in windows(texts, loaded.tokenizer, PREFIX, NEXT, last)[options.skip :]:
        if window.document not in there:
            line = json.dumps(run_of(loaded, window))
            with RUNS.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")
        print(f"document {window.document}, {window.name}", flush=True)


def saved() -> list[dict]:
    """Runs that are beside this file."""
    return [json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines()] if RUNS.exists() else []


# ---------------------------------------------------------------------- correlations


def ranks(x: Tensor) -> Tensor:
    """(…, n) ranks from 1 along the last axis; those that are equal share the mean of theirs.

    >>> ranks(torch.tensor([3.0, 1.0, 3.0]))
    tensor([2.5000, 1.0000, 2.5000])
    """
    ordered = x.sort(-1).values.contiguous()
    below, up_to = (torch.searchsorted(ordered, x.contiguous(), side=side) for side in ("left", "right"))
    return (below + up_to + 1).to(x.dtype) / 2


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """(…,) Pearson's, along the last axis."""
    a, b = (x - x.mean(-1, keepdim=True) for x in (a, b))
    return (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """(…,) Spearman's.

    >>> rank_correlation(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([-1.0, -2.0, -3.0]))
    tensor(-1.)
    """
    return correlation(ranks(a), ranks(b))


def within_layers(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """(…,) of ranks less their mean over the ``heads`` key heads of a layer: what depth alone gives is gone."""
    a, b = (ranks(x).unflatten(-1, (-1, heads)) for x in (a, b))
    return correlation(*((x - x.mean(-1, keepdim=True)).flatten(-2) for x in (a, b)))


NAMES = {
    "written": r"what it writes, \|W_O o\|² / \|x\|²",
    "far": f"attention more than {NEXT} tokens away",
    "distance": "mean distance",
    "entropy": "entropy",
    "gaussian": "R² of one Gaussian",
    "focus": "KL to an even look",
    "first": "on the first token",
    "previous": "on the previous token",
    "local": "at most 4 tokens away",
    "same": "on the same token",
    "induction": "induction, on repeated tokens",
    "depth": "depth",
}


def predictor(name: str, runs: list[dict], counts: Tensor) -> Tensor:
    """(…, key heads) a number over documents that are counted so often, (…, documents)."""

    def total(part: str) -> Tensor:
        return counts.double() @ torch.tensor([run["numbers"][part] for run in runs], dtype=torch.float64)

    if name == "written":
        return total("written") / total("stream")
    if name == "gaussian":
        return 1 - total("left") / total("whole")
    return total(name) / counts.sum(-1, keepdim=True)


def entries_of(runs: list[dict], budget_name: str, counts: Tensor) -> Tensor:
    """(…, key heads) mean entries over documents that are counted so often."""
    stacked = torch.tensor([run["entries"][budget_name] for run in runs], dtype=torch.float64)
    return counts.double() @ stacked / counts.sum(-1, keepdim=True)


def ends(x: Tensor) -> str:
    low, high = x[x.isfinite()].quantile(torch.tensor([0.025, 0.975], dtype=x.dtype)).tolist()
    return f"[{low:+.2f}, {high:+.2f}]"


def correlations(runs: list[dict]) -> Iterator[str]:
    """Markdown: a row for every predictor, a column for every law and budget."""
    names = list(runs[0]["entries"])
    yield f"| | {' | '.join(names)} | within a layer, {names[0]} | {names[-2]} |"
    yield "|---" * (len(names) + 3) + "|"
    once, drawn = torch.ones(len(runs)), draw_counts(len(runs), DRAWS)
    heads, targets = key_heads(runs), {name: entries_of(runs, name, once) for name in names}
    ranked = {name: [ranks(entries_of(runs, name, counts)) for counts in (once, drawn)] for name in names}
    for name, words in NAMES.items():
        own = [ranks(predictor(name, runs, counts)) for counts in (once, drawn)]
        cells = []
        for entries in names:
            value, draws = (correlation(*pair) for pair in zip(ranked[entries], own, strict=True))
            cells.append(f"{float(value):+.2f} {ends(draws)}")
        for entries in (names[0], names[-2]):
            inside = within_layers(targets[entries], own[0], heads)
            cells.append("–" if name == "depth" else f"{float(inside):+.2f}")
        yield f"| {words} | {' | '.join(cells)} |"
    together = [f"{all_together(runs, entries, once):.2f}" for entries in names]
    yield f"| R² of all together, adjusted | {' | '.join(together)} | | |"
    null = f"null: 95 % of \\|ρ\\| below; largest of {len(NAMES)}"
    yield f"| {null} | {null_of(runs, names[0])} |" + " |" * (len(names) + 1)


def key_heads(runs: list[dict]) -> int:
    """Of a layer."""
    return len(runs[0]["numbers"]["depth"]) // (1 + int(max(runs[0]["numbers"]["depth"])))


def all_together(runs: list[dict], entries: str, counts: Tensor) -> float:
    """R² of the ranks of entries on the ranks of all predictors, less what as many slopes explain by chance."""
    target = ranks(entries_of(runs, entries, counts))
    columns = torch.stack([ranks(predictor(name, runs, counts)) for name in NAMES], 1)
    design = torch.cat([torch.ones_like(columns[:, :1]), columns], 1)
    left = target - design @ torch.linalg.lstsq(design, target[:, None]).solution[:, 0]
    n, slopes = columns.shape
    return float(1 - left.var() / target.var() * (n - 1) / (n - slopes - 1))


def null_of(runs: list[dict], entries: str) -> str:
    """Of permuted key heads: where 95 % of |ρ| of one predictor, and of the largest of all, end."""
    generator, once = torch.Generator().manual_seed(0), torch.ones(len(runs))
    target = ranks(entries_of(runs, entries, once))
    permuted = torch.stack([target[torch.randperm(len(target), generator=generator)] for _ in range(DRAWS)])
    found = torch.stack([correlation(permuted, ranks(predictor(name, runs, once))).abs() for name in NAMES])
    return f"{float(found.quantile(0.95, 1).mean()):.2f}; {float(found.amax(0).quantile(0.95)):.2f}"


# ---------------------------------------------------------------------- documents, types, extremes


def stability(runs: list[dict]) -> Iterator[str]:
    """Markdown: how alike the budgets of two documents are, of one kind and of two, and spread over heads."""
    yield "| | ρ between documents | of one kind | of two kinds | between the laws | fewest and most entries, means |"
    yield "|---" * 6 + "|"
    kinds = [run["kind"] for run in runs]
    for name in runs[0]["entries"]:
        stacked = torch.tensor([run["entries"][name] for run in runs], dtype=torch.float64)
        pairs = [(i, j) for i in range(len(runs)) for j in range(i)]
        rho = {(i, j): float(rank_correlation(stacked[i], stacked[j])) for i, j in pairs}
        alike = [[x for (i, j), x in rho.items() if (kinds[i] == kinds[j]) == same] for same in (True, False)]
        law, keep = name.split()
        twin = torch.tensor([run["entries"][f"{next(k for k in LAWS if k != law)} {keep}"] for run in runs])
        laws = rank_correlation(stacked, twin.double())
        spread = stacked.mean(0)
        cells = [f"{mean([*rho.values()]):.2f}, {min(rho.values()):.2f} to {max(rho.values()):.2f}"]
        cells += [*(f"{mean(some):.2f}" if some else "–" for some in alike), f"{float(laws.mean()):.2f}"]
        yield f"| {name} | {' | '.join(cells)} | {float(spread.min()):.0f} and {float(spread.max()):.0f} |"


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def types_of(runs: list[dict]) -> list[set[str]]:
    """Of every head: types that it has in most documents."""
    out = []
    for of_head in zip(*(run["types"] for run in runs), strict=True):
        count = Counter(kind for types in of_head for kind in types.split(", ") if kind)
        out.append({kind for kind, n in count.items() if 2 * n > len(runs)})
    return out


def by_type(runs: list[dict]) -> Iterator[str]:
    """Markdown: entries of key heads with a head of a type, over those of the others."""
    names, groups, heads = list(runs[0]["entries"]), runs[0]["groups"], types_of(runs)
    yield f"| type of one of its heads at least | heads | key heads | {' | '.join(names)} |"
    yield "|---" * (len(names) + 3) + "|"
    drawn, once = draw_counts(len(runs), DRAWS), torch.ones(len(runs))
    all_types = dict.fromkeys(kind for kinds in heads for kind in sorted(kinds))
    for kind in [*all_types, "none"]:
        holds = [kind in kinds or (kind == "none" and not kinds) for kinds in heads]
        has = torch.tensor(holds).unflatten(0, (-1, groups))
        has = has.all(1) if kind == "none" else has.any(1)
        if not 2 <= int(has.sum()) <= len(has) - 2:
            continue
        cells = []
        for name in names:
            entries, redrawn = (entries_of(runs, name, counts) for counts in (once, drawn))
            ratio, ratios = (e[..., has].mean(-1) / e[..., ~has].mean(-1) for e in (entries, redrawn))
            low, high = ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
            cells.append(f"{float(ratio):.2f} [{low:.2f}, {high:.2f}], p {permuted_p(entries, has):.3f}")
        yield f"| {kind} | {sum(holds)} | {int(has.sum())} | {' | '.join(cells)} |"


def permuted_p(entries: Tensor, has: Tensor) -> float:
    """Share of permutations of key heads whose means differ as much."""
    generator = torch.Generator().manual_seed(1)
    shuffled = torch.stack([has[torch.randperm(len(has), generator=generator)] for _ in range(DRAWS)]).double()
    means = (shuffled @ entries) / has.sum() - ((1 - shuffled) @ entries) / (~has).sum()
    observed = entries[has].mean() - entries[~has].mean()
    return float((1 + (means.abs() >= observed.abs()).sum()) / (1 + DRAWS))


def extremes(runs: list[dict], name: str, number: int = 5) -> Iterator[str]:
    """Markdown: the key heads with the fewest and the most entries, with the types of their heads."""
    yield f"| layer.key head, {name} | entries, from … to | writes | types of its heads |"
    yield "|---" * 4 + "|"
    stacked = torch.tensor([run["entries"][name] for run in runs], dtype=torch.float64)
    order, kinds = stacked.mean(0).argsort().tolist(), types_of(runs)
    written, groups, heads = predictor("written", runs, torch.ones(len(runs))), runs[0]["groups"], key_heads(runs)
    for k in [*order[:number], *order[: -number - 1 : -1]]:
        words = "; ".join(", ".join(sorted(kinds[h])) or "–" for h in range(groups * k, groups * (k + 1)))
        column = stacked[:, k]
        spread = f"{float(column.mean()):.0f}, {int(column.min())} to {int(column.max())}"
        yield f"| {k // heads}.{k % heads} | {spread} | {float(written[k]):.2g} | {words} |"


def tables(runs: list[dict]) -> str:
    """All of them."""
    parts = [stability(runs), correlations(runs), by_type(runs)]
    parts += [extremes(runs, name) for name in ("norepeat 0.25", "repeat 0.25")]
    return "\n\n".join("\n".join(part) for part in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the tables of the runs that are there")
    parser.add_argument("--documents", type=int, default=8, help="of the audit's texts")
    parser.add_argument("--skip", type=int, default=0, help="first documents")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if not options.table:
        measure(options)
    chosen = range(options.skip, options.skip + options.documents)
    runs = [run for run in saved() if run["document"] in chosen]
    if len(runs) < 2:
        parser.error(f"of documents {chosen.start} to {chosen.stop - 1} there are {len(runs)} runs: leave --table out")
    print(f"{len(runs)} documents", tables(runs), sep="\n\n")


if __name__ == "__main__":
    main()
