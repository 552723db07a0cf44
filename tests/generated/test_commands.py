"""Command lines of every kind: options that are right, misspelled, out of range, or contradict each other.

Whatever is typed, a command ends with a known exit code; if it fails it says why in one sentence, it leaves nothing
behind, and the corrected command runs.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.generated.properties import holds_for

observed = pytest.importorskip("tests.generated.observed")

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

ROOT = Path(__file__).parents[2]
TEXTS = ("words.txt", "lines.jsonl", ".", "nowhere.txt", "", "tiny/model.safetensors", "s4://bucket/x.txt")
OPTIONS: dict[str, tuple[str, ...]] = {  # option → values, right and wrong
    "--text": TEXTS,
    "--column": ("text", "n", "txet", ""),
    "--max-tokens": ("48", "16", "15", "0", "-1", "many", "1e3", str(10**30)),
    "--max-length": ("16", "8", "7", "4096", "x"),
    "--batch-size": ("1", "0", "-3", "two"),
    "--device": ("cpu", "cup", "cuda:99", "meta", ""),
    "--dtype": ("float32", "bfloat16", "float", "int64", "flaot32", "nn", ""),
    "--quantities": ("cheap", "entropy", "entropi", "", "full,cheap"),
    "--null": ("random", "shuffled", "none", "noen", ""),
    "--seed": ("3", "-1", str(2**70), "pi"),
    "--ablate": ("gaussian", "mixture", "gauss", ""),
    "--causes": ("0", "16", "15", "-1", "some"),
    "--shard-bytes": ("64", "0", "-1"),
    "--workers": ("1", "0", "x"),
    "--checkpoints": ("run", ".", "nowhere", "words.txt"),
    "--resume": (),
    "--force": (),
    "--allow-pickle": (),
    "--qantities": ("cheap",),
    "--forse": (),
}
MODELS = ("tiny", "tiny", "tiny", "nowhere", "", "words.txt", "run", "[/red]", "own er/na me")
OTHERS = (  # lines of the other commands, {} is a record, {out} a new directory
    ("report", "{}"),
    ("report", "nowhere"),
    ("report", "words.txt"),
    ("report",),
    ("report", "{}", "{}"),
    ("compare", "{}", "{}"),
    ("compare", "{}"),
    ("compare", "{}", "nowhere"),
    ("compare",),
    ("verify", "S9-E99"),
    ("verify", "--section", "77"),
    ("verify", "--seed", "-1"),
    ("bench", "no such case"),
    ("bench", "--from", "words.txt"),
    ("experiment", "no-such"),
    ("experiment", "closure", "--out", "words.txt"),
    ("train", "no-such"),
    ("train", "recall", "--block", "convexx", "--out", "{out}"),
    ("train", "recall", "--steps", "0"),
    ("train", "recall", "--resume", "--force", "--out", "{out}"),
    ("track",),
    ("track", "nowhere.csv", "--model", "words.txt", "--out", "{out}"),
    ("track", "words.txt", "--model", "words.txt", "--out", "{out}"),
    ("track", "words.txt", "--model", "words.txt", "--method", "imn", "--out", "{out}"),
    ("observ",),
    ("--version",),
    ("observe", "--help"),
)


@dataclass(frozen=True)
class Line:
    """`cumulant observe MODEL` with options and their values."""

    model: str
    options: tuple[tuple[str, ...], ...]


def lines() -> st.SearchStrategy[Line]:
    option = st.sampled_from(sorted(OPTIONS)).flatmap(
        lambda name: st.tuples(st.just(name), st.sampled_from(OPTIONS[name])) if OPTIONS[name] else st.just((name,))
    )
    return st.builds(Line, st.sampled_from(MODELS), st.lists(option, min_size=1, max_size=4).map(tuple))


def arguments(line: Line, out: Path) -> list[str]:
    names = [name for name, *_ in line.options]
    given = [word for option in line.options for word in option]
    if "--text" not in names:
        given += ["--text", "words.txt"]
    if "--max-tokens" not in names:
        given += ["--max-tokens", "48"]
    if "--null" not in names:
        given += ["--null", "none"]
    if "--quantities" not in names:
        given += ["--quantities", "cheap"]
    if "--max-length" not in names:
        given += ["--max-length", "16"]
    model = [] if "--checkpoints" in names and line.model == "tiny" else [line.model]
    return ["observe", *model, *given, "--out", str(out)]


@holds_for(lines(), examples=16)
def test_any_command_line_ends_well_or_leaves_nothing_behind(case: Line) -> None:
    observed.observed("series")  # makes run/, which --checkpoints names
    with tempfile.TemporaryDirectory() as name, observed.chdir(observed.base()):
        home, out = observed.snapshot(observed.base()), Path(name) / "out"
        given = arguments(case, out)
        ended = observed.call(*given)
        observed.require_sentence(ended)
        assert ended.code in (0, 2), ended
        assert observed.snapshot(observed.base()) == home
        ablated = (
            "--ablate" in given and (out / "record.json").is_file()
        )  # the record is whole, the text too short for it
        if ended.code and not ablated:
            assert not out.exists(), (ended, sorted(out.rglob("*")))


@holds_for(st.sampled_from(OTHERS), examples=len(OTHERS))
def test_other_commands_refuse_in_one_sentence(case: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as name, observed.chdir(observed.base()):
        record, out = observed.observed("record"), Path(name) / "out"
        given = [word.replace("{out}", str(out)).replace("{}", str(record)) for word in case]
        home = observed.snapshot(observed.base())
        ended = observed.call(*given)
        observed.require_sentence(ended)
        assert ended.code in (0, 1, 2), ended
        assert not out.exists()
        if ended.code:
            assert observed.snapshot(observed.base()) == home


def test_a_misspelled_quantity_does_not_block_the_corrected_command(tmp_path):
    wrong = observed.observe(tmp_path / "out", "--null", "none", "--quantities", "entropi")
    observed.require_sentence(wrong)
    assert wrong.code == 2
    assert "--quantities: expected names among" in wrong.said
    assert not (tmp_path / "out").exists()
    assert observed.observe(tmp_path / "out", "--null", "none").code == 0
    assert observed.observe(tmp_path / "out", "--null", "none", "--force", "--quantities", "entropi").code == 2
    assert observed.call("report", tmp_path / "out").code == 0


def test_options_that_would_do_nothing_or_contradict_each_other_are_refused(tmp_path):
    given = ("observe", observed.base() / "tiny", "--out", tmp_path / "out", *observed.QUICK)
    text = ("--text", observed.base() / "words.txt")
    cases = {
        (*text, "--column", "text"): "--column: expected JSONL or Parquet that has columns, got plain text alone",
        ("--column", "text"): "--column: expected JSONL or Parquet that has columns, got plain text alone",
        (*text, "--null", "none", "--null", "random"): "--null: expected none alone, got random beside it",
        (*text, "--null", "none", "--null", "rnadom"): "--null: expected random, shuffled or none, got 'rnadom'",
        ("--text", "-", "--null", "random"): "--null: expected texts that can be read twice, got standard input",
    }
    for more, words in cases.items():
        ended = observed.call(*given, *more)
        observed.require_sentence(ended)
        assert ended.code == 2, ended
        assert words in ended.said
        assert not (tmp_path / "out").exists()


def test_a_pickle_is_refused_in_the_words_of_the_command_line(tmp_path):
    observed.save_model(tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").rename(tmp_path / "pickled" / "pytorch_model.bin")
    ended = observed.call("observe", tmp_path / "pickled", "--out", tmp_path / "out")
    observed.require_sentence(ended)
    assert ended.code == 2
    assert "pass --allow-pickle if you trust its author" in ended.said
    assert "allow_pickle=True" not in ended.said
    assert ended.said.startswith("ValueError: MODEL: expected weights as safetensors or GGUF")


def test_a_model_whose_weights_are_not_numbers_is_refused(tmp_path):
    observed.save_model(tmp_path / "broken")
    weights = load_file(tmp_path / "broken" / "model.safetensors")
    name = next(name for name in weights if name.endswith("attn.c_attn.weight"))
    weights[name][0, :3] = torch.nan
    save_file(weights, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    text = observed.base() / "words.txt"
    ended = observed.call("observe", tmp_path / "broken", "--text", text, "--out", tmp_path / "out", *observed.QUICK)
    observed.require_sentence(ended)
    assert ended.code == 2
    assert "with 3 that are NaN or infinite in " in ended.said
    assert not (tmp_path / "out").exists()


def test_scores_that_overflow_end_in_a_sentence_and_leave_nothing(tmp_path):
    observed.save_model(tmp_path / "large")
    weights = load_file(tmp_path / "large" / "model.safetensors")
    name = next(name for name in weights if name.endswith("attn.c_attn.weight"))
    weights[name] *= 1e30
    save_file(weights, tmp_path / "large" / "model.safetensors", metadata={"format": "pt"})
    given = ("--text", observed.base() / "words.txt", "--out", tmp_path / "out", *observed.QUICK)
    ended = observed.call("observe", tmp_path / "large", *given, "--null", "none", "--quantities", "sampled")
    observed.require_sentence(ended)
    assert ended.code == 0 or not (tmp_path / "out").exists(), ended


def test_a_record_of_attach_has_a_page(tmp_path):
    shutil.copytree(observed.observed("attached"), tmp_path / "saved")
    ended = observed.call("report", tmp_path / "saved")
    assert ended.code == 0, ended
    words = "GPT2LMHeadModel (GPT2LMHeadModel): 1 attention modules, 2 heads, 12 tokens of text in 2 windows"
    assert words in ended.said
    assert (tmp_path / "saved" / "report.html").is_file()
    assert observed.call("report", tmp_path / "saved").code == 0  # over its own page


# ---------------------------------------------------------------------- a full disk


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """As if the disk were full: no file of this process may grow beyond so many bytes."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@dataclass(frozen=True)
class Full:
    """A disk with room for files of so many bytes, and a command with a base as in `observed.observed`."""

    size: int
    base: str
    command: str


