"""The options of all commands as Markdown, from their declarations: the tables of docs/cli.md.

After an option has changed, write them again:

    python -c "from cumulant.commands import reference; from cumulant.cli import application as a; reference.renew(a())"
"""

from __future__ import annotations

from pathlib import Path

import typer
from typer.main import get_command

PAGE = Path("docs/cli.md")
MARK = "options"


def option_tables(app: typer.Typer) -> str:
    """One section a command: its arguments and options with their defaults."""
    sections = []
    for name, command in get_command(app).commands.items():  # pyright: ignore[reportAttributeAccessIssue]
        rows = [_row(option) for option in command.params if not getattr(option, "hidden", False)]
        lines = [f"### `cumulant {name}`", "", command.help.partition("\n\n")[0], ""]
        sections.append("\n".join([*lines, "| option | default | |", "|---|---|---|", *rows]))
    return "\n\n".join(sections)


def renew(app: typer.Typer, page: Path = PAGE) -> None:
    """Write the tables into the page."""
    from cumulant.files import insert, write

    write(page, insert(page.read_text(encoding="utf-8"), MARK, option_tables(app)))


def _row(option) -> str:
    from cumulant.files import markdown_row

    argument = option.param_type_name == "argument"
    name = (option.metavar or option.name or "").upper() if argument else ", ".join(option.opts)
    if option.required:
        default = "required"
    elif isinstance(option.show_default, str):
        default = option.show_default
    else:
        default = "off" if getattr(option, "is_flag", False) else f"`{option.default}`"
    return markdown_row([f"`{name}`", default, option.help or ""])
