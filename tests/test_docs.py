"""Pages name only what exists, link only to what is there, and every page and script can be found from the start."""

import importlib
import re
from pathlib import Path

import pytest

from cumulant.paper.statements import STATEMENTS

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
NAMES = ROOT / "docs" / "one-equation-many-names.md"
SCRIPTS = {path.name for path in (ROOT / "gallery").glob("plot_*.py")}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)


def named(page: Path) -> list[str]:
    return sorted(set(re.findall(r"`(cumulant(?:\.\w+)+)", page.read_text(encoding="utf-8"))))


def resolve(name: str) -> object:
    """The module or the attribute that a dotted name stands for."""
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for depth, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:depth]))
        found = getattr(found, part)
    return found


@each_page
def test_every_name_exists(page: Path):
    for name in named(page):
        assert resolve(name) is not None, name


def test_a_name_that_does_not_exist_is_noticed():
    with pytest.raises(ModuleNotFoundError):
        resolve("cumulant.hopfield.remember")


def test_the_page_of_names_covers_the_uses():
    uses = {"attention", "attend", "residual", "hopfield", "contrastive", "regression"}
    uses |= {"potentials", "duality", "link", "boltzmann", "geometry"}
    assert uses <= {name.split(".")[1] for name in named(NAMES)}


@each_page
def test_links_lead_somewhere(page: Path):
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    for target in targets:
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_every_script_is_on_the_page_of_names():
    mentioned = set(re.findall(r"plot_\w+\.py", NAMES.read_text(encoding="utf-8")))
    assert mentioned == SCRIPTS


def test_every_promise_names_a_test_that_exists():
    rows = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"))
    assert len(rows) > 20
    for path, name in rows:
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.M), f"{path}::{name}"


def test_every_page_is_in_the_table_of_contents():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = set(index.split("{toctree}")[1].split("```")[0].split())
    assert {page.stem for page in PAGES} - {"index"} <= listed


def test_tables_are_rectangular():
    rows = [line for line in NAMES.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {7, 8}


# ---------------------------------------------------------------------- the theory, and who cites it

THEORY = (ROOT / "docs" / "theory.md").read_text(encoding="utf-8")
ANCHORS = re.findall(r'<a id="([^"]+)"></a>', THEORY)
SECTION = re.compile(r"§ ?(\d+(?:\.\d+)?)")
STATEMENT = re.compile(r"\b(?:S[0-3]-[A-Z]\d+|X-[1-9]\d*)[a-c]?(?:'|′)?")
ROOMS = ("cumulant", "tests", "gallery", "benchmarks", "examples")
CITING = [
    *(path for room in ROOMS for path in (ROOT / room).rglob("*.py")),
    *(ROOT / "docs").glob("*.md"),
    *ROOT.glob("*.md"),
]


def anchor(claim: str) -> str:
    return claim.lower().replace("'", "-prime")


def sections_of_statements() -> dict[str, int]:
    found, section = {}, 0
    for name in ANCHORS:
        if name.startswith("section-"):
            section = int(name.split("-")[1])
        else:
            found[name] = section
    return found


def dangling(text: str) -> list[str]:
    """Sections and statements that are cited and not in docs/theory.md; X-5a is part (a) of X-5."""
    sections = {name.removeprefix("section-").replace("-", ".") for name in ANCHORS if name.startswith("section-")}
    missing = [f"§{number}" for number in SECTION.findall(text) if number not in sections]
    for name in STATEMENT.findall(text):
        whole = anchor(name.replace("′", "'"))
        if whole not in ANCHORS and whole.rstrip("abc") not in ANCHORS:
            missing.append(name)
    return missing


def test_the_theory_has_every_statement_once_in_its_section():
    assert len(ANCHORS) == len(set(ANCHORS))
    assert sections_of_statements() == {anchor(claim.id): claim.section for claim in STATEMENTS}
    assert {f"section-{n}" for n in range(1, 17)} <= set(ANCHORS)


def test_statements_and_verdicts_link_to_each_other():
    table = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    for claim in STATEMENTS:
        name = anchor(claim.id)
        assert f'<a id="{name}"></a>[**{claim.id}**](claims.md#{name})' in THEORY
        assert f'<a id="{name}"></a>[{claim.id}](theory.md#{name})' in table


def test_every_citation_of_the_theory_leads_somewhere():
    unknown_on_purpose = {Path(__file__), ROOT / "tests" / "paper" / "test_verify.py"}
    for path in CITING:
        if path not in unknown_on_purpose:
            assert dangling(path.read_text(encoding="utf-8")) == [], path


def test_citations_have_one_form():
    """§5.5, not THEORY §5.5."""
    for path in CITING:
        if path != Path(__file__) and not path.is_relative_to(ROOT / "cumulant" / "paper"):
            assert not re.search(r"\bTHEORY(?: §|\.md)", path.read_text(encoding="utf-8")), path


def test_a_citation_that_leads_nowhere_is_noticed():
    assert dangling("§5.5, §3, S1-T1, X-5a and S1-P2′") == []
    assert dangling("§5.9 and §99, S1-T7, X-40") == ["§5.9", "§99", "S1-T7", "X-40"]
