"""`cumulant` on the command line; each command is defined beside what it runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def application() -> typer.Typer:
    """The commands, assembled."""
    import typer

    from cumulant.benchmarks.command import bench
    from cumulant.claims.command import verify_command

    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)
    app.callback()(_about)
    app.command("verify")(verify_command)
    app.command()(bench)
    return app


def main() -> None:
    """Entry point of the `cumulant` script."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError:
        sys.exit("The command line needs typer and rich: install cumulant[cli].")
    application()()


def _about() -> None:
    """Attention as the mean of an exponential family: run its theory, measure what its kernels cost."""


if __name__ == "__main__":
    main()
