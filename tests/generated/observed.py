"""What commands are tried on: a model of some thousand weights and a text, saved once, and its records."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

hf = pytest.importorskip("transformers", reason="install cumulant[hf] to observe models")
hf.logging.set_verbosity_error()
hf.logging.disable_progress_bar()
pytest.importorskip("polars", reason="install cumulant[report] to write tables")
testing = pytest.importorskip("typer.testing")

from tokenizers import Tokenizer, pre_tokenizers, processors  # noqa: E402
from tokenizers.models import BPE  # noqa: E402

from cumulant.cli import application  # noqa: E402
from cumulant.observatory import attach  # noqa: E402
from cumulant.observatory.record.manifest import writing  # noqa: E402
from tests.observatory.effects import TEN, rows_of  # noqa: E402

WORDS = "the mean of a law is its gradient "
QUICK = ("--max-length", "16", "--batch-size", "8", "--max-tokens", "48", "--quantities", "cheap")


class Ended(NamedTuple):
    """How a command ended: its exit code, all that it printed, and what it raised other than an exit."""

    code: int
    said: str
    raised: BaseException | None


def call(*arguments: object) -> Ended:
    """Run a command in this process."""
    found = testing.CliRunner().invoke(_application(), [str(a) for a in arguments], env={"COLUMNS": "400"})
    raised = None if isinstance(found.exception, SystemExit) else found.exception
    return Ended(found.exit_code, found.output, raised)


def require_sentence(ended: Ended) -> None:
    """No traceback; a command that fails says why in one sentence, or in typer's box of a wrong option."""
    assert ended.raised is None, repr(ended.raised)
    assert "Traceback" not in ended.said
    if ended.code:
        lines = [line for line in ended.said.splitlines() if line.strip()]
        assert lines, "silence"
        boxed = lines[-1].startswith("╰")
        assert boxed or (": " in lines[-1] and lines[-1].endswith((".", "?"))), ended.said


@cache
def _application():
    return application()


@cache
def base() -> Path:
    """A directory of this process that is gone when it ends: tiny/, words.txt, lines.jsonl."""
    place = Path(tempfile.mkdtemp(prefix="cumulant-observed-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    torch.manual_seed(0)
    save_model(place / "tiny")
    (place / "words.txt").write_text(WORDS * 8)
    (place / "lines.jsonl").write_text("".join(json.dumps({"text": WORDS, "n": n}) + "\n" for n in range(6)))
    return place


def save_model(place: Path) -> None:
    """A language model of one layer and two heads, with a tokenizer of bytes."""
    small = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 260, "initializer_range": 0.3}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**small, bos_token_id=1, eos_token_id=2))
    model.save_pretrained(place)
    byte_tokenizer().save_pretrained(place)


def byte_tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(BPE({token: i for i, token in enumerate(["[PAD]", "[CLS]", "[SEP]", *letters])}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    return hf.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", model_max_length=32)


def observe(out: Path, *more: object) -> Ended:
    return call("observe", base() / "tiny", "--text", base() / "words.txt", "--out", out, *QUICK, *more)


def run(command: str, place: Path, kind: str) -> Ended:
    """A command on a directory of this kind: report, compare, or observing again, alone or with --force or --resume."""
    if command in ("report", "compare"):
        return call(command, place, *([observed("record")] if command == "compare" else []))
    more = {"again": (), "force": ("--force",), "resume": ("--resume",)}[command]
    if kind == "series":
        words, run = base() / "words.txt", base() / "run"
        return call("observe", "--checkpoints", run, "--text", words, "--out", place, *QUICK, *more)
    if kind == "begun":
        model, text = base() / "tiny", base() / "lines.jsonl"
        given = ("--text", text, "--shard-bytes", 50, "--out", place, *QUICK, "--null", "none")
        return call("observe", model, *given, *more)
    return observe(place, "--null", "none", *more)


@cache
def observed(kind: str) -> Path:
    """A directory to copy.

    record    as `observe --null random` leaves it
    old       the same from before there was a manifest
    attached  a record that Python saved
    begun     a run that was stopped after its first shard
    series    as `observe --checkpoints` leaves it
    empty     nothing
    """
    out = base() / "made" / kind
    out.parent.mkdir(exist_ok=True)
    if kind == "record":
        with chdir(base()):
            _succeed(observe(out, "--null", "random"))
        with writing(out, "ablation.json", "causes.json"):
            (out / "ablation.json").write_text(json.dumps(ABLATION))
            (out / "causes.json").write_text(json.dumps(rows_of("self", "loss", "removed", 0.1, 0.01, TEN)))
    elif kind == "old":
        shutil.copytree(observed("record"), out)
        for path in sorted(out.rglob("manifest.json")):
            path.unlink()
        for path in sorted(out.rglob("record.json")):
            plain = json.loads(path.read_text())
            path.write_text(json.dumps({key: value for key, value in plain.items() if key != "moments"}))
    elif kind == "attached":
        model = hf.GPT2LMHeadModel.from_pretrained(base() / "tiny")
        with attach(model, "cheap") as recorder, torch.no_grad():
            model(torch.arange(12).reshape(2, 6))
        recorder.record().save(out)
    elif kind == "begun":
        _begin(out)
    elif kind == "series":
        run = base() / "run"
        for step in (1, 2):
            torch.manual_seed(step)
            save_model(run / f"checkpoint-{step}")
        _succeed(call("observe", "--checkpoints", run, "--text", base() / "words.txt", "--out", out, *QUICK))
    else:
        out.mkdir()
    return out


def _begin(out: Path) -> None:
    from cumulant.observatory.runs import observe

    once, calls = observe.observe_shard, []

    def dying(*given):
        calls.append(given)
        if len(calls) == 2:
            raise OSError("[Errno 5] Input/output error")
        return once(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observe, "observe_shard", dying)
        text = base() / "lines.jsonl"
        ended = call("observe", base() / "tiny", "--text", text, "--shard-bytes", 50, "--out", out, *QUICK)
    assert ended.code == 2, ended
    assert (out / "shards" / "plan.json").is_file()
    assert not (out / "record.json").exists()


def _succeed(ended: Ended) -> None:
    assert ended.code == 0, ended


def snapshot(place: Path) -> dict[str, bytes | str | None]:
    """Every path below a place with its bytes, where a link leads, or None for a directory."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(place.rglob("*")):
        name = path.relative_to(place).as_posix()
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


ABLATION = {
    "kind": "gaussian",
    "measure": "perplexity",
    "all_at_once": 0.5,
    "control": 1.5,
    "baseline": 20.0,
    "threshold": 0.01,
    "tokens": 48,
    "heads": 2,
    "can_go": 1,
    "together": 1,
    "rows": [{"layer": 0, "head": head, "name": "h", "damage": 0.02 * head, "r2": None} for head in range(2)],
}
