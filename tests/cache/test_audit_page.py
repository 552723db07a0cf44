"""The command and the page of an audit: what is hostile is text, what is chosen is shown, what was stopped goes on."""

import json
import re
from pathlib import Path
from typing import Any

import polars
import pytest
from typer.testing import CliRunner

from cumulant import cli
from tests.cache.prefixes import characters, decoder, read_by

pytest.importorskip("jinja2", reason="install cumulant[report] for pages")

from cumulant.cache.audit import AuditRecord, AuditText, audit
from cumulant.cache.audit.directory import delete_audit
from cumulant.cache.audit.page.render import audit_page
from cumulant.cache.baselines import BASELINES
from cumulant.commands.audit import METHODS

HOSTILE = '</script><img src=x onerror=alert(1)>"&amp;\u202e '
TEXTS = [AuditText(f"{HOSTILE}{i}", "text", f"{HOSTILE} {i} of many texts. " * 40) for i in range(2)]


@pytest.fixture(scope="module")
def record() -> AuditRecord:
    model = read_by(decoder(vocab_size=128, max_position_embeddings=4096))
    return audit(model, TEXTS, ["h2o", "d2o-like"], keep=[0.5, 0.25], prefix=900, continuation=40, documents=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    decoder(vocab_size=128, max_position_embeddings=4096).save_pretrained(path)
    characters().save_pretrained(path)
    return path


def run(*words: object) -> tuple[int, str]:
    made = CliRunner().invoke(cli.application(), [*map(str, words)], env={"COLUMNS": "250"})
    return made.exit_code, made.output


# ---------------------------------------------------------------------- the page


def test_strings_of_texts_are_no_markup(record: AuditRecord):
    page = audit_page(record)
    assert "<img" not in page
    assert page.count("</script>") == 2  # the data, and the program
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    assert "\u202e" not in page
    assert "default-src 'none'" in page


def test_the_page_shows_what_is_chosen(record: AuditRecord, visit: Any, tmp_path: Path):
    path = tmp_path / "page.html"
    path.write_text(audit_page(record), encoding="utf-8")
    page = visit(path)
    assert "tiny" in page.inner_text("h1")
    assert page.locator("#map .cell").count() == 8
    assert page.locator("#method-table tbody tr").count() == 4
    before = page.inner_html("#map .canvas")
    page.select_option("#choose-keep", "0.25")
    assert page.inner_html("#map .canvas") != before
    page.select_option("#choose-method", "h2o")
    assert "h2o at 25 %" in page.inner_text("#map")
    assert HOSTILE.strip()[:20] in page.inner_text("#reading")
    assert page.locator("#worst-tokens article").count() >= 2
    page.click("#map-controls [data-value='gap']")
    assert "Ĝ − G" in page.inner_text("#quantity")
    assert page.is_hidden("#trouble")


def test_the_page_fits_a_telephone(record: AuditRecord, visit: Any, tmp_path: Path):
    path = tmp_path / "page.html"
    path.write_text(audit_page(record), encoding="utf-8")
    page = visit(path, 390, 800)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.is_hidden("#trouble")


def test_an_audit_without_questions_has_a_page():
    model = read_by(decoder(vocab_size=128))
    found = audit(model, TEXTS[:1], "stream", keep=1.0, prefix=80, continuation=8, retrieval=False)
    page = audit_page(found)
    assert "nan" not in page.lower().replace("nanum", "").split("<script")[0].split("</style>")[1]


def test_tables_have_a_row_for_every_method_and_head(record: AuditRecord, tmp_path: Path):
    record.save(tmp_path)
    assert record.report(tmp_path) == tmp_path / "report.html"
    methods, heads = (polars.read_parquet(tmp_path / f"{name}.parquet") for name in ("methods", "heads"))
    assert methods["method"].to_list() == ["h2o", "h2o", "d2o-like", "d2o-like"]
    assert methods["asked"].to_list() == [0.5, 0.25, 0.5, 0.25]
    assert {"kl", "kl_low", "kl_high", "kl_32", "retrieval_key_value", "seconds"} <= {*methods.columns}
    assert heads.shape[0] == 4 * 8
    (tmp_path / "mine.txt").write_text("mine")
    delete_audit(tmp_path)
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert left == ["mine.txt"]


# ---------------------------------------------------------------------- the command


def test_names_in_the_help_are_those_of_the_registry():
    assert ("backtest", *BASELINES) == METHODS


def test_the_command_audits_goes_on_and_replaces(saved: Path, tmp_path: Path):
    for i in range(2):
        (tmp_path / f"{i}.txt").write_text(f"The {i}th text of two, which is unlike the other. " * 30)
    out = tmp_path / "out"
    words = ["audit", saved, "--compare", "h2o,knorm", "--keep", "0.5,0.25", "--text", tmp_path / "0.txt"]
    words += ["--text", tmp_path / "1.txt", "--prefix", 900, "--continuation", 40, "--documents", 2, "--out", out]
    code, said = run(*words)
    assert code == 0, said
    assert "tiny: 2 documents, 900 tokens compressed, 40 after them" in said
    assert re.search(r"knorm +0\.250", said)
    assert "With the full cache" in said
    written = {path.name for path in out.iterdir()}
    assert written == {"audit.json", "windows", "methods.parquet", "heads.parquet", "report.html"}
    assert json.loads((out / "audit.json").read_text())["methods"] == ["h2o", "knorm"]
    times = [path.stat().st_mtime_ns for path in sorted((out / "windows").iterdir())]
    code, again = run(*words)
    assert code == 0, again
    assert again.splitlines()[:8] == said.splitlines()[:8]
    assert [path.stat().st_mtime_ns for path in sorted((out / "windows").iterdir())] == times
    words[words.index("0.5,0.25")] = "0.5"
    code, said = run(*words)
    assert code == 2
    assert "expected the same audit, got one with keeps (0.5,) in place of (0.5, 0.25)" in " ".join(said.split())
    code, said = run(*words, "--force")
    assert code == 0, said


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["--method", "magic"], "--method: expected backtest or one of adakv, d2o-like,"),
        (["--keep", "0"], "--keep: expected a share above 0 and at most 1, got 0"),
        (["--keep", "much"], "--keep: expected a share above 0 and at most 1, got 'much'"),
        (["--prefix", "4000", "--continuation", "200"], "--prefix + --continuation: expected at most 4096 tokens"),
        (["--prefix", "3000"], "--text: expected a text of at least 3041 tokens"),
        (["--prefix", "200", "--retrieval"], "--prefix: expected at least"),
    ],
)
def test_bad_options_are_exit_2_in_one_sentence(saved: Path, tmp_path: Path, changes: list[str], sentence: str):
    text = tmp_path / "a.txt"
    text.write_text("A text that is long enough for some. " * 40)
    words = ["audit", saved, "--text", text, "--prefix", 900, "--continuation", 40, "--out", tmp_path / "out"]
    code, said = run(*words, *changes)
    assert code == 2, said
    assert sentence in " ".join(said.split())