def full() -> st.SearchStrategy[Full]:
    sizes = st.sampled_from((0, 100, 400, 1_500, 5_000, 20_000, 60_000, 150_000, 400_000))
    bases = (("empty", "again"), ("record", "force"), ("begun", "resume"), ("record", "report"))
    return st.sampled_from(bases).flatmap(lambda base: st.builds(Full, sizes, *map(st.just, base)))


@holds_for(full(), examples=5)
def test_a_full_disk_is_one_sentence_and_the_next_run_goes_on(case: Full) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name) / "out"
        shutil.copytree(observed.observed(case.base), place)
        before = observed.snapshot(place)
        with files_up_to(case.size):
            ended = observed.run(case.command, place, case.base)
        observed.require_sentence(ended)
        assert ended.code in (0, 2), ended
        left = observed.snapshot(place)
        assert not [key for key in left if key.endswith(".cumulant-tmp")]
        if ended.code and "shards/plan.json" not in left and case.base != "begun":
            kept = [key for key in before if key.endswith(("record.json", ".safetensors"))]
            assert all(left[key] == before[key] for key in kept) or observed.call("report", place).code == 0
        begun = "shards/plan.json" in left or case.base == "begun"
        again = "resume" if begun else "force" if "record.json" in left else "again"
        ended = observed.run(again, place, case.base)
        assert ended.code == 0, ended
        assert observed.call("report", place).code == 0


