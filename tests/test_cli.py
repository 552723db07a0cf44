"""The command line: help without torch, defaults, completion, exit codes, and extras that are missing."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="install cumulant[cli]")
from typer import testing
from typer.main import get_command

from cumulant import cli, extras
from cumulant.commands import train
from docs.generate import commands

ROOT = Path(__file__).parent.parent
COMMANDS = sorted(get_command(cli.application()).commands)  # pyright: ignore[reportAttributeAccessIssue]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    run = os.environ | {"COLUMNS": "200", "PYTHONPATH": str(ROOT)} | environment
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=run, capture_output=True, text=True)


def invoke(*words: object):
    return testing.CliRunner().invoke(cli.application(), [str(word) for word in words], env={"COLUMNS": "300"})


def test_help_of_every_command_imports_no_torch():
    code = """
import sys
from typer.testing import CliRunner
from cumulant.cli import application
for words in (["--help"], ["--version"], *([name, "--help"] for name in sys.argv[1:])):
    found = CliRunner().invoke(application(), words)
    assert found.exit_code == 0, found.output
heavy = {"torch", "numpy", "transformers", "polars", "scipy", "matplotlib"} & set(sys.modules)
print(sorted(heavy), len(sys.argv[1:]))
"""
    command = [sys.executable, "-c", code, *COMMANDS]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == f"[] {len(COMMANDS)}\n", run.stderr
    assert len(COMMANDS) >= 9


@pytest.mark.long  # a process that imports everything
def test_importing_the_package_imports_torch_when_a_name_is_used():
    code = """
import sys, cumulant
before = "torch" in sys.modules
import cumulant.nn                                    # which imports the file attention.py
from cumulant import *
import cumulant as c
print(before, "torch" in sys.modules, callable(c.attention), attention is c.attention, c.solve.__name__)
print(sorted(set(c.__all__) - set(dir(c))), hasattr(c, "nothing"), hasattr(c, "_private"), c.testing.__name__)
"""
    run = python(code)
    assert run.stdout == "False True True True cumulant.solve\n[] False False cumulant.testing\n", run.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_shows_its_default(name):
    command = get_command(cli.application()).commands[name]  # pyright: ignore[reportAttributeAccessIssue]
    for option in command.params:
        hidden = getattr(option, "hidden", False)
        flag = getattr(option, "is_flag", False)
        if not (hidden or flag or option.required):
            assert option.show_default or option.default is not None, f"{name} {option.name}"
            shown = option.show_default if isinstance(option.show_default, str) else str(option.default)
            assert shown in " ".join(invoke(name, "--help").output.split()), f"{name} {option.name}"


def test_paragraphs_of_help_are_wrapped_by_the_terminal():
    assert "and report.html, a page to look at. Numbers stand beside" in invoke("observe", "--help").output


def test_names_in_the_help_are_those_of_the_registries():
    pytest.importorskip("tokenizers", reason="install cumulant[train]")
    from cumulant.nn.block_types import BLOCK_TYPES
    from cumulant.paper.trainings.tasks import TASKS

    assert tuple(TASKS) == train.TASKS
    assert tuple(BLOCK_TYPES) == train.BLOCKS


def test_exit_codes_stand_below_the_help():
    said = " ".join(invoke("--help").output.split())
    assert "Exit codes: 0 done; 1 a statement or prediction does not hold" in said
    assert "130 interrupted by Ctrl-C." in said


def test_the_command_alone_shows_its_help():
    run = python("import sys; sys.argv = ['cumulant']; from cumulant.cli import main; main()")
    assert "Usage: cumulant [OPTIONS] COMMAND" in run.stdout + run.stderr
    assert "Traceback" not in run.stderr


def test_wrong_options_are_exit_2():
    assert invoke("observe", "--max-length", "two").exit_code == 2
    assert invoke("nothing").exit_code == 2


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_offered_and_completes(shell):
    main = "import sys; sys.argv = ['cumulant', *sys.argv[1:]]; from cumulant.cli import main; main()"
    words = {"_TYPER_COMPLETE_ARGS": "cumulant ob", "COMP_WORDS": "cumulant ob", "COMP_CWORD": "1"}
    fish = {"_TYPER_COMPLETE_FISH_ACTION": "get-args"} if shell == "fish" else {}
    run = python(main, _CUMULANT_COMPLETE=f"complete_{shell}", **words, **fish)
    assert "observe" in run.stdout, run.stderr
    assert "report" not in run.stdout


def test_a_missing_package_is_named_once_with_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert str(extras.missing_package("A table", "polars", "report")) == (
        "A table needs polars: run pip install -e '.[report]'."
    )
    monkeypatch.chdir(tmp_path)
    assert extras.install("hf,report") == f"pip install -e '{ROOT}[hf,report]'"
    monkeypatch.setattr(extras, "HERE", tmp_path)  # as in a wheel
    assert extras.install("hf") == "pip install 'cumulant[hf]'"


@pytest.mark.long  # two processes that import torch
@pytest.mark.parametrize(("package", "words"), [("scipy", ["verify"]), ("transformers", ["observe", "minilm"])])
def test_a_command_without_its_package_is_exit_2_and_one_sentence(package, words):
    code = f"import sys; sys.modules[{package!r}] = None; sys.argv = ['cumulant', *{words!r}]\n"
    run = python(code + "from cumulant.cli import main; main()")
    assert run.returncode == 2
    assert f"needs {package}: run pip install -e '.[" in run.stderr
    assert "Traceback" not in run.stderr


def test_the_page_of_the_command_line_has_every_option():
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert commands.pages() == {"cli.md": page}, "run python -m docs.generate"
    assert all(f"| `cumulant {name}` |" in page for name in COMMANDS)


@pytest.mark.long  # seven processes that import transformers
def test_observing_a_passage_takes_at_most_twice_the_import_of_its_model(tmp_path):
    """Of processor time, the best of three."""
    pytest.importorskip("transformers", reason="install cumulant[hf]")
    import torch

    from tests.generated.observed import save_model

    torch.manual_seed(0)
    (tmp_path / "tiny").mkdir()
    save_model(tmp_path / "tiny")
    imported = "import torch; from transformers import AutoTokenizer, GPT2LMHeadModel"
    words = ["cumulant", "observe", str(tmp_path / "tiny"), "--prompt", "to be or not", "--max-length", "32", "--force"]
    words += ["--out", str(tmp_path / "out")]
    observed = f"import sys; sys.argv = {words!r}; from cumulant.cli import main; main()"

    def seconds(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run = python(code, OMP_NUM_THREADS="1")
        assert run.returncode == 0, run.stderr
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    seconds(imported)  # from here on files are in memory
    assert min(seconds(observed) for _ in range(3)) <= 2 * min(seconds(imported) for _ in range(3))
