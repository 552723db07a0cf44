"""The registry of statements is complete and honest, every check passes, and `cumulant verify` says so."""

import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("rich")
testing = pytest.importorskip("typer.testing")

from cumulant import cli  # noqa: E402
from cumulant.paper.checks import registry  # noqa: E402
from cumulant.paper.checks.evidence import Evidence, agrees, differs, true  # noqa: E402
from cumulant.paper.verify import CHECKS, STATEMENTS, Outcome, Statement, Verdict, command, report, run, verify  # noqa: E402

# the index of the theory: every statement of the paper, its drafts and its poster, and those added here
INDEX = """
S0-E1 S0-E2 S0-E3 S0-E4 S0-E5 S0-E6 S0-E7 S0-C1 S0-C2 S0-C3 S0-C4 S0-C4b S0-C5 S0-C6 S0-C7 S0-C8 S0-Q1 S0-Q2 S0-Q3
S0-R1 S0-R2 S0-R3 S0-T1
S1-A1 S1-A2 S1-A3 S1-A4 S1-A5 S1-E1 S1-E2 S1-E3 S1-E4 S1-E5 S1-E6 S1-P1a S1-P1b S1-C1 S1-P2 S1-P2' S1-T1 S1-D1 S1-D2
S1-H1 S1-H2 S1-H3 S1-H4 S1-I1 S1-I2 S1-I3 S1-I4 S1-I5 S1-F1 S1-F2 S1-F3 S1-F4
S2-E1 S2-E2 S2-E3 S2-E4 S2-E5 S2-E6 S2-E7 S2-E8 S2-E9 S2-E10 S2-E11 S2-E12 S2-E13 S2-E14 S2-E15
S2-C1 S2-C2 S2-C3 S2-C4 S2-C5 S2-C6 S2-C7 S2-C8 S2-C9 S2-C10 S2-C11 S2-C12 S2-C13 S2-C14
S3-I1 S3-I2 S3-I3 S3-I4 S3-I5 S3-I6
S3-R1 S3-R2 S3-R3 S3-R4 S3-R5 S3-R6 S3-R7 S3-R8 S3-F1 S3-F2 S3-F3 S3-F4 S3-F5 S3-F6 S4
X-1 X-2 X-3 X-4 X-5 X-6 X-7 X-8 X-9 X-10 X-11 X-12 X-13 X-14 X-15 X-16 X-17 X-18
""".split()  # noqa: SIM905
by_statement = pytest.mark.parametrize("statement", STATEMENTS, ids=lambda c: c.id)


def test_every_statement_of_the_index_is_there_once():
    assert sorted(c.id for c in STATEMENTS) == sorted(INDEX)


@by_statement
def test_a_statement_says_all_it_must(statement: Statement):
    assert statement.words.endswith(".")
    assert statement.section in range(1, 15)
    assert all(re.fullmatch(r"[A-M]\d+", name) for name in statement.checks)
    if statement.verdict is Verdict.CONDITION:
        assert statement.condition
    if statement.verdict is Verdict.CORRECTED:
        assert statement.literal
    if not statement.verdict.checked:
        assert statement.reason
        assert not statement.checks
    else:
        assert statement.checks
        assert set(statement.checks) <= CHECKS.keys()


def test_every_check_serves_a_statement():
    assert {name for c in STATEMENTS for name in c.checks} == set(CHECKS)


SLOW = ("M1", "M3", "K4")
EVERY_CHECK = [pytest.param(name, marks=pytest.mark.long if name in SLOW else ()) for name in CHECKS]


@pytest.mark.parametrize("name", EVERY_CHECK)
def test_every_check_passes(name: str):
    result = run.run_check(name)
    if result.skipped:
        pytest.skip(result.skipped)
    assert not result.problem
    assert result.evidence
    assert all(e.passed for e in result.evidence), [e for e in result.evidence if not e.passed]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 10))
def test_every_check_passes_for_other_seeds(seed: int):
    found = [run.run_check(name, seed) for name in CHECKS]
    assert [r.name for r in found if not r.passed and not r.skipped] == []


def test_inputs_depend_on_seed_and_name_only():
    first, again, other = (run.run_check("A4", seed).evidence for seed in (0, 0, 1))
    assert [e.value for e in first] == [e.value for e in again]
    assert [e.value for e in first] != [e.value for e in other]


# ---------------------------------------------------------------------- a false number is found


def outcome(verdict: Verdict, *evidence: Evidence) -> Outcome:
    statement = Statement("T-1", 1, "A test.", verdict=verdict, condition="always", literal="never", checks=("T1",))
    return Outcome(statement, (run.CheckResult("T1", evidence, 0.0),))


