"""Options of `cumulant columns`."""

from __future__ import annotations

from typing import Annotated

import typer

from cumulant.terminal import importing


def columns(
    pattern: Annotated[
        str | None,
        typer.Argument(help="Part of a column's name, or a pattern such as '*_null*'.", show_default="all columns"),
    ] = None,
    table: Annotated[str | None, typer.Option(help="heads, layers, tokens or series.", show_default="all")] = None,
) -> None:
    """Print what the columns of heads, layers, tokens and series.parquet mean, and what stands beside them."""
    with importing("columns", "cli"):
        from cumulant.observatory.columns_command import columns_command
    columns_command(pattern, table)
