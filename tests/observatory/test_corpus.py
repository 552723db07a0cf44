"""A corpus is the same however it is cut into shards; what cannot be read is skipped, counted and named."""

import gzip
import hashlib
import io
import itertools
import json
import os
import sys
from pydoc_data.topics import topics

import pytest

pytest.importorskip("transformers")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cumulant.observatory.text import corpus as module
from cumulant.observatory.text import documents, files
from cumulant.observatory.text.corpus import (
    Corpus,
    FileRange,
    Shard,
    Text,
    UnreadableDocument,
    hash_of,
    plan,
    read_texts,
    texts_of,
)
from cumulant.observatory.text.windows import batches

SIZES = (1, 2, 7, 63, 64, 65, 100, 1000, 1 << 20, None)
MARK = b"\xef\xbb\xbf"
brief = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def part(monkeypatch):
    """Parts of 64 bytes, whose borders move by up to 16."""
    for where in (module, documents):
        monkeypatch.setattr(where, "PART_BYTES", 64)
    monkeypatch.setattr(documents, "SLACK", 4)
    return 64


def all_of(corpus: Corpus) -> tuple[list[Text], list[UnreadableDocument]]:
    unreadable: list[UnreadableDocument] = []
    return list(corpus.texts(unreadable)), unreadable


def bodies(corpus: Corpus) -> list[str]:
    return [text.body for text in all_of(corpus)[0]]


def lines_of(*documents: object) -> bytes:
    return b"".join(json.dumps(document).encode() + b"\n" for document in documents)


def parquet(path, columns: dict, group: int = 3):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(pyarrow.table(columns), path, row_group_size=group)
    return path


@pytest.fixture
def mixed(tmp_path):
    """Every kind of file, good and bad documents, and the texts and unreadable ones by hand."""
    (tmp_path / "a.txt").write_bytes("été ".encode() * 40)
    (tmp_path / "b.jsonl").write_bytes(lines_of(*[{"text": f"line {i}" * i, "id": i} for i in range(9)]) + b"no\n")
    (tmp_path / "c.ndjson.gz").write_bytes(gzip.compress(lines_of({"text": "packed"}, {"text": None}, {"text": "too"})))
    parquet(tmp_path / "d.parquet", {"n": list(range(8)), "text": ["zero", None, *[f"row {i}" for i in range(2, 8)]]})
    (tmp_path / "e.py").write_bytes(b"x" * 70 + b"\xff" + b"y" * 70)
    good = [f"line {i}" * i for i in range(9)] + ["packed", "too", "zero"] + [f"row {i}" for i in range(2, 8)]
    return tmp_path, good


def test_the_topics_are_the_corpus_of_nothing():
    corpus = plan()
    texts, unreadable = all_of(corpus)
    assert [(text.name, text.body) for text in texts] == [(text.name, text.body) for text in read_texts()]
    assert [text.index for text in texts] == [number << 40 for number in range(len(topics))]
    assert corpus.files == tuple((f"topics/{name}", len(topics[name].encode())) for name in sorted(topics))
    assert not unreadable
    assert len(corpus.shards) > 10
    assert all(len(shard.ranges) == 1 or shard.size <= 1 << 15 for shard in corpus.shards)


def test_texts_do_not_depend_on_shards(part, mixed):
    directory, good = mixed
    expected = all_of(plan(directory, shard_bytes=1 << 30))
    assert [text.body for text in expected[0] if text.name.rpartition("/")[2][0] in "bcd"] == good
    assert "".join(text.body for text in expected[0] if "a.txt" in text.name) == "été " * 40
    assert [(os.path.basename(name), why) for name, why in expected[1]] == [
        (f"b.jsonl:{(directory / 'b.jsonl').read_bytes().index(b'no')}", "no JSON object"),
        (f"c.ndjson.gz:{len(lines_of({'text': 'packed'}))}", "null in column 'text'"),
        ("d.parquet:1", "null in column 'text'"),
        ("e.py:64", "bytes that are not UTF-8"),
    ]
    assert len({text.index for text in expected[0]}) == len(expected[0])
    assert [text.index for text in expected[0]] == sorted(text.index for text in expected[0])
    for size in SIZES:
        corpus = plan(directory, shard_bytes=size)
        assert all_of(corpus) == expected
        assert [shard.ordinal for shard in corpus.shards] == list(range(len(corpus.shards)))
        assert not any(text.more or text.start for text in corpus.texts())
    assert len(plan(directory, shard_bytes=64).shards) > 10
    assert len(plan(directory, shard_bytes=1 << 30).shards) == 1


