"""docs/columns.md, from the table of quantities."""

from cumulant.observatory.statistics.quantities import BASES, SECTIONS, TABLES, ColumnGroup, column_names
from docs.generate.write import markdown_table

ABOUT = """<!-- written by `python -m docs.generate` from cumulant/observatory/statistics/quantities.py -->

# Columns of the tables

`cumulant observe` writes heads, layers, tokens and causes.parquet, parts.parquet where texts have named parts, and with
`--checkpoints` series.parquet.
This page has every column: {counts}. The same text is in the glossary of report.html, and in the terminal:

    cumulant columns entropy
    cumulant columns '*_null*' --table heads

A column that nothing is known of in a row is null there; a column that nothing is known of in any row may be absent.
p is the law of a head over the keys that a query η sees, h the measure of those keys, s the scale of the scores,
N the number of visible keys; x are hidden states, D their channels, C their covariance with eigenvalues λ, and δ is
the difference that a small perturbation makes. Ids such as X-9 and sections lead to the [theory](theory.md).
"""


def pages() -> dict[str, str]:
    """The page under its file name."""
    counts = ", ".join(f"{len(column_names(table))} of {table}" for table in TABLES)
    parts = [ABOUT.format(counts=counts)]
    for table, about in TABLES.items():
        parts.append(f"## {table}.parquet\n\n{about}\n")
        parts += [_section(group) for group in SECTIONS if group.table == table]
    parts.append("## What numbers are computed from\n")
    rows = [[f"`{name}`", basis.kind, basis.words] for name, basis in BASES.items() if name != "run"]
    parts.append(markdown_table(["from", "kind", "words"], rows) + "\n")
    return {"columns.md": "\n".join(parts)}


def _section(group: ColumnGroup) -> str:
    text = f"### {group.table}: {group.title.lower()}\n\n"
    if any(q.equation for q in group.columns):
        rows = [[f"`{q.name}`", q.equation, q.words, q.unit, _basis(q.basis)] for q in group.columns]
        text += markdown_table(["column", "formula", "meaning", "unit", "from"], rows)
    else:
        rows = [[f"`{q.name}`", q.words, q.unit, _basis(q.basis)] for q in group.columns]
        text += markdown_table(["column", "meaning", "unit", "from"], rows)
    if group.endings:
        text += "\n\nBeside each of them, under its name with an ending:\n\n"
        text += markdown_table(["ending", "meaning"], [[f"`{e}`", words] for e, words in group.endings.items()])
    return text + "\n"


def _basis(name: str) -> str:
    """With a link to the table below; what a row is about is computed from nothing."""
    return "" if name == "run" else f"{BASES[name].kind}, [{name}](#what-numbers-are-computed-from)"
