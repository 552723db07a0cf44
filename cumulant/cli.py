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
    _add_observatory(app)
    app.command("verify")(verify_command)
    app.command()(bench)
    return app


def _add_observatory(app: typer.Typer) -> None:
    """Its commands, or one that says what to install."""
    import typer

    try:
        from cumulant.observatory.command import compare_command, observe_command, report_command
    except ModuleNotFoundError as missing:
        reason = f"cumulant observe needs {missing.name or missing}: install cumulant[hf,report]."

        def absent(arguments: list[str] | None = typer.Argument(None)) -> None:  # noqa: B008
            """Look into a transformer (install cumulant[hf,report])."""
            sys.exit(reason)

        for name in ("observe", "report", "compare"):
            app.command(name)(absent)
        return
    app.command("observe")(observe_command)
    app.command("report")(report_command)
    app.command("compare")(compare_command)


def main() -> None:
    """Entry point of the `cumulant` script."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError:
        sys.exit("The command line needs typer and rich: install cumulant[cli].")
    application()()


def _about() -> None:
    """Attention as the mean of an exponential family: look into models, run the theory, measure the kernels."""


if __name__ == "__main__":
    main()
