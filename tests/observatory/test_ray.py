"""A corpus on Ray: the same record as on one process, whatever dies on the way."""

import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="install cumulant[hf] to observe models")
pyarrow = pytest.importorskip("pyarrow", reason="install cumulant[ray] to observe on Ray")
ray = pytest.importorskip("ray", reason="install cumulant[ray] to observe on Ray")
pytest.importorskip("ray.data", reason="install cumulant[ray] to observe on Ray")

from tokenizers import Tokenizer, pre_tokenizers, processors  # noqa: E402
from tokenizers.models import BPE  # noqa: E402

from cumulant.observatory import Record  # noqa: E402
from cumulant.observatory.runs import ray as on_ray  # noqa: E402
from cumulant.observatory.runs.observe import observe_corpus, observe_shard  # noqa: E402
from cumulant.observatory.runs.ray import from_bytes, observe_on_ray, to_bytes  # noqa: E402
from cumulant.observatory.runs.settings import ObservationSettings  # noqa: E402
from cumulant.observatory.runs.store import Store  # noqa: E402
from cumulant.observatory.text.corpus import Corpus, plan  # noqa: E402

pytestmark = pytest.mark.xdist_group("ray")  # fixtures that take seconds are made in one process

WORDS = ("measure", "atom", "mean", "law", "head", "key", "query", "value", "norm", "sink", "state", "text", "é", "数")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the actors have, so that sums are taken in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> ObservationSettings:
    """Of a small BERT that reads bytes between two special tokens."""
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=258)).save_pretrained(path)
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<a>", "<b>"]
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<a> $A <b>", special_tokens=[("<a>", letters.index("<a>")), ("<b>", letters.index("<b>"))]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return ObservationSettings(str(path), max_length=64, batch_size=8)


@pytest.fixture(scope="module")
def loaded(asked):
    return asked.load()


def write_texts(place: Path, files: int = 8) -> Path:
    draw = random.Random(0)
    place.mkdir()
    for number in range(files):
        (place / f"{number}.txt").write_text(" ".join(draw.choices(WORDS, k=90)), encoding="utf-8")
    rows = [json.dumps({"text": " ".join(draw.choices(WORDS, k=30))}) for _ in range(3)]
    (place / "rows.jsonl").write_text("\n".join([*rows[:2], '{"text": 3}', rows[2]]) + "\n", encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    return plan([write_texts(tmp_path_factory.mktemp("texts") / "all")], shard_bytes=512)


@pytest.fixture(scope="module")
def whole(asked, corpus, loaded, tmp_path_factory) -> Record:
    """What one process makes of all of it."""
    with opened(tmp_path_factory.mktemp("local") / "out", corpus, asked, loaded) as store:
        return observe_corpus(asked, corpus, store, max_tokens=None, loaded=loaded)


def opened(
    place: Path, corpus: Corpus, asked: ObservationSettings, loaded, max_tokens: int | None = None, **more
) -> Store:
    return Store.open(place, corpus, asked, loaded.fingerprint, max_tokens, **more)


def require_equal(one: Record, other: Record, but: tuple[str, ...] = ("created",)) -> None:
    """Every bit of every tensor, and all metadata."""
    mine, theirs = one.tensors(exact=True), other.tensors(exact=True)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0, equal_nan=True, msg=name)
    plain, others = json.loads(json.dumps(one.plain())), json.loads(json.dumps(other.plain()))
    for data in (plain, others):
        data["meta"] = {key: value for key, value in data["meta"].items() if key not in but}
    assert plain == others


def workers_of(pid: int) -> list[int]:
    """Processes below this one in which an actor holds a model."""
    parents, found = {}, []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if "ShardReader" in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
            except (OSError, IndexError):  # it has just ended
                continue
    return [one for one in found if pid in ancestors(one, parents)]


def ancestors(pid: int, parents: dict[int, int]) -> list[int]:
    line = []
    while pid in parents and parents[pid] not in line:
        pid = parents[pid]
        line.append(pid)
    return line


def test_a_record_comes_back_from_bytes_as_it_was(whole):
    require_equal(from_bytes(*to_bytes(whole)), whole, but=())


def test_missing_ray_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"^--ray needs ray: run pip install .*\[ray\]'\.$"):
        on_ray._ray()  # pyright: ignore[reportPrivateUsage]


def test_an_address_that_nobody_listens_on_is_told_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening
        port = taken.getsockname()[1]
        said = rf"^--ray: expected a cluster that answers, got 127\.0\.0\.1:{port} \("
        with pytest.raises(ConnectionError, match=said), on_ray.connected(f"127.0.0.1:{port}"):
            pass