def test_windows_do_not_depend_on_shards(part, mixed):
    class Letters:
        model_max_length = 100

        def __call__(self, text, add_special_tokens=True, verbose=True):
            return {"input_ids": list(text.encode())}

    def windows(corpus):
        found = batches(corpus.texts(), Letters(), max_length=10, batch_size=2)
        rows = [zip(b.text_index.tolist(), b.offset.tolist(), b.input_ids.tolist(), strict=True) for b in found]
        return sorted(itertools.chain(*rows))

    expected = windows(plan(mixed[0], shard_bytes=1 << 30))
    assert expected[-1][0] > 4 << 40  # such numbers pass through tensors
    assert all(windows(plan(mixed[0], shard_bytes=size)) == expected for size in (1, 100))


@pytest.mark.parametrize(
    "unit", ["🙂", "中", "é", "\r\n", "\r", "ab ", "ab\r\n", "abcdefghijklmnopqrst ", "é\n\n", "x"]
)
def test_characters_and_ends_of_lines_are_whole_wherever_borders_are(part, tmp_path, unit):
    path = tmp_path / "long.txt"
    for shift in range(24):
        path.write_bytes(("." * shift + unit * 60).encode())
        texts, unreadable = all_of(plan(path))
        assert "".join(text.body for text in texts) == path.read_text()
        assert not unreadable


@brief
@given(
    st.text(st.sampled_from("ab \t\r\né中🙂\u0301"), min_size=150, max_size=300),
    st.booleans(),
    st.sampled_from([1, 64, 200]),
)
def test_parts_join_to_the_file(part, tmp_path, body, marked, size):
    path = tmp_path / "long.txt"
    path.write_bytes(MARK * marked + ("x" + body).encode())
    corpus = plan(path, shard_bytes=size)
    texts, unreadable = all_of(corpus)
    with path.open(encoding="utf-8-sig") as stream:
        assert "".join(text.body for text in texts) == stream.read()
    assert not unreadable
    assert all(text.body and text.index % 64 == 0 for text in texts)
    assert texts[0].name == str(path)
    assert all(text.name == f"{path}:{text.index}" for text in texts[1:])
    assert all(len(text.body.encode()) <= 64 + 16 + 3 for text in texts)


@brief
@given(
    st.lists(st.one_of(st.none(), st.text(max_size=30), st.sampled_from(["\r", "\u2028", "{", "é" * 50])), min_size=1),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([5, 10, 64]),
)
def test_lines_come_once_wherever_borders_are(tmp_path, documents, end, ended, marked, size):
    documents = [*(text if text is None else text.replace("\0", "") for text in documents), "last"]
    lines = ["" if text is None else json.dumps({"text": text}, ensure_ascii=False) for text in documents]
    path = tmp_path / "lines.jsonl"
    raw = MARK * marked + (end.join(lines) + end * ended).encode()
    path.write_bytes(raw)
    texts, unreadable = all_of(plan(path, shard_bytes=size))
    assert [text.body for text in texts] == [text for text in documents if text is not None]  # empty lines are nothing
    assert not unreadable
    for text in texts:  # every document is where its index says
        place = text.index & (1 << 40) - 1
        line = raw[place:].removeprefix(MARK if place == 0 else b"").split(b"\n")[0]
        assert json.loads(line)["text"] == text.body
        assert text.name == f"{path}:{place}"