# ---------------------------------------------------------------------- Ctrl-C


def raise_interrupt(*_: object, **__: object) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("module", "name", "line"),
    [
        ("cumulant.observatory.runs.run", "load", ("observe", "{tiny}", "--text", "{words}", "--out", "{out}")),
        (
            "cumulant.observatory.report.directory",
            "render_tables",
            ("observe", "{tiny}", "--text", "{words}", "--out", "{out}", *observed.QUICK),
        ),
        (
            "cumulant.observatory.runs.observe",
            "observe_shard",
            ("observe", "{tiny}", "--text", "{words}", "--out", "{out}"),
        ),
        ("cumulant.observatory.runs.run", "observe", ("observe", "{tiny}", "--text", "-", "--out", "{out}")),
        (
            "cumulant.observatory.runs.over_training",
            "load",
            ("observe", "--checkpoints", "{run}", "--text", "{words}", "--out", "{out}"),
        ),
        ("cumulant.observatory.report.directory", "write_tables", ("report", "{record}")),
        ("cumulant.observatory.command", "read_answers", ("compare", "{record}", "{record}")),
        ("cumulant.paper.verify.command", "verify", ("verify",)),
        ("benchmarks.command", "run", ("bench", "--quick")),
        ("cumulant.paper.trainings.command", "study", ("train", "recall", "--out", "{out}")),
        (
            "cumulant.filters.tracking.command",
            "read_model",
            ("track", "{words}", "--model", "{words}", "--out", "{out}"),
        ),
        ("cumulant.paper.experiments.command", "_run", ("experiment", "closure", "--out", "{out}")),
    ],
)
def test_ctrl_c_is_exit_130_in_every_command(tmp_path, monkeypatch, module, name, line):
    observed.observed("series")
    shutil.copytree(observed.observed("record"), tmp_path / "record")
    named = {"tiny": "tiny", "words": "words.txt", "run": "run"}
    named = {key: str(observed.base() / value) for key, value in named.items()}
    named |= {"out": str(tmp_path / "out"), "record": str(tmp_path / "record")}
    monkeypatch.setattr(importlib.import_module(module), name, raise_interrupt)
    ended = observed.call(*[word.format(**named) for word in line])
    assert ended.code == 130, ended
    assert ended.raised is None
    assert "Interrupted" in ended.said
    assert "Traceback" not in ended.said
    if line[0] == "observe" and name in ("load", "observe_shard", "observe"):
        assert not (tmp_path / "out").exists()  # nothing was finished, so nothing is in the way of the next run