def test_what_listens_must_be_ray():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            line, _ = server.accept()
            with line:
                line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConnectionError, match="what listens there is no Ray"), on_ray.connected(address):
            pass
        thread.join()


@pytest.mark.parametrize("address", ["", "somewhere", "host:", ":6379", "host:port"])
def test_an_address_has_host_and_port(address):
    with pytest.raises(ValueError, match=r"^--ray: expected local, auto or HOST:PORT"), on_ray.connected(address):
        pass


def test_the_client_of_ray_is_refused():
    with pytest.raises(ValueError, match=r"^--ray: .*Ray Data does not run through"), on_ray.connected("ray://host:1"):
        pass


def test_auto_without_a_cluster_is_one_sentence(monkeypatch):
    def nothing(**options):
        raise ConnectionError("Could not find any running instance")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", nothing)
    said = r"^--ray: expected a running cluster, got none that this process may use\. Start one"
    with pytest.raises(ConnectionError, match=said), on_ray.connected("auto"):
        pass


def test_a_cluster_that_asks_for_a_token_says_so(monkeypatch):
    def refused(**options):
        try:
            raise ray.exceptions.AuthenticationError("the token is missing")
        except ray.exceptions.AuthenticationError as error:
            raise ConnectionError("Failed to connect") from error

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refused)
    with pytest.raises(ConnectionError, match=r"^--ray: .*\. It asks for a token: "), on_ray.connected("auto"):
        pass


@pytest.mark.parametrize("workers", [0, -1, 1.5, True])
def test_workers_are_counted(workers, asked, corpus):
    with pytest.raises(ValueError, match=r"^observe_on_ray\.workers: expected a whole number of at least 1"):
        observe_on_ray(asked, corpus, None, max_tokens=None, workers=workers)


class Here(on_ray._WorkerPool):  # pyright: ignore[reportPrivateUsage]
    """Actors in this process."""

    def replies(self, actor, tasks, ordered=False, **arguments):
        hired = actor(settings=self.settings, column=self.corpus.column, home=os.getcwd(), **arguments)
        for task in tasks:
            table = hired(pyarrow.table({"task": [json.dumps(task)]}))
            for row in table.to_pylist():
                answer = json.loads(row["answer"])
                yield on_ray._Reply(answer, row["plain"], row["tensors"])  # pyright: ignore[reportPrivateUsage]


@pytest.fixture
def here(monkeypatch):
    """What the driver and the actors do, without Ray between them."""

    @contextmanager
    def nothing(address, workers):
        yield None

    monkeypatch.setattr(on_ray, "_WorkerPool", Here)
    monkeypatch.setattr(on_ray, "connected", nothing)
    monkeypatch.setattr(on_ray, "_pool_size", lambda *given: 1)
    monkeypatch.setattr(on_ray, "_attempts", lambda ray: lambda ordinal: True)


@pytest.mark.long
def test_a_failing_shard_is_named_and_the_rest_is_kept(here, asked, loaded, tmp_path):
    place = write_texts(tmp_path / "texts", files=3)
    corpus = plan([place], shard_bytes=512)
    body = (place / "1.txt").read_bytes()
    broken = next(s.ordinal for s in corpus.shards if any(p.path.endswith("1.txt") for p in s.ranges))
    (place / "1.txt").unlink()
    with opened(tmp_path / "out", corpus, asked, loaded) as store:
        named = rf"^observe_on_ray: shard {broken} \(.*FileNotFoundError.*; {len(corpus.shards) - 1} shards are kept"
        with pytest.raises(ValueError, match=named):
            observe_on_ray(asked, corpus, store, max_tokens=None, loaded=loaded)
        assert store.done.keys() == {s.ordinal for s in corpus.shards} - {broken}
    (place / "1.txt").write_bytes(body)
    with opened(tmp_path / "again", corpus, asked, loaded) as store:
        expected = observe_corpus(asked, corpus, store, max_tokens=None, loaded=loaded)
    with opened(tmp_path / "out", corpus, asked, loaded, resume=True) as store:
        require_equal(observe_on_ray(asked, corpus, store, max_tokens=None, loaded=loaded), expected)


def test_a_failing_shard_is_named_when_tokens_are_counted(here, asked, loaded, tmp_path, monkeypatch):
    place = write_texts(tmp_path / "texts", files=3)
    corpus = plan([place], shard_bytes=512)
    (place / "0.txt").unlink()
    monkeypatch.setattr(on_ray, "COUNTED_HERE", 0)
    said = r"^observe_on_ray: shard 0 \(.*FileNotFoundError"
    with opened(tmp_path / "out", corpus, asked, loaded, 900) as store, pytest.raises(ValueError, match=said):
        observe_on_ray(asked, corpus, store, max_tokens=900, loaded=loaded)


