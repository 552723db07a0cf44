"""Pages written, and tables in Markdown."""

from collections.abc import Iterable, Sequence
from pathlib import Path

DOCS = Path(__file__).parents[1]


def write_pages(pages: dict[str, str]) -> None:
    """Under docs/."""
    for name, text in pages.items():
        path = DOCS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells with their bars escaped.

    >>> print(markdown_table(["a", "b"], [["|x|", "1"]]))
    | a | b |
    |---|---|
    | \\|x\\| | 1 |
    """
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" if line[0] != "---" else f"|{'|'.join(line)}|" for line in lines)
