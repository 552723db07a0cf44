"""Results as tables, for the terminal and as Markdown, and a few in words: between the marks of a page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.case import GROWTH, Target
from benchmarks.results import CaseResult, Comparison, Figure, Machine, Measured, Results
from cumulant.files import insert, markdown_row

TABLES, FIGURES = "bench", "figures"  # names of the marks between which a page has all tables, or the headline figures
HEADLINES = (  # what the headline figures say, of which case beside which peer; the last is one where we lose
    (
        "attend",
        "SDPA",
        "causal `attend`, with log-normalizer, entropy and KL of every query, takes {} the time of torch's attention",
    ),
    ("observe-attention", "plain pass", "MiniLM with log-normalizer and entropy of all heads {} its plain pass"),
    ("infonce-16384", "plain cross-entropy", "InfoNCE of 16 384 pairs, forward and backward, {} plain cross-entropy"),
    ("imm-2", "filterpy's IMM", "IMM on 1000 tracks is {} than filterpy"),
    ("tiny", "SDPA", "where it costs more: on 8 heads × 8 tokens a call takes {} torch's, most of it Python"),
)
NONE = "–"
HEADER = ("work", "cumulant / peer", "ratio", "target", "met")
GROWTH_HEADER = ("N", "time", "to half of N", "extra memory", "to half of N", "met")


class Table(NamedTuple):
    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def tables(results: Results) -> list[Table]:
    """One table for each group of cases, in order; growth has one per case, with a row for each size."""
    by_title: dict[str, Table] = {}
    for case in results["cases"]:
        if case["table"] == GROWTH:
            by_title[case["name"]] = Table(f"Growth of {case['work']}", GROWTH_HEADER, list(_growth_rows(case)))
            continue
        title = _title(case, results["machine"])
        by_title.setdefault(case["table"], Table(title, HEADER, [])).rows.extend(_rows(case))
    return list(by_title.values())


def remarks(results: Results) -> list[str]:
    """What the figures were taken on and how, what was skipped, what went wrong."""
    m = results["machine"]
    peers = "".join(f", {name} {version}" for name, version in m["peers"].items())
    lines = [f"{m['cpu']}, {m['cores']} cores, torch {m['torch']}{peers}, {m['date']}; float32, filters float64."]
    lines.append(
        "Ratios are medians over rounds in which both sides ran in turns, with quartiles; memory is peak minus inputs."
    )
    if results["quick"]:
        lines.append("Quick run on small inputs: it shows that the cases work; no target is judged.")
    skipped: dict[tuple[str, str], list[str]] = {}
    for case in results["cases"]:
        for name, method in case["methods"].items():
            if method["skipped"]:
                skipped.setdefault((name, method["skipped"]), []).append(case["name"])
    lines += [f"{name} skipped: {why.rstrip('.')} ({', '.join(cases)})." for (name, why), cases in skipped.items()]
    lines += [f"Problem in {case['name']}: {case['problem']}." for case in results["cases"] if case["problem"]]
    return lines


def markdown(results: Results) -> str:
    """Every table and remark."""
    parts = []
    for table in tables(results):
        parts.append(f"**{table.title}**\n")
        parts.append(markdown_row(table.header))
        parts.append(markdown_row("---" for _ in table.header))
        parts += [markdown_row(row) for row in table.rows]
        parts.append("")
    return "\n".join([*parts, *(f"- {line}" for line in remarks(results))]) + "\n"


def headlines(results: Results) -> str:
    """The headline figures as a list, those of them that were measured."""
    cases = {case["name"]: case for case in results["cases"]}
    lines = []
    for name, peer, words in HEADLINES:
        for comparison in cases[name]["comparisons"] if name in cases else ():
            figure = comparison["figure"]
            if comparison["peer"] == peer and comparison["quantity"] == "time" and figure is not None:
                lines.append(f"- {words.format(_target(comparison).format(figure['median']))}")
    where = _processor(results["machine"]).removeprefix("; ") or results["machine"]["cpu"]
    return "\n".join([*lines, "", f"One thread of {where}; medians of one run."])


def updated(page: str, results: Results) -> str:
    """A page with the results between its marks; ValueError if it has none of them."""
    parts = {TABLES: markdown, FIGURES: headlines}
    present = [mark for mark in parts if f"<!-- {mark}:start -->" in page]
    for mark in present or [TABLES]:
        page = insert(page, mark, parts[mark](results))
    return page


def _title(case: CaseResult, machine: Machine) -> str:
    if "device" in machine:
        return f"{case['table'].capitalize()} (time between events on {machine['device']})"
    how = "CPU time, one thread" if case["threads"] == 1 else f"wall time, {case['threads']} threads"
    how = "beyond the inputs" if case["table"] == "memory" else how
    return f"{case['table'].capitalize()} ({how}{_processor(machine)})"


def _processor(machine: Machine) -> str:
    """What a ratio depends on most; older files do not have it."""
    if "instruction_set" not in machine:
        return ""
    native = machine["instruction_set"]
    return f"; {machine['cpu']}, " + (f"native kernel for {native}" if native else "kernels in torch, no native one")


def _rows(case: CaseResult) -> Iterable[tuple[str, ...]]:
    """One row a comparison; the work is named in the first."""
    for i, comparison in enumerate(case["comparisons"]):
        method, peer = case["methods"][comparison["method"]], comparison["peer"]
        against = _cell(method, comparison) + (f" / {peer} {_cell(case['methods'][peer], comparison)}" if peer else "")
        target = _target(comparison)
        figure = _figure(target, comparison["figure"])
        yield (case["work"] if i == 0 else "", against, figure, target.text or NONE, _met(comparison))


def _cell(method: Measured, comparison: Comparison) -> str:
    figure = method["seconds"] if comparison["quantity"] == "time" else method["extra_mib"]
    if figure is None:
        return "skipped" if method["skipped"] else NONE
    return duration(figure["median"]) if comparison["quantity"] == "time" else mebibytes(figure["median"])


def _target(c: Comparison) -> Target:
    return Target(c["peer"], c["bound"], c["quantity"], c["method"], c["faster"], c.get("tracks", 1))


def _figure(target: Target, figure: Figure | None) -> str:
    if figure is None:
        return NONE
    middle, low, high = (target.format(figure[key]) for key in ("median", "low", "high"))
    if low == high:
        return middle
    bounds = (high, low) if target.faster else (low, high)
    return f"{middle} ({bounds[0].split('×')[0].split(' ')[0]}–{bounds[1].split('×')[0].split(' ')[0]})"


def _met(comparison: Comparison) -> str:
    return {True: "met", False: "missed", None: NONE}[comparison["met"]]


def _growth_rows(case: CaseResult) -> Iterable[tuple[str, ...]]:
    """One row a size."""
    for name, method in case["methods"].items():
        steps = {c["quantity"]: c for c in case["comparisons"] if c["method"] == name}
        time = duration(method["seconds"]["median"]) if method["seconds"] else NONE
        space = mebibytes(method["extra_mib"]["median"]) if method["extra_mib"] else NONE
        grown = [_figure(_target(steps[q]), steps[q]["figure"]) if q in steps else NONE for q in ("time", "memory")]
        verdicts = {_met(step) for step in steps.values()}
        met = "missed" if "missed" in verdicts else "met" if verdicts == {"met"} else NONE
        yield (name.removeprefix("N="), time, grown[0], space, grown[1], met)


def duration(seconds: float) -> str:
    """
    >>> duration(0.0123), duration(2.5)
    ('12.3 ms', '2.50 s')
    """
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def mebibytes(mib: float) -> str:
    """
    >>> mebibytes(3.14), mebibytes(2048)
    ('3.1 MiB', '2.0 GiB')
    """
    return f"{mib / 1024:.1f} GiB" if mib >= 1000 else f"{mib:.1f} MiB"