def test_a_changed_text_is_refused_before_anything_is_observed(here, asked, loaded, tmp_path):
    place = write_texts(tmp_path / "texts", files=3)
    corpus = plan([place], shard_bytes=512)
    with opened(tmp_path / "out", corpus, asked, loaded) as store:
        store.put(2, observe_shard(loaded, asked, corpus.shards[2], None, None), None)
        (place / "2.txt").write_bytes((place / "2.txt").read_bytes().upper())
        with pytest.raises(ValueError, match=r"^--resume: expected the text that shard 2 \(.*2\.txt"):
            observe_on_ray(asked, corpus, store, max_tokens=None, loaded=loaded)
        assert list(store.done) == [2]


def test_another_model_under_the_same_name_is_refused(here, asked, corpus, loaded, tmp_path):
    with Store.open(tmp_path / "out", corpus, asked, "0" * 64, None) as store:
        with pytest.raises(ValueError, match=r"^observe_on_ray\.settings: expected the model, got .*other weights"):
            observe_on_ray(asked, corpus, store, max_tokens=None, loaded=loaded)
        assert not store.done


def test_an_interrupt_keeps_what_is_finished(here, asked, corpus, loaded, whole, tmp_path):
    def stop(tokens: int) -> None:
        raise KeyboardInterrupt

    with opened(tmp_path / "out", corpus, asked, loaded) as store:
        record = observe_on_ray(asked, corpus, store, max_tokens=None, loaded=loaded, progress=stop)
        assert list(store.done) == [0]
    assert record.meta.complete is False
    assert record.meta.tokens == store.done[0].tokens < whole.meta.tokens


