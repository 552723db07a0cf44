"""Tables and pages of any record: from `observe`, from `attach`, from a file."""

from dataclasses import replace

import pytest
import torch

hf = pytest.importorskip("transformers", reason="install cumulant[hf] to observe models")
polars = pytest.importorskip("polars", reason="install cumulant[report] to write tables")
from polars.testing import assert_frame_equal  # noqa: E402
from typer import testing  # noqa: E402

from cumulant import cli  # noqa: E402
from cumulant.nn import MultiheadAttention  # noqa: E402
from cumulant.observatory import Record, attach, load, observe, render  # noqa: E402
from cumulant.observatory.record.tables import Tables  # noqa: E402
from cumulant.observatory.report import directory  # noqa: E402
from cumulant.observatory.statistics.quantities import TOP_KEY_NAMES  # noqa: E402
from cumulant.observatory.text.corpus import Text  # noqa: E402
from tests.observatory.own_model import save_own_model  # noqa: E402
from tests.observatory.tiny_models import make  # noqa: E402


def attached(model: torch.nn.Module, **inputs: torch.Tensor) -> Record:
    with attach(model) as recorder, torch.no_grad():
        model(**inputs)
    return recorder.record()


@pytest.fixture(scope="module")
def record() -> Record:
    tokens = torch.randint(0, 50, (3, 24), generator=torch.Generator().manual_seed(0))
    return attached(make("llama"), input_ids=tokens)


def test_a_record_of_attach_has_the_numbers_of_its_weights(record):
    heads = record.heads()
    assert heads.shape[0] == 8
    assert heads["gradientness"].null_count() == 0
    assert heads["gradientness"].is_between(-1, 1).all()
    assert record.meta.dimension == 24


def test_tables_are_those_of_the_files(record, tmp_path):
    page = render(record, tmp_path / "out")
    assert page == tmp_path / "out" / "report.html"
    assert_frame_equal(record.heads(), polars.read_parquet(tmp_path / "out" / "heads.parquet"))
    assert_frame_equal(record.layers(), polars.read_parquet(tmp_path / "out" / "layers.parquet"))
    assert_frame_equal(record.tokens(), polars.read_parquet(tmp_path / "out" / "tokens.parquet"))
    assert record.heads()["entropy"].to_list() == record.tally("entropy").mean.tolist()
    names = ["excerpt", "text", "position", "token", "layer", "head", "entropy", "log_normalizer", *TOP_KEY_NAMES]
    assert record.tokens().columns == names


def test_keys_that_a_token_does_not_see_are_not_listed(tmp_path):
    """The first token of a causal model sees itself alone, the second two keys."""
    save_own_model(tmp_path / "model")
    loaded = load(tmp_path / "model")
    tokens = observe(loaded, [Text(0, "arm", "an arm and a leg")], max_tokens=16).tokens()
    seen = {0: 1, 1: 2, 2: 3, 9: 3}
    for position, count in seen.items():
        rows = tokens.filter(position=position)
        assert rows.height == 8
        for i in (1, 2, 3):
            for name in (f"key_{i}", f"key_{i}_mass"):
                assert rows[name].null_count() == (0 if i <= count else 8), (position, name)
    assert tokens["key_2_mass"].is_nan().sum() == 0


def test_nulls_are_columns_beside(record):
    heads = record.heads({"random": record})
    assert heads["entropy_null_random"].to_list() == heads["entropy"].to_list()


def test_pandas_has_the_same_numbers(record):
    pytest.importorskip("pandas", reason="pip install pandas")
    for name in ("heads", "layers", "tokens"):
        ours, theirs = getattr(record, name)(), getattr(record, name)(library="pandas")
        assert type(theirs).__module__.startswith("pandas")
        assert list(theirs.columns) == ours.columns
        assert len(theirs) == ours.height
    assert record.heads(library="pandas")["entropy"].tolist() == record.heads()["entropy"].to_list()
    with pytest.raises(ValueError, match=r"Record.library: expected 'polars' or 'pandas', got 'arrow'. Choose"):
        record.heads(library="arrow")