def test_evidence_judges():
    assert agrees("a", [1.0, 2.0], [1.0, 2.0 + 1e-13], 1e-12).passed
    assert not agrees("a", [1.0, 2.0], [1.0, 2.1], 1e-12).passed
    assert not agrees("a", float("nan"), 1.0, 1e300).passed
    assert not agrees("a", [], [], 1.0).passed
    assert agrees("a", float("inf"), float("inf"), 0.0).passed
    assert not true("a", False).passed
    assert differs("a", 1.0, 2.0, 0.5).passed
    assert not differs("a", 1.0, 1.1, 0.5).passed


def test_a_statement_called_false_must_be_seen_to_fail():
    good, literal = agrees("a", 1.0, 1.0, 1e-12), differs("b", 1.0, 2.0, 0.1)
    assert outcome(Verdict.HOLDS, good).status == "agrees"
    assert outcome(Verdict.HOLDS, agrees("a", 1.0, 2.0, 1e-12)).status == "disagrees"
    assert outcome(Verdict.CORRECTED, good).status == "disagrees"
    assert outcome(Verdict.CORRECTED, good, literal).status == "agrees"
    assert outcome(Verdict.HOLDS).status == "disagrees"  # a check without evidence proves nothing


def test_a_check_that_breaks_is_reported_and_hides_nothing(monkeypatch):
    def broken(draw):
        yield agrees("fine", 1.0, 1.0, 0.0)
        raise RuntimeError("out of keys")

    monkeypatch.setitem(CHECKS, "A4", registry.NumericalCheck("A4", "broken", broken))
    found = verify([c for c in STATEMENTS if c.id in ("S0-E6", "S0-E4")])
    status = {o.statement.id: o.status for o in found}
    assert status == {"S0-E6": "disagrees", "S0-E4": "agrees"}
    assert "RuntimeError: out of keys" in json.dumps(report.as_json(found, 0))


def test_a_check_that_cannot_run_here_is_skipped_by_name(monkeypatch):
    def absent(draw):
        raise registry.Skipped("install the model")
        yield

    monkeypatch.setitem(CHECKS, "A4", registry.NumericalCheck("A4", "absent", absent))
    (found,) = verify([c for c in STATEMENTS if c.id == "S0-E6"])
    assert (found.status, found.results[0].skipped) == ("skipped", "install the model")


# ---------------------------------------------------------------------- the command


def invoke(*arguments: str):
    return testing.CliRunner().invoke(cli.application(), ["verify", *arguments])


def test_one_statement_in_full():
    found = invoke("s0-e7")
    assert found.exit_code == 0, found.output
    text = " ".join(found.output.split())
    assert "S0-E7" in text
    assert "cumulant/paper/checks/family.py:" in text
    assert "agrees" in text


def test_a_check_by_its_name_runs_the_statements_that_rest_on_it():
    found = json.loads(invoke("A7", "--json").output)
    assert "S1-E4" in {c["id"] for c in found["statements"]}


@pytest.mark.long
def test_all_of_it_as_json_within_a_minute():
    """Of one thread's work: other programs do not count."""
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    process = subprocess.run(
        [sys.executable, "-m", "cumulant.cli", "verify", "--json"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert len(found["statements"]) == len(INDEX)
    assert {c["status"] for c in found["statements"]} <= {"agrees", "not a claim", "skipped"}
    assert seconds < 60


@pytest.mark.long
def test_a_section_of_the_theory():
    found = json.loads(invoke("--section", "6", "--json").output)
    assert {c["section"] for c in found["statements"]} == {6}
    found = json.loads(invoke("--section", "x", "--json").output)
    assert {c["id"].split("-")[0] for c in found["statements"]} == {"X"}


def test_disagreement_is_exit_code_one(monkeypatch):
    wrong = [replace(c, verdict=Verdict.CORRECTED) if c.id == "S0-E6" else c for c in STATEMENTS]
    monkeypatch.setattr(command, "STATEMENTS", tuple(wrong))
    assert invoke("S0-E6").exit_code == 1
    assert invoke("S0-E4").exit_code == 0


UNKNOWN = [
    (["S0-E77"], "did you mean S0-E7"),
    (["nonsense"], "no statement"),
    (["--section", "Q"], "there are"),
    (["S0-E7", "--section", "X"], "none of these"),
]


@pytest.mark.parametrize(("arguments", "words"), UNKNOWN)
def test_unknown_names_get_a_sentence(arguments, words):
    found = invoke(*arguments)
    assert found.exit_code == 2
    assert words in " ".join(re.sub(r"[│╭╮╰╯─]", " ", found.output).split())


def test_a_page_renews_between_its_marks(tmp_path):
    page = tmp_path / "claims.md"
    page.write_text("a\n<!-- verify:start -->\nold\n<!-- verify:end -->\nb\n")
    found = invoke("--section", "1", "--update", str(page))
    assert found.exit_code == 0, found.output
    assert "S0-E3" in page.read_text()
    assert page.read_text().startswith("a\n<!-- verify:start -->\n| id |")