def test_rows_come_once_and_know_their_number(tmp_path):
    path = parquet(tmp_path / "rows.parquet", {"text": [f"row {i}" for i in range(10)], "n": [*range(10)]}, group=3)
    for size in (1, path.stat().st_size // 2, 1 << 20):
        texts, unreadable = all_of(plan(path, shard_bytes=size))
        assert [(text.index, text.name, text.body) for text in texts] == [
            (i, f"{path}:{i}", f"row {i}") for i in range(10)
        ]
        assert not unreadable
    assert [(shard.ranges[0].start, shard.ranges[0].stop) for shard in plan(path, shard_bytes=1).shards] == [
        (0, 1),
        (1, 2),
        (2, 3),
        (3, 4),
    ]


def test_small_files_are_grouped_and_long_ones_are_cut_at_parts(part, tmp_path):
    for name, size in (("a", 10), ("b", 20), ("c", 300), ("d", 5)):
        (tmp_path / f"{name}.txt").write_bytes(b"x" * size)
    corpus = plan(tmp_path, shard_bytes=130)
    found = [[(p.number, p.start, p.stop) for p in shard.ranges] for shard in corpus.shards]
    assert found == [[(0, 0, 10), (1, 0, 20)], [(2, 0, 128)], [(2, 128, 256)], [(2, 256, 300), (3, 0, 5)]]
    assert [shard.size for shard in corpus.shards] == [30, 128, 128, 49]
    assert corpus.files == tuple((str(tmp_path / f"{n}.txt"), s) for n, s in zip("abcd", (10, 20, 300, 5), strict=True))
    assert [len(text.body) for text in corpus.texts()] == [10, 20, 64, 64, 64, 64, 44, 5]


def test_shards_are_a_256th_of_the_corpus_or_32_kib(tmp_path):
    for number in range(8):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * (1 << 14))
    assert [len(shard.ranges) for shard in plan(tmp_path).shards] == [2, 2, 2, 2]
    with (tmp_path / "long.jsonl").open("wb") as stream:
        stream.write(b'{"text": "a"}\n' + b" " * (1 << 25))
    assert {shard.size for shard in plan(tmp_path / "long.jsonl").shards[:-1]} == {((1 << 25) + 14) // 256}


def test_small_files_are_read_as_they_are_without_shards(tmp_path):
    (tmp_path / "a.txt").write_bytes(MARK + b"one\r\ntwo\rthree\n")
    (tmp_path / "b.md").write_text("é")
    assert bodies(plan(tmp_path)) == [text.body for text in read_texts(tmp_path)] == ["one\ntwo\nthree\n", "é"]


def test_words_are_not_cut_where_they_are_short(part, tmp_path):
    (tmp_path / "words.txt").write_text("seven7 " * 50)
    (tmp_path / "ends.txt").write_text("a" * 64)
    texts = bodies(plan(tmp_path))
    assert texts[0] == "a" * 64
    assert len(texts) == 7
    assert all(word == "seven7" for text in texts[1:] for word in text.strip().split(" "))


def test_a_directory_gives_its_documents_and_not_its_pictures(tmp_path):
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.JSONL").write_bytes(lines_of({"text": "a"}))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    (tmp_path / "empty.py").touch()
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.py").write_text("c")
    (tmp_path / "odd.xyz").write_text("named")
    assert bodies(plan([tmp_path, str(tmp_path / "odd.xyz")])) == ["a", "b", "c", "named"]
    texts = list(plan([tmp_path / "b.txt", tmp_path / "b.txt"]).texts())
    assert [text.index >> 40 for text in texts] == [0, 1]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"[1, 2]", "no JSON object"),
        (b'{"text": "a"', "no JSON object"),
        (b'{"text": ' + b"9" * 5000 + b"}", "no JSON object"),
        (b"[" * 100_000, "no JSON object"),
        (b'{"text": "caf\xe9"}', "bytes that are not UTF-8"),
        (b'{"text": "a\0"}', "zero bytes"),
        (b'{"text": "a\\u0000"}', "zero bytes"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b'{"other": "a"}', "no column 'text'"),
        (b'{"text": null}', "null in column 'text'"),
        (b'{"text": 5}', "number in column 'text'"),
        (b'{"text": true}', "boolean in column 'text'"),
        (b'{"text": ["a"]}', "array in column 'text'"),
        (b'{"text": {"a": "b"}}', "object in column 'text'"),
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_a_poisoned_line_is_skipped_and_named(tmp_path, line, why, first):
    good = lines_of({"text": "good"}, {"text": ""})
    path = tmp_path / "some.jsonl"
    path.write_bytes(line + b"\n" + good if first else good + line + b"\n")
    texts, unreadable = all_of(plan(path))
    assert [text.body for text in texts] == ["good", ""]  # an empty document is a document
    assert unreadable == [(f"{path}:{0 if first else len(good)}", why)]
    assert list(plan(path).texts()) == texts  # without a list it is skipped all the same


def test_mixed_encodings_spoil_the_part_they_are_in(part, tmp_path):
    path = tmp_path / "mixed.txt"
    path.write_bytes(b"a" * 64 + b"caf\xe9" + b"b" * 60 + b"c" * 64 + b"\0" + b"d" * 10)
    texts, unreadable = all_of(plan(path))
    assert [text.body for text in texts] == ["a" * 64, "c" * 64]
    assert unreadable == [(f"{path}:64", "bytes that are not UTF-8"), (f"{path}:192", "zero bytes")]
    (tmp_path / "utf16.txt").write_text("wide", encoding="utf-16")
    texts, unreadable = all_of(plan(tmp_path))
    assert len(texts) == 2
    assert unreadable[-1] == (str(tmp_path / "utf16.txt"), "zero bytes")