def test_a_record_of_one_module_leads_to_a_page_and_to_every_command(tmp_path):
    torch.manual_seed(0)
    layer, x = MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(4, 40, 8)
    record = attached(layer, query=x, key=x, value=x)
    record.save(tmp_path / "saved")
    render(record, tmp_path / "rendered", nulls={"random": record})
    for words in (["report", "saved"], ["report", "rendered"], ["compare", "saved", "rendered"]):
        found = testing.CliRunner().invoke(cli.application(), [words[0], *(str(tmp_path / w) for w in words[1:])])
        assert found.exit_code == 0, found.output
    assert "MultiheadAttention" in (tmp_path / "saved" / "report.html").read_text()
    assert (tmp_path / "rendered" / "null-random" / "record.json").is_file()
    assert Record.load(tmp_path / "saved").layers().columns == record.layers().columns


def test_a_record_of_few_tokens_says_so_on_its_page_and_in_the_terminal(record, tmp_path):
    page = render(record, tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert "only 72 tokens were read: take no verdict from them" in page.read_text()
    record.save(tmp_path / "out")
    found = testing.CliRunner().invoke(cli.application(), ["report", str(tmp_path / "out")], env={"COLUMNS": "200"})
    assert "only 72 tokens were read" in found.output


def test_render_refuses_what_is_neither_a_directory_nor_a_page(record, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"render.path: expected a directory or a page, got the file .*notes.txt"):
        render(record, tmp_path / "notes.txt")
    (tmp_path / "heads.parquet").write_text("mine")
    with pytest.raises(ValueError, match="which cumulant did not write"):
        render(record, tmp_path)
    with pytest.raises(ValueError, match=r"render.nulls: expected random or shuffled, got 'zero'"):
        render(record, tmp_path / "new", nulls={"zero": record})
    assert not (tmp_path / "new").exists()


def test_verdicts_are_stored_beside_the_tables_and_read_while_they_are_true(record, tmp_path, monkeypatch):
    render(record, tmp_path / "out", nulls={"random": record})
    fresh = directory.answers(Tables.of(record), {"random": Tables.of(record)})
    monkeypatch.setattr(directory, "answers", None)  # not computed again
    assert directory.read_answers(tmp_path / "out", record) == fresh
    monkeypatch.undo()
    changed = replace(record, meta=replace(record.meta, text="another"))
    changed.save(tmp_path / "out")
    monkeypatch.setattr(directory, "answers", lambda *_: ["computed"])
    assert directory.read_answers(tmp_path / "out", changed) == ["computed"]
    (tmp_path / "out" / "heads.parquet").unlink()
    assert directory.read_answers(tmp_path / "out", record) == ["computed"]


# ---------------------------------------------------------------------- --prompt


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from tests.generated.observed import save_model

    place = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    save_model(place)
    return place


def observed(*words):
    found = testing.CliRunner().invoke(
        cli.application(), ["observe", *map(str, words), "--max-length", "32"], env={"COLUMNS": "400"}
    )
    return found.exit_code, " ".join(found.output.split())


def test_a_passage_is_read_from_the_command_line(tiny, tmp_path):
    passage = "the mean of the law is the norm of the head"
    code, said = observed(tiny, "--prompt", passage, "--prompt", "and more", "--out", tmp_path / "out")
    assert code == 0, said
    assert f"tokens of “{passage[:40]}…”, “and more” in 3 windows" in said
    record = Record.load(tmp_path / "out")
    assert [excerpt.name for excerpt in record.excerpts] == ["prompt", "prompt 2"]
    assert record.meta.tokens >= len(passage)  # a tokenizer of bytes
    assert (tmp_path / "out" / "null-random").is_dir()
    assert record.tokens()["token"].n_unique() > 5


def test_a_text_that_is_no_file_says_so_and_names_prompt(tiny, tmp_path):
    for passage in ("to be or not to be", "word " * 400):
        code, said = observed(tiny, "--text", passage, "--out", tmp_path / "out")
        assert code == 2
        assert "--text: expected a file or directory, got no such path '" in said
        assert 'Give the path of a file or directory, or a passage itself as --prompt "…".' in said
        assert len(said) < 300
    assert not (tmp_path / "out").exists()


def test_a_prompt_is_text_and_stands_alone(tiny, tmp_path):
    assert observed(tiny, "--prompt", " ", "--out", tmp_path / "out")[1].endswith(
        "--prompt: expected text, got an empty passage. Give some words."
    )
    code, said = observed(tiny, "--prompt", "words", "--text", "a.txt", "--out", tmp_path / "out")
    assert code == 2
    assert said.endswith("--prompt: expected no --text beside it, got both. Leave one of them out.")
