"""The benchmark harness on work whose figures are known, and `cumulant bench`."""

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
testing = pytest.importorskip("typer.testing")

from benchmarks import cases, measure, report  # noqa: E402
from benchmarks.case import GROWTH, OURS, Case, Unavailable, extra, memory, within  # noqa: E402
from benchmarks.results import Results, machine  # noqa: E402
from benchmarks.run import Effort, run_case  # noqa: E402
from cumulant import cli  # noqa: E402
from cumulant.files import write  # noqa: E402

ROOT = Path(__file__).parent.parent
START, END = "<!-- bench:start -->", "<!-- bench:end -->"
SHORT = Effort(repeats=5, budget=0.5, launches=1, deadline=600, source="tests.test_benchmarks")


@dataclass(frozen=True)
class Ones:
    n: int

    def __call__(self) -> torch.Tensor:
        return torch.ones(self.n)

    def small(self) -> "Ones":
        return Ones(1024)


def square(x):
    return lambda: {"sum": x.square().sum()}


def other(x):
    return lambda: {"sum": x.square().sum() + len(x)}


def copies(times):
    return lambda x: lambda: {"copies": x.repeat(times)}


def absent(x):
    raise Unavailable("not installed")


def broken(x):
    raise RuntimeError("no such kernel")


def deadly(x):
    os.abort()


def catalogue(quick: bool = False) -> dict[str, Case]:
    """What the worker processes of these tests read."""
    n, mib = Ones(1 << 16), Ones(1 << 18)
    peers = {"absent": absent, "broken": broken, "deadly": deadly, "twin": square}
    found = [
        Case("equal", "toy", "squares", n, {OURS: square, "twin": square}, (within("twin", 1.6),)),
        Case("unequal", "toy", "squares", n, {OURS: square, "other": other}, (within("other", 9.0),)),
        Case("holes", "toy", "squares", n, {OURS: square, **peers}, tuple(within(name, 9.0) for name in peers)),
        Case("lost", "toy", "squares", n, {OURS: broken, "twin": square}, (within("twin", 9.0),)),
        Case(
            *("copies", "toy", "copies", mib),
            methods={OURS: copies(64), "twice": copies(128)},
            targets=(extra(80), extra(8), memory("twice", 0.6)),
        ),
    ]
    return {case.name: case for case in found}


