"""The one list of columns: what runs write is in it, what is in it is written, and everybody uses its words."""

import json
import re
import subprocess
import sys

import pytest
import torch

hf = pytest.importorskip("transformers", reason="install cumulant[hf] to observe models")
pl = pytest.importorskip("polars", reason="install cumulant[report] to write tables")
testing = pytest.importorskip("typer.testing")

from cumulant.cli import application  # noqa: E402
from cumulant.observatory import attach  # noqa: E402
from cumulant.observatory.columns_command import select_columns  # noqa: E402
from cumulant.observatory.hooks.hidden_states import SAMPLED_TOKENS  # noqa: E402
from cumulant.observatory.record.record import EXCERPTS  # noqa: E402
from cumulant.observatory.record.recorder import COVARIANCE_TOKENS, PERTURBED_SHARE, SAMPLE  # noqa: E402
from cumulant.observatory.record.rows import LayerRow, NullComparison, TokenStatistics  # noqa: E402
from cumulant.observatory.record.tables import Tables  # noqa: E402
from cumulant.observatory.report.directory import page_data, write_tables  # noqa: E402
from cumulant.observatory.runs.observe import EXCERPT_TOKENS  # noqa: E402
from cumulant.observatory.statistics import quantities  # noqa: E402
from cumulant.observatory.statistics.gaussianity import DIRECTIONS, NEIGHBOURS  # noqa: E402
from cumulant.observatory.statistics.heads import MAX_ROWS  # noqa: E402
from cumulant.observatory.statistics.quantities import BASES, ENDINGS, SECTIONS, TABLES, column_names  # noqa: E402
from cumulant.observatory.statistics.states import MAX_COVARIANCE_WIDTH, SAMPLE_SIZE  # noqa: E402
from tests.observatory.test_over_training import TEXT, make_run  # noqa: E402
from tests.observatory.tiny_models import inputs, make  # noqa: E402

pytestmark = pytest.mark.xdist_group("columns")


def invoke(*arguments) -> str:
    run = testing.CliRunner().invoke(application(), [*map(str, arguments)], env={"COLUMNS": "200"})
    assert run.exit_code == 0, run.output
    return run.output


@pytest.fixture(scope="module")
def with_a_sink():
    """Of a model that has learned a sink, which is one column more."""
    model = make("gptoss")
    with attach(model, ["sink_mass"], hidden_states=False) as recorder, torch.no_grad():
        model(**inputs("gptoss"))
    return Tables.of(recorder.record(weights=False))


@pytest.fixture(scope="module")
def with_next_tokens():
    """Of a model that sees the tokens that follow."""
    model = make("bert")
    with attach(model, ["next_mass"], hidden_states=False) as recorder, torch.no_grad():
        model(**inputs("bert"))
    return Tables.of(recorder.record(weights=False))


@pytest.fixture(scope="module")
def written(tmp_path_factory, with_a_sink, with_next_tokens):
    """Columns of the tables of a run with both nulls, of a series, and of models with a sink or with next tokens."""
    place = tmp_path_factory.mktemp("columns")
    run = make_run(place / "run", numbers=(1,))
    (place / "text.txt").write_text(TEXT)
    sizes = ("--text", place / "text.txt", "--max-tokens", "120", "--max-length", "24")
    invoke("observe", run / "step-000001", "--out", place / "one", *sizes)
    invoke("observe", "--checkpoints", run, "--out", place / "all", *sizes)
    for name, tables in (("sink", with_a_sink), ("next", with_next_tokens)):
        (place / name).mkdir()
        write_tables(tables, place / name, {"random": tables, "shuffled": tables})
    with_parts = json.dumps({"parts": [{"name": "prompt", "text": TEXT[:40]}, {"name": "answer", "text": TEXT[40:80]}]})
    (place / "text.jsonl").write_text(with_parts)
    invoke("observe", run / "step-000001", "--out", place / "parts", "--text", place / "text.jsonl", *sizes[2:])
    paths = [
        path for directory in ("one", "all", "sink", "next", "parts") for path in (place / directory).glob("*.parquet")
    ]
    tables = {table: [p for p in paths if p.stem == table] for table in TABLES}
    return {table: [pl.read_parquet(path) for path in found] for table, found in tables.items()}


