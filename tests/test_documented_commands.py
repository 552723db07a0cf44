"""Every command of the README and the pages: its options exist, and it runs, in order, in one directory of its own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cumulant.cli import application

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHORTER = {  # what is added to commands that take minutes; the text says how long they take as they stand
    "cumulant observe": "--max-tokens 600",
    "cumulant observe --checkpoints": "--max-tokens 600",
    "cumulant audit": "--documents 1 --prefix 128 --continuation 16 --no-retrieval",
    "cumulant train": "--steps 2 --block standard",
}
LEFT_OUT = {  # of what is run; each is run by another test, or is that test
    "cumulant bench": "tests/test_benchmarks.py runs the command on small inputs; a whole case takes minutes",
    "cumulant experiment open-question": "five minutes; tests/paper/test_experiments.py runs it small",
    "--ray": "tests/test_examples.py runs this line",
    "-completion": "changes the start-up file of a shell, or prints code for one: tests/test_cli.py reads it",
    "smollm2 --ablate": "three minutes; the line above it runs the same on MiniLM",
}
ORDER = ["track --example", "track", "observe", "report", "compare", "train", "observe --checkpoints", "generate"]


def commands(page: Path) -> list[str]:
    """Lines of indented blocks that begin with cumulant, without what is said about them."""
    lines = re.findall(r"^    (cumulant .*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.split(r"\s+#\s", line)[0].strip() for line in lines]


ALL = sorted({command for page in PAGES for command in commands(page)})
RUN = [command for command in ALL if not any(part in command for part in LEFT_OUT)]


def test_the_pages_have_commands_of_every_kind():
    kinds = {command.split()[1] for command in ALL}
    assert {
        "observe",
        "report",
        "compare",
        "verify",
        "experiment",
        "track",
        "train",
        "audit",
        "compress",
        "generate",
        "doctor",
        "bench",
    } <= kinds


@pytest.mark.parametrize("command", ALL)
def test_its_options_exist(command: str):
    group = typer.main.get_command(application())
    name, *words = shlex.split(command)[1:]
    if name.startswith("-"):
        assert any(name in parameter.opts for parameter in [*group.params, group.get_help_option(typer.Context(group))])
        return
    with group.make_context("cumulant", [name]) as above:
        chosen = group.get_command(above, name)  # pyright: ignore[reportAttributeAccessIssue]
        assert chosen is not None, name
        words = ["--ray=local" if word == "--ray" else word for word in words]
        context = chosen.make_context(name, words, parent=above, resilient_parsing=True)
        assert not context.args, context.args
        known = {option for parameter in chosen.params for option in parameter.opts}
        assert {word.split("=")[0] for word in words if word.startswith("--")} <= known


def test_an_option_that_does_not_exist_is_noticed():
    assert CliRunner().invoke(application(), ["observe", "--colour", "red"]).exit_code == 2


def _position(command: str) -> int:
    """Commands that read what others have written come after them."""
    fits = [i for i, start in enumerate(ORDER) if command.removeprefix("cumulant ").startswith(start)]
    return max(fits, default=-1)


@pytest.mark.long
@pytest.mark.xdist_group("documented commands")
def test_all_of_them_run_one_after_the_other(tmp_path: Path):
    """What the pages speak of is there: a model, a text, a recording, a table, and what make observes."""
    from tests.filters.tables import radar
    from tests.observatory.own_model import save_own_model
    from tests.observatory.recordings import tone

    save_own_model(tmp_path / "my-model")
    radar(tmp_path / "radar.csv")
    tone(tmp_path / "talk.wav", 2.0)
    (tmp_path / "corpus").mkdir()
    shutil.copy(ROOT / "LICENSE", tmp_path / "corpus" / "license.txt")
    (tmp_path / "article.txt").write_text((ROOT / "LICENSE").read_text(encoding="utf-8")[:6000], encoding="utf-8")
    failed = []
    for command in sorted(RUN, key=_position):
        words = shlex.split(command.replace("--max-tokens 8192", "--max-tokens 600"))
        extra = [more for start, more in SHORTER.items() if command.startswith(start)]
        words += shlex.split(extra[-1]) if extra and "--max-tokens" not in command else []
        if words[1] in ("observe", "audit", "train", "track") and "--example" not in words:
            words.append("--force")
        words[0] = str(Path(sys.executable).parent / "cumulant")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode:
            failed.append(f"{command}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    assert not failed, "\n".join(failed)
    for written in ("observed/minilm/report.html", "looks/report.html", "tracked", "trained"):
        assert (tmp_path / written).exists(), written