@pytest.mark.long
def test_a_shard_that_workers_die_of_is_given_up(here, asked, corpus, loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(on_ray, "_attempts", lambda ray: lambda ordinal: ordinal != 1)
    with opened(tmp_path / "out", corpus, asked, loaded) as store:
        with pytest.raises(ValueError, match=r"^observe_on_ray: shard 1 \(.*got workers that died over it"):
            observe_on_ray(asked, corpus, store, max_tokens=None, loaded=loaded)
        assert store.done.keys() == {s.ordinal for s in corpus.shards} - {1}


def check_budget(asked: ObservationSettings, corpus: Corpus, loaded, place: Path, **where) -> None:
    """Some shards are there, the rest is counted and observed; the last window is cut as it is locally."""
    most = 3000
    with opened(place / "local", corpus, asked, loaded, most) as store:
        expected = observe_corpus(asked, corpus, store, max_tokens=most, loaded=loaded)
    assert most - 2 <= expected.meta.tokens <= most
    assert len(store.done) < len(corpus.shards)
    seen = []
    with opened(place / "out", corpus, asked, loaded, most) as store:
        store.put(0, observe_shard(loaded, asked, corpus.shards[0], None, most), most)
        record = observe_on_ray(asked, corpus, store, max_tokens=most, loaded=loaded, progress=seen.append, **where)
    assert sum(seen) == record.meta.tokens
    require_equal(record, expected)


@pytest.mark.long
@pytest.mark.parametrize("here_or_there", [0, 1_000_000])
def test_a_run_goes_on_within_its_budget(here, here_or_there, asked, corpus, loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(on_ray, "COUNTED_HERE", here_or_there)
    check_budget(asked, corpus, loaded, tmp_path)


def test_counts_do_not_depend_on_the_borders_of_shards(here, asked, corpus, loaded, whole, tmp_path):
    other = plan([Path(corpus.files[0][0]).parent], shard_bytes=2048)
    assert len(other.shards) < len(corpus.shards)
    with opened(tmp_path / "out", other, asked, loaded) as store:
        record = observe_on_ray(asked, other, store, max_tokens=None, loaded=loaded)
    for name in ("tokens", "sequences", "skipped", "unreadable", "unreadable_documents"):
        assert getattr(record.meta, name) == getattr(whole.meta, name)
    mine, theirs = record.tensors(exact=True), whole.tensors(exact=True)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        if name.startswith("tally/") and name.endswith("/count"):
            assert torch.equal(tensor, theirs[name]), name
        elif name.startswith("tally/") and name.endswith("/mean"):  # the model runs in float32, on other batches
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)


# ---------------------------------------------------------------------- on a cluster


@pytest.mark.long
def test_the_record_is_the_local_one_though_a_worker_is_killed(asked, corpus, loaded, whole, tmp_path):
    done, killed = [], []

    def progress(tokens: int) -> None:
        done.append(tokens)
        if len(done) == 2:
            killed.extend(workers_of(os.getpid())[:1])
            os.kill(killed[0], signal.SIGKILL)

    with opened(tmp_path / "out", corpus, asked, loaded) as store:
        record = observe_on_ray(asked, corpus, store, max_tokens=None, workers=2, loaded=loaded, progress=progress)
    assert not ray.is_initialized()
    assert killed
    assert sum(done) == whole.meta.tokens
    assert record.meta.unreadable == 1
    require_equal(record, whole)


@pytest.mark.long
def test_a_run_goes_on_within_its_budget_on_a_cluster(asked, corpus, loaded, tmp_path, monkeypatch):
    """What is counted and observed there, with a connection that stays."""
    before = {name: os.environ.get(name) for name in on_ray.ENVIRONMENT}
    level = logging.getLogger("ray.data").level
    monkeypatch.setattr(on_ray, "COUNTED_HERE", 0)
    with on_ray.connected("local", 2) as connection:
        check_budget(asked, corpus, loaded, tmp_path, address="auto")
        assert connection.is_initialized()
    assert {name: os.environ.get(name) for name in on_ray.ENVIRONMENT} == before
    assert logging.getLogger("ray.data").level == level


@pytest.mark.long
def test_a_shard_that_kills_its_workers_ends(asked, corpus, loaded, tmp_path, monkeypatch):
    """A class that is made here travels whole to the actors."""

    class Deadly(on_ray.ShardReader):
        def answer(self, shard, task):
            if shard.ordinal == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().answer(shard, task)

    monkeypatch.setattr(on_ray, "ShardReader", Deadly)
    monkeypatch.setattr(on_ray, "ATTEMPTS", 2)
    with opened(tmp_path / "out", corpus, asked, loaded) as store:
        with pytest.raises(ValueError, match=r"^observe_on_ray: shard 1 \(.*got workers that died over it"):
            observe_on_ray(asked, corpus, store, max_tokens=None, workers=2, loaded=loaded)
        assert store.done.keys() == {s.ordinal for s in corpus.shards} - {1}


@pytest.mark.long
def test_workers_die_at_ten_moments(asked, corpus, loaded, whole, tmp_path):
    """One of each run, somewhere between its beginning and the last shard."""
    draw = random.Random(1)

    def strike(ended: threading.Event, killed: list[int]) -> None:
        while not ended.is_set() and not workers_of(os.getpid()):
            time.sleep(0.05)
        ended.wait(draw.uniform(0, 5))
        for pid in workers_of(os.getpid())[:1]:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    killed: list[int] = []
    for run in range(20):
        ended = threading.Event()
        thread = threading.Thread(target=strike, args=(ended, killed))
        with opened(tmp_path / f"{run}", corpus, asked, loaded) as store:
            thread.start()
            try:
                record = observe_on_ray(asked, corpus, store, max_tokens=None, workers=2, loaded=loaded)
            finally:
                ended.set()
                thread.join()
        require_equal(record, whole)
        if len(killed) >= 10:
            break
    assert len(killed) >= 10


def command(model: str, texts: Path, out: Path, *more: str) -> list[str]:
    """`cumulant observe` of all of it."""
    start = [sys.executable, "-c", "from cumulant.cli import main; main()", "observe", model, "--text", str(texts)]
    given = ["--max-length", "64", "--batch-size", "8", "--shard-bytes", "512", "--max-tokens", "0", "--null", "none"]
    return [*start, *given, "--out", str(out), *more]


@pytest.mark.long
def test_the_driver_dies_at_ten_moments(asked, corpus, tmp_path):
    """Killed with its cluster and begun again until it ends, the command leaves what an undisturbed local one does."""
    pytest.importorskip("typer")
    pytest.importorskip("polars")
    draw = random.Random(2)
    texts = Path(corpus.files[0][0]).parent
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command(asked.model, texts, tmp_path / "local"), env=environment, check=True, capture_output=True)
    expected = Record.load(tmp_path / "local")
    kills, run, long, stopped = 0, 0, 0.0, False
    while kills < 10 or stopped:
        given = command(asked.model, texts, tmp_path / f"ray-{run}", "--ray", "local", "--workers", "2", "--resume")
        begun = time.monotonic()
        process = subprocess.Popen(given, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            _, said = process.communicate(timeout=draw.uniform(0, long) if long and kills < 10 else None)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills, stopped = kills + 1, True
            continue
        assert process.returncode == 0, said
        require_equal(Record.load(tmp_path / f"ray-{run}"), expected, but=("created", "command"))
        long, run, stopped = max(long, time.monotonic() - begun), run + 1, False
    assert run >= 2  # the first is not disturbed and gives the time that one takes
