"""`cumulant columns`: what the columns of the tables mean, in the terminal."""

from __future__ import annotations

from fnmatch import fnmatchcase

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cumulant.observatory.statistics.quantities import ENDINGS, SECTIONS, TABLES, ColumnGroup, Quantity
from cumulant.terminal import sentences


def columns_command(pattern: str | None, table: str | None) -> None:
    """Print what the columns of heads, layers, tokens and series.parquet mean, and what stands beside them."""
    with sentences():
        groups = select_columns(pattern, table)
    screen = Console()
    for name, about in TABLES.items():
        parts = [group for group in groups if group.table == name]
        if parts:
            screen.print(f"\n[bold]{name}.parquet[/]  {escape(about)}", highlight=False)
        for group in parts:
            screen.print(_table(group))
            _print_endings(screen, group, pattern)


def select_columns(pattern: str | None = None, table: str | None = None) -> list[ColumnGroup]:
    """Sections with the columns whose name, or the name of one beside them, matches.

    >>> [(s.table, [q.name for q in s.columns]) for s in select_columns("gradientness_null*")]
    [('heads', ['gradientness'])]
    """
    if table is not None and table not in TABLES:
        from cumulant.checks import sentence  # imports torch, which nothing else here needs

        raise ValueError(sentence("--table", f"one of {', '.join(TABLES)}", repr(table), "Copy one exactly."))
    found = []
    for group in SECTIONS:
        if table in (None, group.table):
            columns = tuple(column for column in group.columns if _matching(column, group, pattern))
            found += [group._replace(columns=columns)] if columns else []
    if not found:
        from cumulant.checks import sentence

        got = f"{pattern!r}, which is in none of them"
        raise ValueError(sentence("PATTERN", "a part of a column's name", got, "Leave it out to see all columns."))
    return found


def _matching(column: Quantity, group: ColumnGroup, pattern: str | None) -> list[str]:
    """The column and those beside it whose names match."""
    wanted = "*" if pattern is None else pattern if set(pattern) & set("*?[") else f"*{pattern}*"
    return [name for ending in ("", *group.endings) if fnmatchcase(name := column.name + ending, wanted)]


def _table(group: ColumnGroup) -> Table:
    table = Table("column", "unit", "meaning", title=group.title, title_justify="left", box=SIMPLE, pad_edge=False)
    table.columns[0].no_wrap = True
    for q in group.columns:
        lines = [f"[bold]{escape(q.equation)}[/]"] if q.equation else []
        lines += [escape(q.words)]
        lines += [f"[dim]{escape(q.sampled)}[/]"] if q.basis != "run" else []
        table.add_row(q.name, q.unit, "\n".join(lines))
    return table


def _print_endings(screen: Console, group: ColumnGroup, pattern: str | None) -> None:
    """What the endings mean that match, or all of them if the name itself does."""
    names = [name for column in group.columns for name in _matching(column, group, pattern)]
    stems = {column.name for column in group.columns}
    shown = [e for e in group.endings if stems & set(names) or any(name.endswith(e) for name in names)]
    if shown:
        screen.print("  beside each of them:", highlight=False)
    for ending in shown:
        screen.print(f"  [bold]{ending:16}[/] {ENDINGS[ending]}", highlight=False)