def test_rows_that_are_no_text_are_skipped(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    raw = pyarrow.array([b"good", b"caf\xe9", b"zero\0", b"", None, b"end"]).view(pyarrow.string())
    path = parquet(tmp_path / "bad.parquet", {"text": raw}, group=2)
    texts, unreadable = all_of(plan(path))
    assert [(text.index, text.body) for text in texts] == [(0, "good"), (3, ""), (5, "end")]
    whys = ["bytes that are not UTF-8", "zero bytes", "null in column 'text'"]
    assert unreadable == [(f"{path}:{row}", why) for row, why in zip((1, 2, 4), whys, strict=True)]


def test_data_that_break_off_are_unreadable_from_there(tmp_path):
    packed = gzip.compress(lines_of(*[{"text": os.urandom(40).hex()} for _ in range(500)]))
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    path = parquet(tmp_path / "b.parquet", {"text": [os.urandom(40).hex() for _ in range(300)]}, group=100)
    (tmp_path / "c.parquet").write_bytes(b"PAR1 and nothing else")
    raw = bytearray(path.read_bytes())
    raw[4:1000] = bytes(996)  # the first row group
    path.write_bytes(raw)
    texts, unreadable = all_of(plan(tmp_path))
    assert 0 < sum("a.jsonl.gz" in text.name for text in texts) < 500
    assert [text.index & (1 << 40) - 1 for text in texts if "b.parquet" in text.name] == list(range(100, 300))
    reason = "data that cannot be decoded"
    names = [(os.path.basename(name).split(":")[0], why) for name, why in unreadable]
    assert names == [("a.jsonl.gz", reason), ("b.parquet", reason), ("c.parquet", "no Parquet file")]
    assert unreadable[1].name == f"{path}:0"


def test_a_lost_connection_is_an_error_and_no_unreadable_document(tmp_path, monkeypatch):
    # larger than what pyarrow reads for the footer
    path = parquet(tmp_path / "far.parquet", {"text": [os.urandom(40).hex() for _ in range(3000)]}, group=1000)
    (shard,) = plan(path, shard_bytes=1 << 20).shards

    class Cut(io.BytesIO):
        def read(self, size=-1):
            if self.tell() < 1000:
                raise ConnectionResetError("gone")
            return super().read(size)

    monkeypatch.setattr(documents, "open_file", lambda _: Cut(path.read_bytes()))
    with pytest.raises(ConnectionResetError, match="gone"):
        list(texts_of(shard))


def test_a_named_file_without_a_document_is_refused(tmp_path, part):
    for name, body, message in (
        ("bad.txt", b"caf\xe9", "expected UTF-8 text, got bytes that are not UTF-8"),
        ("bad.txt", b"zero\0byte" * 20, "expected UTF-8 text, got zero bytes"),
        ("bad.txt", b"", "expected text, got nothing"),
        ("bad.txt", MARK, "expected text, got nothing"),
        ("bad.jsonl", b"\n \n", "expected text, got nothing"),
        ("bad.jsonl", b"plain words\n", "expected lines of JSON with text, got no JSON object"),
        ("bad.jsonl", b'{"text": "\\ud800"}', "expected lines of JSON with text, got half of a surrogate pair"),
        ("bad.jsonl.gz", b"not packed", "expected lines of JSON with text, got data that cannot be decoded"),
        ("bad.parquet", b"not this", "expected rows of text, got no Parquet file"),
    ):
        path = tmp_path / name
        path.write_bytes(body)
        with pytest.raises(ValueError, match=rf"plan.sources: {message} in .*{name}. Leave the file out"):
            plan(path)
        path.unlink()


def test_a_named_parquet_file_without_rows_is_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import ParquetWriter

    path = parquet(tmp_path / "none.parquet", {"text": pyarrow.array([], pyarrow.string())})
    with pytest.raises(ValueError, match=r"plan.sources: expected text, got nothing in .*none.parquet"):
        plan(path)
    ParquetWriter(path, pyarrow.schema({"text": pyarrow.string()})).close()
    with pytest.raises(ValueError, match=r"plan.sources: expected text, got nothing in 1 files"):
        plan(tmp_path)


def test_the_column_of_text(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "a.jsonl"
    for first, column, expected in (
        ({"n": 1, "prose": "a"}, None, "a"),  # the only one
        ({"id": "x", "document": "d", "content": "c"}, None, "c"),  # by its name
        ({"id": "x", "text": "t"}, "id", "x"),  # named
        ({"text": "t", "n": None}, None, "t"),
    ):
        path.write_bytes(lines_of(first))
        assert bodies(plan(path, column=column)) == [expected]
        if "n" not in first:
            assert bodies(plan(parquet(tmp_path / "a.parquet", {k: [v] for k, v in first.items()}), column=column)) == [
                expected
            ]
    path.write_bytes(lines_of({"prose": None, "id": "x"}, {"prose": "a", "id": "y"}))
    assert bodies(plan(path, column="prose", shard_bytes=1)) == ["a"]
    path.write_bytes(lines_of(*[{"prose": None, "id": "x"}] * 64, {"prose": "late", "id": "y"}))
    assert bodies(plan(path, column="prose")) == ["late"]
    codes = pyarrow.array(["a", "b", "a"]).dictionary_encode()
    for strings in (codes, pyarrow.array(["a", "b", "a"], pyarrow.large_string())):
        assert bodies(plan(parquet(tmp_path / "b.parquet", {"n": [1, 2, 3], "t": strings}))) == ["a", "b", "a"]
    assert bodies(plan(parquet(tmp_path / "c.parquet", {"a.b": ["dot"], "a": [1]}))) == ["dot"]


def test_a_corpus_without_a_column_of_text_is_refused(tmp_path):
    path = parquet(tmp_path / "numbers.parquet", {"a": [1], "b": [0.5]})
    expected = (
        r"plan.column: expected a column of text, got columns a \(int64\), b \(double\) in .*numbers.parquet. Name"
    )
    for source in (path, tmp_path):
        with pytest.raises(ValueError, match=expected):
            plan(source)
    path.unlink()
    (tmp_path / "two.jsonl").write_bytes(lines_of({"a": "x", "b": "y", "c": 1}, {"c": [1]}))
    expected = r"got columns a \(string\), b \(string\), c \(number or array\) in .*two.jsonl. Name it with --column."
    for source in (tmp_path / "two.jsonl", tmp_path):
        with pytest.raises(ValueError, match=expected):
            plan(source)
    assert bodies(plan(tmp_path, column="b")) == ["y"]
    for column in ("c", "missing", ""):
        with pytest.raises(ValueError, match=rf"plan.column: expected a column of text named '{column}', got columns"):
            plan(tmp_path, column=column)


def test_the_hash_is_of_texts_and_of_what_was_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    hashes = set()
    for body in (
        lines_of({"text": "a"}, {"text": "b"}),
        lines_of({"text": "ab"}, {"text": ""}),
        lines_of({"text": "a"}, {"text": None}),
        lines_of({"text": "a"}, {"text": 5}),
        lines_of({"text": "a"}, {"text": "null in column 'text'"}),
        lines_of({"text": "a"}),
    ):
        path.write_bytes(body)
        (shard,) = plan(path).shards
        hashes.add(hash_of(shard))
        reading = texts_of(shard, None, unreadable := [])
        assert next(reading).body
        assert reading.sha256() == hash_of(shard) == reading.sha256()
        assert not unreadable  # what is read for the hash alone is not reported
        assert next(reading, None) is None
    assert len(hashes) == 6
    (tmp_path / "elsewhere").mkdir()
    moved = path.rename(tmp_path / "elsewhere" / "b.jsonl")
    assert hash_of(plan(moved).shards[0]) in hashes
    known = hashlib.sha256(b"0 1 1 a").hexdigest()
    assert hash_of(plan(moved).shards[0]) == known


def test_the_identity_of_a_corpus(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines_of({"text": "a", "id": "x"}))
    found = {plan(path).identity(), plan(path, column="text").identity(), plan(path, shard_bytes=3).identity()}
    assert len(found) == 3
    assert plan(path).identity() in found
    path.write_bytes(lines_of({"text": "a", "id": "xy"}))
    assert plan(path).identity() not in found
    corpus = plan(path, shard_bytes=5)
    assert all(Shard.of(json.loads(json.dumps(shard.plain()))) == shard for shard in corpus.shards)
    assert isinstance(Shard.of(corpus.shards[0].plain()).ranges[0], FileRange)


def test_what_cannot_be_planned_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"plan.sources: expected files, which can be read twice, got standard input"):
        plan(["-"])
    with pytest.raises(FileNotFoundError, match=r"plan.sources: expected a file or directory, got no such path"):
        plan(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"got no such path ''"):
        plan("")
    with pytest.raises(ValueError, match=r"plan.sources: expected a directory with text files, got .* with none"):
        plan(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"expected files, which can be read twice, got the pipe .*. Pipe it in"):
        plan(tmp_path / "pipe")
    for size, error, message in ((0, ValueError, "at least 1, got 0"), (1.5, TypeError, "a whole number, got 1.5")):
        with pytest.raises(error, match=rf"plan.shard_bytes: expected {message}"):
            plan(shard_bytes=size)
    with pytest.raises(TypeError, match=r"plan.column: expected the name of a column, got 3"):
        plan(column=3)
    (tmp_path / "a.txt").write_text("abc")
    monkeypatch.setattr(module, "POSITION_BITS", 1)
    with pytest.raises(ValueError, match=r"plan.sources: expected files of at most 2 bytes, got 3 in .*a.txt"):
        plan(tmp_path)
    monkeypatch.setattr(module, "NUMBER_BITS", 0)
    with pytest.raises(ValueError, match=r"plan.sources: expected at most 1 files, got 2"):
        plan([tmp_path, tmp_path])


def test_uris_of_fsspec():
    pytest.importorskip("pyarrow")
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe({"/shelf/a b.txt": b"one", "/shelf/sub/b?.jsonl": lines_of({"text": "two"}), "/shelf/.no/c.txt": b"no"})
    memory.pipe({"/shelf/empty.txt": b"", "/shelf/picture.png": b"no"})
    try:
        corpus = plan("memory://shelf", shard_bytes=2)
        assert [path for path, _ in corpus.files] == ["memory://shelf/a b.txt", "memory://shelf/sub/b?.jsonl"]
        assert bodies(corpus) == ["one", "two"]
        assert bodies(plan("memory://shelf/sub/b?.jsonl")) == ["two"]
        with pytest.raises(FileNotFoundError, match=r"got no such path 'memory://shelf/absent'"):
            plan("memory://shelf/absent")
    finally:
        memory.rm("/shelf", recursive=True)
    with pytest.raises(ValueError, match=r"plan.sources: expected a URI of a known kind, got nowhere://a/b.txt. Use"):
        plan("nowhere://a/b.txt")


def test_uris_of_pyarrow(part, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    (tmp_path / "sub").mkdir()
    (tmp_path / "a b%20.txt").write_text("one é " * 40)
    (tmp_path / "sub" / "c?.jsonl").write_bytes(lines_of({"text": "two"}, {"text": "three"}))
    parquet(tmp_path / "sub" / "d.parquet", {"text": ["four", "five"]}, group=1)
    expected = bodies(plan(tmp_path))
    assert bodies(plan(tmp_path.as_uri())) == expected  # file:// needs nothing but Python
    monkeypatch.setattr(files, "local_path", lambda source: None)
    corpus = plan(tmp_path.as_uri(), shard_bytes=30)
    assert [path for path, _ in corpus.files] == [
        f"{tmp_path.as_uri()}/{name}" for name in ("a%20b%2520.txt", "sub/c%3F.jsonl", "sub/d.parquet")
    ]
    assert bodies(corpus) == expected
    assert len(expected) > 6
    with pytest.raises(FileNotFoundError, match=r"got no such path 'file:///absent/a.txt'"):
        plan("file:///absent/a.txt")


def test_what_is_not_installed_is_named(tmp_path, monkeypatch):
    path = parquet(tmp_path / "a.parquet", {"text": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"expected pyarrow, which reads Parquet, got no pyarrow. Run pip install"
    ):
        plan(path)
    with pytest.raises(ModuleNotFoundError, match=r"expected what reads s3://a/b.txt, got no pyarrow. Run pip install"):
        plan("s3://a/b.txt")
    (tmp_path / "a.jsonl").write_bytes(lines_of({"text": "a"}))
    assert bodies(plan(tmp_path / "a.jsonl")) == ["a"]


def test_a_long_line_is_skipped_in_chunks_by_shards_that_do_not_own_it(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "CHUNK", 10)
    path = tmp_path / "long.jsonl"
    path.write_bytes(lines_of({"text": "x" * 1000}, {"text": "y"}))
    corpus = plan(path, shard_bytes=100)
    assert [len(list(texts_of(shard))) for shard in corpus.shards] == [1, *[0] * 9, 1]
