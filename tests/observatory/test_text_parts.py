"""Named parts of texts: how documents give them, what heads give to them beside eager weights, tables, page."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

hf = pytest.importorskip("transformers", reason="install cumulant[hf] to observe models")
tokenizers = pytest.importorskip("tokenizers")

from cumulant.nn import AttentionCall, Support  # noqa: E402
from cumulant.observatory import Record, observe, render  # noqa: E402
from cumulant.observatory.record.consistency import inconsistency  # noqa: E402
from cumulant.observatory.record.tables import PART_COLUMNS  # noqa: E402
from cumulant.observatory.statistics.quantities import column_names  # noqa: E402
from cumulant.observatory.statistics.text_parts import TokenParts, part_sums  # noqa: E402
from cumulant.observatory.text.corpus import Text, hash_of, plan  # noqa: E402
from cumulant.observatory.text.parts import MAX_NAMES, TextPart  # noqa: E402
from cumulant.observatory.text.windows import batches  # noqa: E402
from tests.observatory.test_targets import SUPPORTS, B, D, H, N, eager_weights, normal, table  # noqa: E402
from tests.observatory.tiny_models import transformer  # noqa: E402

WORDS = [*"abcdefghij"]
CHAT = [
    {"name": "prompt", "text": "a b c d "},
    {"name": "answer", "text": "e f a b "},
    {"name": "prompt", "text": "c a"},
]
SHORT = {"text": "a b c d e", "parts": [{"name": "answer", "start": 4, "end": 9}]}


def words_tokenizer():
    vocabulary = {word: 3 + i for i, word in enumerate(WORDS)} | {"<pad>": 0, "<start>": 1}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "a"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<start> $A", special_tokens=[("<start>", 1)]
    )
    return hf.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", bos_token="<start>")


def model_of(kind: str):
    return transformer(kind, heads=4, key_heads=2 if kind == "llama" else 4, head_dim=4, layers=2, seed=0)


def lines(path, *rows: dict):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("heads", [H, 2])
@pytest.mark.parametrize("name", SUPPORTS)
def test_masses_and_chances_are_sums_over_the_weights(name, heads):
    eta, key = normal(B, H, N, D), normal(B, heads, N, D)
    parts = torch.randint(-1, 3, (B, N), generator=torch.Generator().manual_seed(1))
    rows = torch.arange(N) < torch.tensor([[N], [N - 9], [3]])
    call = AttentionCall(torch.nn.Identity(), eta, key, key, SUPPORTS[name], eta, rows=rows)
    found = part_sums(call, TokenParts(parts, 3))
    weights, visible = table(call)
    query = rows.numpy()[:, None] & visible.any(-1)
    for part in range(3):
        keys = visible & (parts.numpy() == part)[:, None, None]
        here = query & keys.any(-1)
        chance = keys.sum(-1) / np.maximum(visible.sum(-1), 1)
        for source in range(-1, 3):
            own = here & (parts.numpy() == source)[:, None]
            expected = (np.where(keys, weights, 0).sum(-1), chance, np.ones_like(chance))
            for sums, value in zip(found.values(), expected, strict=True):
                whole = np.where(own, value, 0).sum((0, 2))
                np.testing.assert_allclose(sums[:, source + 1, part], whole, atol=1e-11)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_record_has_the_masses_of_eager_weights(kind):
    tokenizer, model, other = words_tokenizer(), model_of(kind), model_of(kind)
    record = observe(model, [{"parts": CHAT}, SHORT], tokenizer=tokenizer, weights=False)
    assert record.meta.parts == ("answer", "prompt")
    assert inconsistency(record) is None
    (batch,) = batches([{"parts": CHAT}, SHORT], tokenizer, max_length=256, batch_size=16)
    assert batch.part_names == ("prompt", "answer")
    assert batch.parts.tolist() == [[-1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0], [-1, -1, -1, 1, 1, 1, *[-1] * 5]]
    with eager_weights(other) as calls, torch.no_grad():
        other(**batch.inputs())
    rows = record.parts().rows(named=True)
    assert len(rows) >= 2 * 4 * 5
    tokens = batch.attention_mask.bool().numpy()
    for row in rows:
        _, weights, visible = calls[row["layer"]]
        weights, visible = weights[:, row["head"]], visible[:, row["head"]]
        keys = visible & (batch.parts == batch.part_names.index(row["part"])).numpy()[:, None]
        source = np.ones_like(tokens)
        if row["source"] is not None:
            source = (batch.parts == batch.part_names.index(row["source"])).numpy()
        here = tokens & source & keys.any(-1)
        assert row["queries"] == here.sum()
        assert abs(row["mass"] - np.where(keys, weights, 0).sum(-1)[here].mean()) < 1e-6
        assert abs(row["chance"] - (keys.sum(-1) / visible.sum(-1))[here].mean()) < 1e-6


def test_records_add_whatever_their_names_and_are_read_back(tmp_path):
    tokenizer, model = words_tokenizer(), model_of("llama")
    third = {"parts": [{"name": "system", "text": "a b "}, {"name": "answer", "text": "c a"}]}
    texts = [{"parts": CHAT}, SHORT, third, "a b c a"]
    whole = observe(model, texts, tokenizer=tokenizer, weights=False)
    parts = [observe(model, [text], tokenizer=tokenizer, weights=False) for text in texts]
    for order in ((0, 1, 2, 3), (3, 2, 1, 0)):
        merged = parts[order[0]]
        for index in order[1:]:
            merged = merged.merge(parts[index])
        assert merged.meta.parts == whole.meta.parts == ("answer", "prompt", "system")
        for key, value in whole.sums.items():
            if "/parts/" in key:
                torch.testing.assert_close(merged.sums[key], value, rtol=1e-5, atol=1e-6)
    whole.save(tmp_path / "one")
    assert Record.load(tmp_path / "one").parts().equals(whole.parts())
    assert parts[3].parts().height == 0
    assert not any("/parts/" in key for key in parts[3].sums)


def test_both_kinds_of_parts_are_read_from_files(tmp_path):
    spans = [{"name": "prompt", "start": 0, "end": 8}, {"name": "answer", "start": 8, "end": 16}]
    spans += [{"name": "prompt", "start": 16, "end": 19}]
    body = "".join(part["text"] for part in CHAT)
    joined = lines(tmp_path / "joined.jsonl", {"id": "x", "source": "y", "parts": CHAT})
    given = lines(tmp_path / "given.jsonl", {"text": body, "parts": spans[::-1]}, {"text": "a b", "parts": 3})
    (one,), (other, unrelated) = list(plan(joined).texts()), list(plan(given).texts())
    assert one.body == other.body == body
    assert one.parts == other.parts == (TextPart("prompt", 0, 8), TextPart("answer", 8, 16), TextPart("prompt", 16, 19))
    assert unrelated.parts == ()
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for name, row in (("joined", {"parts": CHAT}), ("given", {"text": body, "parts": spans})):
        parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / f"{name}.parquet")
        (text,) = plan(tmp_path / f"{name}.parquet").texts()
        assert (text.body, text.parts) == (one.body, one.parts)


def test_a_change_of_parts_changes_the_hash_of_the_text(tmp_path):
    path = lines(tmp_path / "a.jsonl", {"text": "a b c"})
    plain = hash_of(plan(path).shards[0])
    lines(path, {"text": "a b c", "parts": [{"name": "prompt", "start": 0, "end": 1}]})
    assert hash_of(plan(path).shards[0]) != plain


BAD = {
    "overlap at 3": [{"name": "x", "start": 0, "end": 4}, {"name": "y", "start": 3, "end": 5}],
    "from 0 to 10 of 9 characters": [{"name": "x", "start": 0, "end": 10}],
    "without whole numbers": [{"name": "x", "start": "0", "end": 2}],
    "a name of a part of int": [{"name": 7, "start": 0, "end": 2}],
    "a name of a part of 65 characters": [{"name": "x" * 65, "start": 0, "end": 2}],
    "int as the text of a part": [{"name": "x", "text": 5}],
}


@pytest.mark.parametrize("words", BAD)
def test_bad_parts_are_refused_in_a_sentence(words, tmp_path):
    row = {"text": "a b c d e", "parts": BAD[words]}
    with pytest.raises(ValueError, match=rf"batches\.texts: expected parts with a name .* got .*{words}"):
        list(batches([row], words_tokenizer(), max_length=16, batch_size=2))
    path = lines(tmp_path / "bad.jsonl", row, {"text": "a b"})
    unreadable: list = []
    assert [text.body for text in plan(path).texts(unreadable)] == ["a b"]
    assert words in unreadable[0].reason
    lines(path, row)
    with pytest.raises(ValueError, match=words):
        plan(path)


def test_other_values_too_many_names_and_slow_tokenizers_are_refused():
    tokenizer, parts = words_tokenizer(), [{"name": str(i), "text": "a "} for i in range(MAX_NAMES + 1)]
    with pytest.raises(ValueError, match=r"batches\.texts: expected at most 16 names of parts, got also"):
        list(batches([{"parts": parts}], tokenizer, max_length=64, batch_size=2))
    with pytest.raises(ValueError, match="got others"):
        list(batches([{"text": "a", "parts": ["prompt"]}], tokenizer, max_length=64, batch_size=2))
    text = Text(0, "", "a b c", parts=(TextPart("x", 0, 3), TextPart("y", 2, 4)))
    with pytest.raises(ValueError, match="overlap"):
        list(batches([text], tokenizer, max_length=64, batch_size=2))

    class Slow:
        is_fast, pad_token_id, all_special_ids = False, 0, ()

        def __call__(self, text, **_):
            return {"input_ids": [3] * len(text.split())}

    with pytest.raises(ValueError, match=r"batches\.tokenizer: expected a fast one"):
        list(batches([SHORT], Slow(), max_length=64, batch_size=2))


def test_tables_and_page_have_them_and_names_are_text(tmp_path):
    hostile = "</script><img src=x onerror=alert(1)>\u202e"
    parts = [{"name": hostile, "text": "a b c d "}, {"name": "answer", "text": "e f a b"}]
    record = observe(model_of("llama"), [{"parts": parts}], tokenizer=words_tokenizer())
    page = render(record, tmp_path / "looks", {"random": record, "shuffled": record})
    import polars

    frame = polars.read_parquet(tmp_path / "looks" / "parts.parquet")
    assert frame.columns == list(PART_COLUMNS) == column_names("parts")
    assert frame.equals(record.parts({"random": record, "shuffled": record}))
    assert frame["mass"].equals(frame["mass_null_random"], check_names=False)
    assert hostile in set(frame["part"])
    html = page.read_text()
    assert "onerror" not in html.split('id="data"')[0]
    plain = observe(model_of("llama"), ["a b c a"], tokenizer=words_tokenizer())
    render(plain, tmp_path / "plain")
    assert not (tmp_path / "plain" / "parts.parquet").exists()


def test_a_causal_query_does_not_see_the_parts_ahead():
    call = AttentionCall(
        torch.nn.Identity(), *[torch.zeros(1, 1, 3, 2)] * 3, Support(causal=True), torch.zeros(1, 1, 3, 2)
    )
    sums = part_sums(call, TokenParts(torch.tensor([[0, 1, -1]]), 2))
    assert sums["parts/count"][0].tolist() == [[1, 1], [1, 0], [1, 1]]