@pytest.fixture(autouse=True)
def workers_find_this_file(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def bench():
    """`cumulant bench` in this process."""
    runner = testing.CliRunner(env={"COLUMNS": "200"})
    return lambda *words: runner.invoke(cli.application(), ["bench", *map(str, words)])


# ---------------------------------------------------------------------- measuring


@pytest.mark.long
def test_a_function_takes_as_long_as_itself():
    x = torch.ones(1 << 15)
    methods = dict.fromkeys("ab", lambda: x.square().sum())
    samples = measure.interleave(methods, repeats=9, budget=0.5)
    found = measure.ratio(samples, "a", "b")
    assert 0.6 < found.median < 1.6
    assert found.low <= found.median <= found.high
    assert found.count >= 9


@pytest.mark.long
def test_ratios_follow_the_work_and_slow_sides_sit_out():
    clock = iter(range(10**9)).__next__  # every look at it is a second later
    steps = {"one": lambda: None, "four": lambda: [clock() for _ in range(3)] and time.sleep(0.02)}
    samples = measure.interleave(steps, clock=clock, repeats=3, budget=0.2)
    assert measure.ratio(samples, "four", "one").median == 4
    assert sum(s is not None for s in samples["four"]) < sum(s is not None for s in samples["one"])
    assert len(samples["four"]) == len(samples["one"])


@pytest.mark.long
def test_rounds_end_when_the_ratio_has_settled():
    clock = iter(range(10**9)).__next__
    methods = dict.fromkeys("ab", lambda: None)
    assert len(measure.interleave(methods, clock=clock, repeats=4, budget=9e9, pairs=[("a", "b")])["a"]) == 4


@pytest.mark.long
def test_memory_of_an_allocation():
    case = catalogue()["copies"]
    found = run_case(case, SHORT)
    mib = {name: method["extra_mib"]["median"] for name, method in found["methods"].items()}
    assert mib == {OURS: pytest.approx(64, abs=16), "twice": pytest.approx(128, abs=16)}
    assert [c["met"] for c in found["comparisons"]] == [True, False, True]
    assert all(method["seconds"] is None for method in found["methods"].values())  # nothing asks for time


# ---------------------------------------------------------------------- running


@pytest.mark.long
def test_a_case_in_its_process():
    found = run_case(catalogue()["equal"], SHORT)
    (comparison,) = found["comparisons"]
    assert 0.6 < comparison["figure"]["median"] < 1.6
    assert comparison["met"]
    assert found["problem"] is None


@pytest.mark.long
def test_sides_that_disagree_are_not_a_success():
    found = run_case(catalogue()["unequal"], SHORT)
    assert "sum of cumulant and of other differ" in found["problem"]
    assert found["comparisons"][0]["met"] is False


@pytest.mark.long
def test_peers_that_cannot_run_are_skipped_by_name():
    found = run_case(catalogue()["holes"], SHORT)
    skipped = {name: method["skipped"] for name, method in found["methods"].items()}
    assert skipped == {
        OURS: None,
        "absent": "not installed",
        "broken": "failed: RuntimeError: no such kernel",
        "deadly": "the process was ended by SIGABRT",
        "twin": None,
    }
    assert [c["met"] for c in found["comparisons"]] == [None, None, None, True]
    told = "\n".join(report.remarks({"machine": machine(), "quick": False, "cases": [found]}))
    assert "absent skipped: not installed (holes)." in told


@pytest.mark.long
def test_our_own_failure_is_a_miss():
    assert run_case(catalogue()["lost"], SHORT)["comparisons"][0]["met"] is False


def test_every_table_has_a_sharp_case_and_every_target_names_sides():
    every = cases.catalogue()
    own = {
        "observatory",
        "filters",
        "decoding",
        "other inputs",
    }  # scores of a model, none, or any
    for table in {case.table for case in every.values()} - own:
        assert any(name.endswith("-sharp") for name, case in every.items() if case.table == table)
    for case in [*every.values(), *cases.catalogue(quick=True).values()]:
        assert {t.method for t in case.targets} | {t.peer for t in case.targets} - {None} <= set(case.methods)
    assert any(case.table == GROWTH for case in every.values())


# ---------------------------------------------------------------------- the command


def test_list_names_every_case(bench):
    shown = bench("--list").output
    assert all(name in shown for name in cases.catalogue())
    assert "≤ 1.30× SDPA" in shown


def test_an_unknown_name_gets_the_nearest(bench):
    answer = bench("retreival")
    assert answer.exit_code == 2
    assert "did you mean retrieval" in answer.output


def test_places_are_checked_before_measuring(bench, tmp_path):
    assert "does not exist" in bench("--json", tmp_path / "nowhere" / "x.json").output
    (tmp_path / "README.md").write_text("no marks")
    assert "is not a file that" in bench("--from", tmp_path / "README.md").output
    assert "expected the marks" in bench("--update", tmp_path / "README.md").output


@pytest.mark.long
def test_quick_run_writes_json_markdown_and_readme(bench, tmp_path):
    readme, saved, table = tmp_path / "README.md", tmp_path / "bench.json", tmp_path / "bench.md"
    readme.write_text(f"# Title\n\n{START}\nold\n{END}\n\nrest\n")
    answer = bench("entropy-values", "--quick", "--json", saved, "--markdown", table, "--update", readme)
    assert answer.exit_code == 0, answer.output
    results = json.loads(saved.read_text())
    (case,) = results["cases"]
    assert set(results["machine"]) == {"cpu", "instruction_set", "cores", "torch", "cumulant", "peers", "date"}
    assert case["methods"]["SDPA"]["seconds"]["median"] > 0
    assert case["comparisons"][0]["figure"]["count"] >= 3
    assert case["comparisons"][0]["met"] is None  # small inputs are not judged
    rows = [line.split(" | ") for line in table.read_text().splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(case["comparisons"])
    assert {len(row) for row in rows} == {5}
    assert f"; {machine()['cpu']}, " in table.read_text().splitlines()[0]
    assert readme.read_text() == f"# Title\n\n{START}\n{table.read_text().strip()}\n{END}\n\nrest\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "bench.json", "bench.md"]
    readme_again = bench("--from", saved, "--update", readme)  # the same table without measuring
    assert readme_again.exit_code == 0
    assert report.markdown(results).strip() in readme.read_text()


@pytest.mark.long
def test_a_run_that_was_cut_off_is_resumed(bench, tmp_path):
    saved = tmp_path / "bench.json"
    first = bench("entropy-values", "--quick", "--json", saved)
    assert first.exit_code == 0, first.output
    (before,) = json.loads(saved.read_text())["cases"]
    assert "1 of 1: entropy-values" in first.stderr  # no terminal, so a line
    again = bench("entropy-values", "decode", "--quick", "--json", saved, "--resume")
    assert again.exit_code == 0, again.output
    assert "1 of 1: decode" in again.stderr
    after = json.loads(saved.read_text())["cases"]
    assert before in after, "measured again"
    assert sorted(case["name"] for case in after) == ["decode", "entropy-values"]
    assert [case["name"] for case in after] == [
        name for name in cases.catalogue(True) if name in ("decode", "entropy-values")
    ]


def test_resume_needs_a_file_of_the_same_machine(bench, tmp_path):
    assert "name it with --json" in bench("entropy-values", "--quick", "--resume").output
    saved = tmp_path / "bench.json"
    other = Results(machine={**machine(), "cpu": "another"}, quick=True, cases=[])
    saved.write_text(json.dumps(other))
    answer = bench("entropy-values", "--quick", "--json", saved, "--resume")
    assert answer.exit_code == 2
    assert "another cpu" in answer.output
    assert json.loads(saved.read_text()) == other


@pytest.mark.long
def test_without_the_extra_one_sentence():
    code = "import sys; sys.modules['typer'] = None; from cumulant.cli import main; main()"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.strip() == "The command line needs typer: run pip install -e '.[cli]'."


@pytest.mark.long
def test_the_wheel_has_no_benchmarks_and_says_where_they_are(tmp_path):
    pytest.importorskip("setuptools", reason="a wheel is built with setuptools")
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "observed", "tests", "docs")
    shutil.copytree(ROOT, source, ignore=ignored)  # a build leaves files beside the sources
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", tmp_path]
    command = [sys.executable, "-m", "pip", "wheel", source, *options]
    built = subprocess.run(command, env=os.environ | {"CUMULANT_NATIVE": "0"}, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {name.split("/")[0] for name in archive.namelist() if "dist-info" not in name} == {"cumulant"}
        archive.extractall(tmp_path / "installed")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-c", "from cumulant.cli import main; main()", "bench", "--quick"]
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert answer.returncode == 2
    assert answer.stderr.strip() == (
        "cumulant bench runs in a clone of the repository, where its cases are: clone it and run `make bench`."
    )


# ---------------------------------------------------------------------- writing


def figure(x):
    return {"median": x, "low": x * 0.9, "high": x * 1.1, "count": 9}


def test_tables_of_known_figures():
    comparison = {"method": OURS, "quantity": "time", "figure": figure(0.1)}
    methods = {
        OURS: {"seconds": figure(0.01), "extra_mib": None, "skipped": None},
        "naive": {"seconds": figure(0.1), "extra_mib": None, "skipped": None},
    }
    met = comparison | {"peer": "naive", "bound": 0.2, "faster": True, "met": True}
    missed = comparison | {"peer": "naive", "bound": 0.05, "faster": False, "met": False}
    case = {
        "name": "a",
        "table": "t",
        "work": "w | x",
        "threads": 1,
        "methods": methods,
        "problem": None,
    }
    text = report.markdown({"machine": machine(), "quick": False, "cases": [case | {"comparisons": [met, missed]}]})
    assert "| w \\| x | 10 ms / naive 100 ms | 10× faster (9.09–11.1) | ≥ 5× faster | met |" in text
    assert "|  | 10 ms / naive 100 ms | 0.10× (0.09–0.11) | ≤ 0.05× | missed |" in text


def test_headline_figures_stand_between_their_own_marks():
    """Those of the stored results; a page may have the figures, the tables, or both."""
    results = json.loads((ROOT / "docs" / "bench.json").read_text(encoding="utf-8"))
    page = "<!-- figures:start -->old<!-- figures:end -->"
    text = report.updated(page, results)
    (causal,) = [case for case in results["cases"] if case["name"] == "attend"]
    ratio = next(c["figure"]["median"] for c in causal["comparisons"] if c["peer"] == "SDPA")
    assert f"{ratio:.2f}× the time of torch's attention" in text
    assert text.count("\n- ") == 5
    assert "× faster per track than filterpy" in text
    assert results["machine"]["cpu"] in text
    assert "old" not in text
    both = report.updated(page + START + END, results)
    assert report.markdown(results).strip() in both
    with pytest.raises(ValueError, match="expected the marks"):
        report.updated("neither", results)


def test_the_pages_show_the_stored_results():
    results = json.loads((ROOT / "docs" / "bench.json").read_text(encoding="utf-8"))
    for page in (ROOT / "docs" / "benchmarks.md", ROOT / "README.md"):
        text = page.read_text(encoding="utf-8")
        assert report.updated(text, results) == text, page.name


def test_growth_has_a_row_for_each_size():
    methods = {f"N={n}": {"seconds": figure(n**2), "extra_mib": figure(n), "skipped": None} for n in (2, 4)}
    step = {"method": "N=4", "peer": "N=2", "faster": False, "met": True}
    steps = [
        step | {"quantity": "time", "bound": 4.4, "figure": figure(4.0)},
        step | {"quantity": "memory", "bound": 2.2, "figure": figure(2.0)},
    ]
    case = {
        "name": "g",
        "table": GROWTH,
        "work": "w",
        "threads": 1,
        "methods": methods,
        "comparisons": steps,
    }
    (table,) = report.tables({"machine": machine(), "quick": False, "cases": [case | {"problem": None}]})
    assert table.rows == [
        ("2", "4.00 s", "–", "2.0 MiB", "–", "–"),
        ("4", "16.00 s", "4.00× (3.60–4.40)", "4.0 MiB", "2.00× (1.80–2.20)", "met"),
    ]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "table.md"
    write(path, "old")
    path.chmod(0o640)
    write(path, "new")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o640)

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        write(path, "newer")
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["table.md"]
