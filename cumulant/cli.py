"""`cumulant` on the command line; each command is defined beside what it runs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import typer


def application() -> typer.Typer:
    """The commands, assembled."""
    import typer

    from cumulant.doctor import doctor_command
    from cumulant.paper.verify.command import verify_command
    from cumulant.terminal import Commands

    app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)
    app.callback()(_callback())
    observatory = {"observe": "observe_command", "report": "report_command", "compare": "compare_command"}
    _add(app, "cumulant.observatory.command", observatory, "hf,report")
    _add(app, "cumulant.observatory.columns_command", {"columns": "columns_command"}, "cli")
    _add(app, "cumulant.paper.experiments.command", {"experiment": "experiment_command"}, "lab")
    _add(app, "cumulant.filters.tracking.command", {"track": "track_command"}, "lab")
    _add(app, "cumulant.paper.trainings.command", {"train": "train_command"}, "train")
    app.command("verify")(verify_command)
    _add_bench(app)
    app.command("doctor")(doctor_command)
    return app


def _add(app: typer.Typer, module: str, commands: dict[str, str], extra: str) -> None:
    """Commands of a module by name; where a package is missing, commands that say what to install."""
    try:
        commands_of = importlib.import_module(module)
    except ModuleNotFoundError as missing:
        reason = f"needs {missing.name or missing}: install cumulant[{extra}]."
        for name in commands:
            _add_absent(app, name, f"(install cumulant[{extra}])", reason)
        return
    for name, function in commands.items():
        app.command(name)(getattr(commands_of, function))


def _add_bench(app: typer.Typer) -> None:
    """`cumulant bench` if this is a clone of the repository: the benchmarks are not in the wheel."""
    repository = Path(__file__).resolve().parents[1]
    if (repository / "benchmarks" / "command.py").is_file():
        sys.path.insert(0, str(repository))
        _add(app, "benchmarks.command", {"bench": "bench"}, "cli")
    else:
        reason = "runs in a clone of the repository, where its cases are: clone it and run `make bench`."
        _add_absent(app, "bench", "(in a clone of the repository)", reason)


def _add_absent(app: typer.Typer, name: str, about: str, reason: str) -> None:
    """A command that only says why it cannot run, whatever its arguments."""
    import typer

    @app.command(name, help=about, context_settings={"ignore_unknown_options": True})
    def absent(arguments: list[str] | None = typer.Argument(None)) -> None:  # noqa: B008
        sys.exit(f"cumulant {name} {reason}")


def main() -> None:
    """Entry point of the `cumulant` script."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError:
        sys.exit("The command line needs typer and rich: install cumulant[cli].")
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
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
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
