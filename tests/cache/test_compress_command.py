"""`cumulant compress` and `cumulant generate`: a text becomes a cache in a file, and is read on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.cache.prefixes import characters, decoder, hf

pytest.importorskip("transformers", reason="install cumulant[hf] for caches")

from cumulant.cache import MeasureCache
from cumulant.cli import application

TEXT = "It was the best of times, it was the worst of times. " * 8


@pytest.fixture(scope="module")
def directory(tmp_path_factory: Any) -> Path:
    """A model of random weights and its tokenizer, and a text."""
    there = tmp_path_factory.mktemp("models")
    decoder(vocab_size=128, max_position_embeddings=600).save_pretrained(there / "tiny")
    characters().save_pretrained(there / "tiny")
    (there / "text.txt").write_text(TEXT, encoding="utf-8")
    return there


def run(directory: Path, command: str, **options: object) -> Any:
    words = [command, str(directory / "tiny")]
    for name, value in options.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return CliRunner().invoke(application(), words)


@pytest.mark.parametrize("method", ["backtest", "h2o"])
def test_a_text_is_held_and_read_on(directory: Path, method: str):
    out = directory / f"{method}.safetensors"
    done = run(directory, "compress", text=directory / "text.txt", out=out, keep=0.25, method=method)
    assert done.exit_code == 0, done.output
    assert f"{len(TEXT)} tokens" in done.output
    assert "cumulant generate" in done.output
    model = hf.AutoModelForCausalLM.from_pretrained(directory / "tiny")
    cache = MeasureCache.load(out, model)
    assert cache.get_seq_length() == len(TEXT)
    assert 0.2 < cache.keep < 0.26
    said = run(directory, "generate", cache=out, prompt="It was", tokens=5)
    assert said.exit_code == 0, said.output
    model.set_attn_implementation("cumulant")
    prompt = characters()("It was", return_tensors="pt").input_ids
    with torch.no_grad():
        first = model(prompt, past_key_values=cache).logits[0, -1].argmax()
    assert said.output.startswith(characters().decode([int(first)], skip_special_tokens=True))


def test_everything_held_says_what_the_model_says(directory: Path):
    out = directory / "all.safetensors"
    assert run(directory, "compress", text=directory / "text.txt", out=out, keep=1, method="stream").exit_code == 0
    said = run(directory, "generate", cache=out, prompt="It", tokens=8).output.strip("\n")
    model = hf.AutoModelForCausalLM.from_pretrained(directory / "tiny")
    ids = characters()(TEXT + "It", return_tensors="pt").input_ids
    mask = torch.ones_like(ids)
    own = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert said == characters().decode(own, skip_special_tokens=True).strip("\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep": 2}, "--keep: expected a share above 0 and at most 1, got 2.0"),
        ({"keep": 0.5, "bytes": 100}, "expected keep or bytes, one of them"),
        ({"method": "magic"}, "--method: expected backtest or one of adakv"),
        ({"text": "nowhere.txt"}, "nowhere.txt"),
        ({"tokens": 1}, "--tokens"),
    ],
)
def test_bad_options_are_refused_in_a_sentence(directory: Path, options: dict[str, Any], words: str):
    out = directory / "never.safetensors"
    done = run(directory, "compress", **({"text": directory / "text.txt", "out": out} | options))
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
    assert not out.exists()


def test_a_file_that_is_there_is_replaced_when_asked(directory: Path):
    out = directory / "there.safetensors"
    out.write_text("mine")
    refused = run(directory, "compress", text=directory / "text.txt", out=out, method="stream")
    assert refused.exit_code == 2
    assert "Pass --force to replace it" in refused.output
    assert out.read_text() == "mine"
    assert run(directory, "compress", text=directory / "text.txt", out=out, method="stream", force=True).exit_code == 0


def test_a_text_beyond_the_positions_of_the_model_is_refused(directory: Path):
    (directory / "long.txt").write_text(TEXT * 3, encoding="utf-8")
    out = directory / "long.safetensors"
    done = run(directory, "compress", text=directory / "long.txt", out=out, method="stream")
    assert done.exit_code == 2
    assert "expected fewer than 600 tokens" in " ".join(done.output.split())
    kept = run(directory, "compress", text=directory / "long.txt", out=out, method="stream", tokens=300)
    assert kept.exit_code == 0
    assert "300 tokens" in kept.output


def test_a_cache_of_another_model_is_refused(directory: Path):
    out = directory / "mine.safetensors"
    assert run(directory, "compress", text=directory / "text.txt", out=out, method="stream", force=True).exit_code == 0
    decoder(vocab_size=128, num_hidden_layers=1).save_pretrained(directory / "other")
    characters().save_pretrained(directory / "other")
    words = ["generate", str(directory / "other"), "--cache", str(out), "--prompt", "It"]
    done = CliRunner().invoke(application(), words)
    assert done.exit_code == 2
    assert "expected" in done.output
