"""`cumulant` on the command line: the commands of `cumulant.commands`, assembled without importing torch."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING

from cumulant.extras import install

if TYPE_CHECKING:
    from collections.abc import Callable

    import typer

EXIT_CODES = (
    "Exit codes: 0 done; 1 a statement or prediction does not hold, or an error of the program; "
    "2 bad input or a missing package: the message says what to change; 130 interrupted by Ctrl-C."
)


def application() -> typer.Typer:
    """The commands, assembled."""
    import typer

    from cumulant.commands.audit import audit
    from cumulant.commands.bench import bench
    from cumulant.commands.columns import columns
    from cumulant.commands.compress import compress, generate
    from cumulant.commands.doctor import doctor
    from cumulant.commands.experiment import experiment
    from cumulant.commands.observe import compare, observe, report
    from cumulant.commands.track import track
    from cumulant.commands.train import train
    from cumulant.commands.verify import verify
    from cumulant.terminal import Commands

    app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_show_locals=False)
    app.callback(epilog=EXIT_CODES)(_callback())
    of_models = observe, report, compare, columns, audit, compress, generate
    for command in (*of_models, experiment, track, train, verify, bench, doctor):
        app.command(command.__name__, help=_paragraphs(command))(command)
    return app


def _paragraphs(command: Callable[..., None]) -> str:
    """The docstring of a command with each paragraph on one line, which the terminal wraps."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def main() -> None:
    """Entry point of the `cumulant` script."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as missing:
        sys.stderr.write(f"The command line needs {missing.name}: run {install('cli')}.\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        application()(args=_spelled(sys.argv[1:]))
    except KeyboardInterrupt:  # while a command is still being imported
        sys.exit(130)


def _spelled(arguments: list[str]) -> list[str]:
    """A lone --ray means --ray local.

    >>> _spelled(["observe", "--ray", "minilm"]), _spelled(["observe", "--ray", "auto"])
    (['observe', '--ray', 'local', 'minilm'], ['observe', '--ray', 'auto'])
    """
    out = []
    for word, following in zip(arguments, [*arguments, ""][1:], strict=True):
        alone = word == "--ray" and following not in ("local", "auto") and ":" not in following
        out += [word, "local"] if alone else [word]
    return out


def _callback() -> Callable[..., None]:
    """What stands before a command: the line of help, and --version."""
    import typer

    from cumulant import __version__

    def print_version(asked: bool) -> None:
        if asked:
            typer.echo(f"cumulant {__version__}")
            raise typer.Exit

    option = typer.Option(False, "--version", help="Print the version.", is_eager=True, callback=print_version)

    def about(version: bool = option) -> None:
        """Attention as the mean of an exponential family: observe models, verify the theory, track targets, measure."""

    return about


if __name__ == "__main__":
    main()