def test_columns_of_a_record_are_in_the_list(tmp_path):
    """The quick half of the next test: no null, no series."""
    model = make("llama")
    with attach(model) as recorder, torch.no_grad():
        model(**inputs("llama", batch=4, length=20))
    write_tables(Tables.of(recorder.record()), tmp_path, {})
    for table in ("heads", "layers"):
        columns = pl.read_parquet(tmp_path / f"{table}.parquet").columns
        assert len(columns) > 90
        assert set(columns) <= set(column_names(table))


@pytest.mark.long
@pytest.mark.parametrize("table", TABLES)
def test_every_column_that_is_written_is_in_the_list_and_every_listed_one_is_written(written, table):
    columns = {column for frame in written[table] for column in frame.columns}
    assert columns == set(column_names(table))


@pytest.mark.long
def test_rows_of_a_series_name_quantities_of_the_list(written):
    names = {name for table in ("heads", "layers") for name in column_names(table)}
    series = set(written["series"][0]["quantity"])
    assert len(series) > 20
    assert series <= names


def test_no_column_twice():
    for table in TABLES:
        names = column_names(table)
        assert len(names) == len(set(names))


def test_endings_are_those_of_the_rows():
    assert {f"_{name}" for name in TokenStatistics._fields[1:]} == set(quantities.OVER_TOKENS)
    assert {f"_{name}" for name in NullComparison._fields[1:]} == set(quantities.GAUSSIAN_NULL)
    listed = [q.name for group in SECTIONS if group.table == "layers" for q in group.columns]
    assert set(listed) == set(LayerRow._fields)


def test_every_column_has_words_and_a_known_basis():
    for group in SECTIONS:
        for q in group.columns:
            assert q.words.endswith(".")
            assert q.label
            assert q.basis in BASES
    assert all(group.endings.keys() <= ENDINGS.keys() for group in SECTIONS)


def test_words_have_the_numbers_of_the_code():
    """Sizes of samples are constants elsewhere."""
    words = {
        "queries": (SAMPLE, MAX_ROWS),
        "received": (SAMPLE,),
        "sequences": (SAMPLED_TOKENS, COVARIANCE_TOKENS),
        "within": (SAMPLE_SIZE,),
        "perturbed": (round(1 / PERTURBED_SHARE),),
        "excerpts": (EXCERPTS, EXCERPT_TOKENS),
    }
    for basis, numbers in words.items():
        assert {str(n) for n in numbers} <= set(re.findall(r"\d+", BASES[basis].words)), basis
    by_name = {q.name: q.words for q in (*quantities.COVARIANCES, *quantities.DISTANCES)}
    for name, number in (("variance", MAX_COVARIANCE_WIDTH), ("sliced_w2", DIRECTIONS), ("lle_error", NEIGHBOURS)):
        assert f" {number} " in by_name[name]


def test_the_glossary_has_the_same_words(with_a_sink):
    listed = {q.name: q for group in SECTIONS for q in group.columns}
    entries = page_data(with_a_sink, {})["quantities"]
    assert {"sink_mass", "expansion"} <= {entry["name"] for entry in entries}
    for entry in entries:
        if entry["name"] not in ("expansion", "contraction"):
            q = listed[entry["name"]]
            assert (q.label, q.equation, q.words, q.unit) == tuple(
                entry[k] for k in ("label", "equation", "words", "unit")
            )


def test_the_command_prints_what_matches():
    whole = " ".join(invoke("columns").split())
    assert all(f"{table}.parquet" in whole for table in TABLES)
    assert "mean, or" not in whole
    heads = invoke("columns", "entropy", "--table", "heads")
    assert "H = −Σⱼ pⱼ log pⱼ" in heads
    assert "_null_shuffled" in heads
    assert "tokens.parquet" not in heads
    assert "Mardia" in invoke("columns", "kurt*_low")
    assert [group.table for group in select_columns("max_score_p95")] == ["heads"]


def test_looking_up_a_column_imports_no_torch():
    code = "import sys; from cumulant.observatory.columns_command import select_columns; select_columns('entropy')"
    command = [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.stdout.strip() == "False", run.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("entropi",), "PATTERN: expected a part of a column's name"), (("--table", "head"), "one of heads, layers")],
)
def test_what_is_in_no_table_gets_a_sentence(arguments, words):
    run = testing.CliRunner().invoke(application(), ["columns", *arguments])
    assert run.exit_code == 2
    assert words in " ".join(run.output.split())
