"""The options of all commands in docs/cli.md, from their declarations."""

import typer
from typer.main import get_command

from cumulant.cli import application
from cumulant.files import insert, markdown_row
from docs.generate.write import DOCS

PAGE, MARK = "cli.md", "options"


def pages() -> dict[str, str]:
    """The page under its file name, with the tables between its marks."""
    return {PAGE: insert((DOCS / PAGE).read_text(encoding="utf-8"), MARK, option_tables(application()))}


def option_tables(app: typer.Typer) -> str:
    """One section a command: its arguments and options with their defaults."""
    sections = []
    for name, command in get_command(app).commands.items():  # pyright: ignore[reportAttributeAccessIssue]
        rows = [_row(option) for option in command.params if not getattr(option, "hidden", False)]
        lines = [f"### `cumulant {name}`", "", command.help.partition("\n\n")[0], ""]
        sections.append("\n".join([*lines, "| option | default | |", "|---|---|---|", *rows]))
    return "\n\n".join(sections)


def _row(option) -> str:
    argument = option.param_type_name == "argument"
    name = (option.metavar or option.name or "").upper() if argument else ", ".join(option.opts)
    if option.required:
        default = "required"
    elif isinstance(option.show_default, str):
        default = option.show_default
    else:
        default = "off" if getattr(option, "is_flag", False) else f"`{option.default}`"
    return markdown_row([f"`{name}`", default, option.help or ""])