START = """
import sys
from cumulant import cli
from cumulant.terminal import Commands
cli.application()
once = Commands.invoke
def invoke(self, ctx):
    print("begun", flush=True)  # so that the signal does not meet the imports
    return once(self, ctx)
Commands.invoke = invoke
sys.argv = ["cumulant", *sys.argv[1:]]
cli.main()
"""


@pytest.mark.long  # a process imports for some seconds; above, the signal is real and the process this one
def test_a_real_process_that_gets_sigint_exits_with_130_and_the_run_goes_on(tmp_path):
    text, out = tmp_path / "long.jsonl", tmp_path / "out"
    text.write_text((observed.base() / "lines.jsonl").read_text() * 2000)
    given = ["observe", observed.base() / "tiny", "--text", text, "--out", out, "--max-tokens", 0, "--max-length", 16]
    given += ["--batch-size", 4, "--quantities", "entropy", "--null", "none", "--shard-bytes", 2000]
    process = subprocess.Popen(
        [sys.executable, "-c", START, *map(str, given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    while len([*(out / "shards").glob("0*")]) < 2 and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    words = " ".join("".join(process.communicate(timeout=120)).split())
    assert process.returncode == 130, words
    assert "Interrupted: the record holds what was read until then. The same command with --resume goes on." in words
    assert "Traceback" not in words
    assert (out / "report.html").is_file()
    assert (out / "shards" / "plan.json").is_file()
