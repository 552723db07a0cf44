"""Our own layers under the observatory, and models over their training: checkpoints, series, page."""

import json
import re
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

hf = pytest.importorskip("transformers", reason="install cumulant[hf] to observe models")
pl = pytest.importorskip("polars", reason="install cumulant[report] to write tables")

from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from cumulant.cli import application  # noqa: E402
from cumulant.nn import ConvexBlock, EnergyBlock, MultiheadAttention  # noqa: E402
from cumulant.nn.block_types import FORMAT  # noqa: E402
from cumulant.nn.language_model import LanguageConfig, LanguageModel  # noqa: E402
from cumulant.observatory.hooks.attention import observe_attention, replace_attention  # noqa: E402
from cumulant.observatory.hooks.structure import attention_modules  # noqa: E402
from cumulant.observatory.hooks.weights import HeadWeights, head_weights  # noqa: E402
from cumulant.observatory.models.load import fingerprint_of, load, random_twin  # noqa: E402
from cumulant.observatory.record.record import Record  # noqa: E402
from cumulant.observatory.record.recorder import attach  # noqa: E402
from cumulant.observatory.record.weights import with_weights  # noqa: E402
from cumulant.observatory.report.page.render import DETAIL_LEVELS, condensed  # noqa: E402
from cumulant.observatory.report.series import log_spaced, read_steps, render_series, series_data, series_rows  # noqa: E402
from cumulant.observatory.runs.over_training import (  # noqa: E402
    CheckpointDirectory,
    SeriesSettings,
    agreed_model,
    claim_series,
    find_steps,
    longest,
)
from cumulant.observatory.runs.settings import ObservationSettings, Settings  # noqa: E402
from cumulant.residual import gradientness  # noqa: E402

pytestmark = pytest.mark.xdist_group("over_training")  # fixtures that take seconds are made in one process

ENDING = {"standard": ".attention", "energy": "", "convex": ".block", "equilibrium": ".block"}  # of the layer's path
KINDS = tuple(ENDING)
SMALL = {"dim": 16, "heads": 2, "layers": 2, "hidden": 24, "vocabulary": 257, "context": 24}
TEXT = "The law of the hidden states changes while a model learns. " * 30


def language_model(kind: str, seed: int = 0) -> LanguageModel:
    torch.manual_seed(seed)
    model = LanguageModel(LanguageConfig(block=kind, **SMALL)).eval()
    for name, p in model.named_parameters():  # gains that differ from 1, so that they are not forgotten
        if "norm" in name or "before" in name:
            p.data += 0.3 * torch.randn(p.shape)
    return model.requires_grad_(False)


def tokenizer_json() -> str:
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<|end|>": 256}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer.to_str()


def save_step(run, number: int, model: LanguageModel, /, **about) -> None:
    place = run / f"step-{number:06d}"
    place.mkdir(parents=True)
    config = {"block": model.config.block, **SMALL, "causal": True}
    config_file = {"format": FORMAT, "task": "language", "step": number, "seed": 0, "model": config} | about
    (place / "config.json").write_text(json.dumps(config_file))
    (place / "tokenizer.json").write_text(tokenizer_json())
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": SMALL["context"], "pad_token": "<|end|>"}
    (place / "tokenizer_config.json").write_text(json.dumps(plain))
    save_file(model.state_dict(), place / "model.safetensors")


def make_run(run, kind: str = "standard", numbers=(0, 1, 4, 16)):
    model = language_model(kind)
    for number in numbers:
        with torch.no_grad():
            for p in model.parameters():
                p += 0.05 * (number > 0) * torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
        save_step(run, number, model)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("trained") / "standard" / "seed-0")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def command(*arguments) -> tuple[int, str]:
    found = CliRunner().invoke(application(), ["observe", *map(str, arguments)], env={"COLUMNS": "200"})
    return found.exit_code, " ".join(re.sub(r"[│┃]", " ", found.output).split())


QUICK = ("--max-tokens", "200", "--max-length", "24", "--quantities", "entropy", "--quantities", "log_normalizer")
QUICK += ("--quantities", "first_mass", "--quantities", "k90")


@pytest.fixture(scope="module")
def observed(run, text, tmp_path_factory):
    """The directory of one series, by the command."""
    out = tmp_path_factory.mktemp("observed") / "series"
    code, words = command("--checkpoints", run, "--text", text, "--out", out, *QUICK)
    assert code == 0, words
    return out, words


# ------------------------------------------------------------------ observing


def by_hand(kind: str, model: LanguageModel, ids, mask) -> dict[str, np.ndarray]:
    """Entropy of the first layer's heads, (batch, heads, q), from its parameters by plain softmax."""
    trunk = model.trunk
    x = trunk.start(model.embedding(ids) + model.position[: ids.shape[1]])
    layer_norm = nn.functional.layer_norm
    first: Any = trunk.blocks[0]
    if kind == "standard":
        x = first.before_attention(x)
        w, b = first.attention.in_proj_weight, first.attention.in_proj_bias
        q, k, _ = (x @ w.T + b).chunk(3, -1)
        eta, key = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q / 8**0.5, k))
    elif kind == "convex":
        x = first.norm(x)
        eta = torch.einsum("hdD,bnD->bhnd", first.block.query, x)
        key = torch.einsum("hdD,bnD->bhnd", first.block.key, layer_norm(x, (16,)))
    else:
        g = first.normalize(x)
        eta = first.log_beta.exp()[:, None, None] * torch.einsum("hdD,bnD->bhnd", first.query, g)
        key = torch.einsum("hdD,bnD->bhnd", first.key, g)
    n = ids.shape[1]
    order = torch.ones(n, n, dtype=torch.bool).tril(0 if kind == "standard" else -1)
    seen = order & mask[:, None, None, :].bool()
    p = torch.softmax((eta @ key.mT).double().masked_fill(~seen, -torch.inf), -1)
    entropy = -(p * p.clamp_min(1e-300).log()).sum(-1)
    kept = seen.any(-1).expand_as(entropy) & mask[:, None, :].bool()
    return {"entropy": entropy.masked_fill(~kept, torch.nan).numpy()}


@pytest.mark.parametrize("kind", ["standard", "energy", "convex"])
def test_what_is_heard_of_our_layers_is_what_they_compute(kind):
    model, ids = language_model(kind), torch.randint(0, 257, (3, 10), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    before = model(ids, mask)
    with attach(model, ["entropy"]) as recorder:
        assert torch.equal(model(ids, attention_mask=mask), before)
    record = recorder.record()
    tally = record.tallies[f"{record.modules[0].name}/entropy"]
    exact = by_hand(kind, model, ids, mask)["entropy"]
    np.testing.assert_allclose(tally.mean, np.nanmean(exact, axis=(0, 2)), rtol=2e-6)
    assert tally.count.tolist() == np.isfinite(exact).sum(axis=(0, 2)).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_every_block_is_heard_and_its_states_before_and_after(kind):
    model, ids = language_model(kind), torch.arange(22).reshape(2, 11)
    calls = []
    with observe_attention(model, lambda call: calls.append(call)):
        model(ids)
    assert [call.name for call in calls] == [f"trunk.blocks.{i}{ENDING[kind]}" for i in range(2)]
    assert all(call.eta.shape == (2, 2, 11, 8) and call.output.shape == call.eta.shape for call in calls)
    with attach(model) as recorder:
        after = model(ids)
    record = recorder.record()
    stages = [(s.block, s.stage) for s in record.meta.stages if s.role == "state"]
    assert {(f"trunk.blocks.{i}", end) for i in range(2) for end in ("in", "out")} <= set(stages)
    assert ("trunk.blocks.0", "attention") in stages or kind != "standard"
    assert all(torch.isfinite(t.mean).all() for t in record.tallies.values())
    assert int(record.hidden["trunk.blocks.1/out/growth:tally.count"].sum()) == 22
    assert torch.equal(model(ids), after)
    if kind != "standard":
        assert set(record.meta.layer_notes) == {"trunk.blocks.0", "trunk.blocks.1"}


def test_masks_beside_an_order_and_sinks_reach_the_call():
    torch.manual_seed(0)
    layer = MultiheadAttention(8, 2, batch_first=True, add_zero_attn=True)
    model, x = nn.ModuleDict({"blocks": nn.ModuleList([layer])}), torch.randn(2, 5, 8)
    hidden = torch.zeros(2, 5, dtype=torch.bool)
    hidden[0, :2] = True
    calls = []
    with observe_attention(model, lambda call: calls.append(call)):
        layer(x, x, x, hidden, need_weights=False, is_causal=True)
    support = calls[0].support
    expected = torch.ones(5, 5, dtype=torch.bool).tril() & ~hidden[:, None, None, :]
    assert torch.equal(support.mask.expand(2, 1, 5, 5), expected)
    assert not support.causal
    assert torch.equal(support.sink, torch.zeros(1, 2))
    assert calls[0].name == "blocks.0"


def test_only_the_layers_of_the_model_are_heard_and_none_afterwards():
    inside, outside, x = EnergyBlock(8, 2), EnergyBlock(8, 2), torch.randn(1, 3, 8)
    model, calls = nn.ModuleDict({"only": inside}), []
    with observe_attention(model, lambda call: calls.append(call.name)) as observer:
        inside(x)
        outside(x)
    inside(x)
    assert calls == ["only"]
    assert observer.calls == 1
    assert attention_modules(model) == ["only"]


def test_our_layers_are_heard_inside_a_transformers_model_too():
    small = hf.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9)
    model, calls = hf.BertModel(small).eval(), []
    model.extra = EnergyBlock(8, 2)
    with observe_attention(model, lambda call: calls.append(call.name)) as observer:
        model.extra(model(torch.ones(1, 3, dtype=torch.long)).last_hidden_state)
    assert calls == ["encoder.layer.0.attention.self", "extra"]
    assert observer.calls == 2


def test_models_without_attention_and_changes_of_our_layers_are_refused():
    expected = "attach.model: expected a transformers model, or one with layers of cumulant.nn, got Linear"
    with pytest.raises(TypeError, match=re.escape(expected)), attach(nn.Linear(2, 2)):
        pass
    model = nn.ModuleDict({"block": ConvexBlock(4, 2)})
    said = pytest.raises(ValueError, match=re.escape("replace_attention(block): expected None, got another output"))
    with said, replace_attention(model, lambda call: call.output):
        model["block"](torch.zeros(1, 3, 4))


# ------------------------------------------------------------------ weights


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_our_layers(kind):
    model = language_model(kind)
    name = f"trunk.blocks.0{ENDING[kind]}"
    found = head_weights(model, name)
    assert isinstance(found, HeadWeights)
    assert found.query.shape == found.key.shape == found.value.shape == (2, 8, 16)
    tied = gradientness(found.query, found.key, found.value, found.output)
    if kind in ("convex", "energy"):
        torch.testing.assert_close(tied, torch.ones(2, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert found.hidden == (kind in ("energy", "equilibrium"))
    block: Any = model.trunk.blocks[0]
    if kind == "standard":
        gain = block.before_attention.weight.double()
        w = block.attention.in_proj_weight.double()[:16].reshape(2, 8, 16)
        torch.testing.assert_close(found.query, w * gain)
        out = block.attention.out_proj.weight.double()
        torch.testing.assert_close(found.output[1], out[:, 8:])
    if kind == "convex":
        torch.testing.assert_close(found.passed, block.norm.weight.double())


def test_ascent_index_of_a_convex_block_is_that_of_the_states_it_reads():
    """Written out with the covariance of N(x), gain included, whitened by hand."""
    model, ids = language_model("convex"), torch.randint(0, 257, (40, 20), generator=torch.Generator().manual_seed(2))
    with attach(model, ["entropy"]) as recorder:
        model(ids)
    found = with_weights(recorder.record(), model).weights["trunk.blocks.0.block/ascent_index"]
    block: Any = model.trunk.blocks[0]
    x = model.trunk.start(model.embedding(ids) + model.position[:20])
    u = block.norm(x).flatten(0, 1).double().numpy()
    value, basis = np.linalg.eigh(np.cov(u.T, bias=True))
    kept = value > 1e-6 * value.max()
    root = basis[:, kept] * np.sqrt(value[kept]) @ basis[:, kept].T
    inverse = basis[:, kept] / np.sqrt(value[kept]) @ basis[:, kept].T
    for head in range(2):
        w, k = (t[head].double().numpy() for t in (block.block.query, block.block.key))
        b, v = root @ w.T @ k @ root, inverse @ w.T @ k @ root
        expected = (v * b).sum() / np.linalg.norm(v) / np.linalg.norm(b)
        assert float(found[head]) == pytest.approx(expected, rel=1e-3)


# ------------------------------------------------------------------ loading


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_a_training_loads_as_it_was_saved(tmp_path, kind):
    model = language_model(kind)
    save_step(tmp_path, 7, model)
    state = torch.random.get_rng_state()
    loaded = load(tmp_path / "step-000007")
    assert torch.equal(torch.random.get_rng_state(), state)
    ids = torch.arange(12).reshape(1, 12)
    assert torch.equal(loaded.model(ids), model(ids))
    assert not loaded.model.training
    assert loaded.notes == ("step 7 of a training with seed 0",)
    assert loaded.tokenizer("abc")["input_ids"] == [loaded.tokenizer.get_vocab()[c] for c in "abc"]
    assert loaded.fingerprint == fingerprint_of(tmp_path / "step-000007")
    assert longest(loaded) == SMALL["context"]
    twin = random_twin(loaded, 5)
    assert isinstance(twin, LanguageModel)
    assert not torch.equal(twin(ids), model(ids))


def test_dtype_is_respected(run):
    assert load(run / "step-000000", dtype="float64").model.position.dtype == torch.float64


def test_directories_that_are_no_checkpoint_of_a_language_model(tmp_path):
    model = language_model("standard")
    save_step(tmp_path, 1, model, task="recall")
    with pytest.raises(ValueError, match=r"checkpoint of `cumulant train language`, got one of 'recall'"):
        load(tmp_path / "step-000001")
    save_step(tmp_path, 2, model, model={"block": "standard", "wide": 3})
    with pytest.raises(ValueError, match=r"got another config.json .*wide.* in .*step-000002"):
        load(tmp_path / "step-000002")
    save_step(tmp_path, 3, model)
    (tmp_path / "step-000003" / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match=r"a model.safetensors that cannot be read .* in .*step-000003"):
        load(tmp_path / "step-000003")
    save_step(tmp_path, 4, model)
    save_file({"a": torch.zeros(1)}, tmp_path / "step-000004" / "model.safetensors")
    with pytest.raises(ValueError, match=r"weights that do not fit config\.json"):
        load(tmp_path / "step-000004")
    save_step(tmp_path, 5, model, format=1)
    with pytest.raises(ValueError, match=rf"got format 1 instead of {FORMAT} in .*step-000005. Train it again"):
        load(tmp_path / "step-000005")


# ------------------------------------------------------------------ series


def test_the_command_leaves_records_a_table_and_a_page(observed, run):
    out, words = observed
    assert "4 steps, 2 attention modules, 4 heads, 200 tokens" in words
    steps = [path.name for path in sorted(run.iterdir())]
    assert sorted(path.name for path in (out / "series").iterdir()) == ["settings.json", *steps]
    table = pl.read_parquet(out / "series.parquet")
    assert table.columns == ["step", "layer", "name", "head", "stage", "quantity", "value", "std", "count", "null"]
    assert table["step"].unique().sort().to_list() == [0, 1, 4, 16]
    heads = table.filter(pl.col("head").is_not_null())
    key = ["step", "layer", "head", "quantity"]
    assert len(heads.unique(key)) == len(heads)
    for number in (0, 16):
        record = Record.load(out / "series" / f"step-{number:06d}")
        assert record.meta.step == number
        here = heads.filter((pl.col("step") == number) & (pl.col("quantity") == "entropy"))
        means = torch.cat([record.tallies[f"{layer.name}/entropy"].mean for layer in record.modules])
        np.testing.assert_allclose(here["value"], means, rtol=1e-12)
        tied = heads.filter((pl.col("step") == number) & (pl.col("quantity") == "gradientness"))
        numbers = torch.cat([record.weights[f"{layer.name}/gradientness"] for layer in record.modules])
        np.testing.assert_allclose(tied["value"], numbers, rtol=1e-12)
    states = table.filter(pl.col("head").is_null() & (pl.col("quantity") == "sliced_w2"))
    assert states["stage"].unique().sort().to_list() == ["in", "out"]
    assert states["null"].null_count() == 0
    assert (out / "report.html").stat().st_size > 50_000


def test_the_page_and_the_table_can_be_written_again(observed, tmp_path):
    place = tmp_path / "copy"
    shutil.copytree(observed[0], place)
    for name in ("series.parquet", "report.html"):
        (place / name).unlink()
    found = CliRunner().invoke(application(), ["report", str(place)])
    assert found.exit_code == 0, found.output
    for name in ("series.parquet", "report.html"):
        assert (place / name).read_bytes() == (observed[0] / name).read_bytes()


def test_where_there_is_no_room_steps_keep_their_means_alone(observed):
    records = {n: Record.load(observed[0] / "series" / f"step-{n:06d}") for n in (0, 4)}
    data = series_data(read_steps(records))
    least = condensed(data, DETAIL_LEVELS[-1])
    cells = least["series"]["parts"][0]["heads"][0]["values"]
    assert set(cells) == set(data["heads"][0]["values"])
    assert all(cell.keys() == {"value"} for cell in cells.values())
    assert least["heads"][0]["values"]["entropy"].keys() > {"value", "std"}


def test_a_series_goes_on_and_reads_a_step_once(run, text, observed, tmp_path):
    grown = tmp_path / "run"
    shutil.copytree(run / "step-000000", grown / "step-000000")
    out = tmp_path / "out"
    asked = ("--checkpoints", grown, "--text", text, "--out", out, *QUICK)
    assert command(*asked)[0] == 0
    first = {p: p.stat().st_mtime_ns for p in out.glob("series/step-*/*")}
    code, words = command(*asked)
    assert code == 2
    assert "one with a series. Pass --resume to go on with it" in words
    shutil.copytree(run / "step-000016", grown / "step-000016")
    assert command(*asked, "--resume")[0] == 0
    assert all(p.stat().st_mtime_ns == then for p, then in first.items())
    new, old = (load_file(d / "series" / "step-000016" / "moments.safetensors") for d in (out, observed[0]))
    assert all(torch.equal(new[k], t) for k, t in old.items())
    code, words = command(*asked, "--resume", "--seed", "3")
    assert code == 2
    assert "--resume: expected the settings of the series, got seed 3 where it was 0" in words
    weights = load_file(grown / "step-000016" / "model.safetensors")
    save_file(weights | {"position": weights["position"] + 1}, grown / "step-000016" / "model.safetensors")
    code, words = command(*asked, "--resume")
    assert code == 2
    assert "--resume: expected the weights that were observed, got step-000016 with others" in words
    assert command(*asked, "--force")[0] == 0


def test_an_interrupt_leaves_the_steps_that_are_finished(run, text, tmp_path, monkeypatch):
    from cumulant.observatory.runs import over_training

    once = over_training.observe

    def interrupted(loaded, *args, **kwargs):
        record = once(loaded, *args, **kwargs)
        if loaded.name == "step-000004":
            return replace(record, meta=replace(record.meta, complete=False))
        return record

    monkeypatch.setattr(over_training, "observe", interrupted)
    code, words = command("--checkpoints", run, "--text", text, "--out", tmp_path / "out", *QUICK)
    assert code == 130
    assert "Interrupted: the steps above are finished. The same command with --resume goes on." in words
    table = pl.read_parquet(tmp_path / "out" / "series.parquet")
    assert table["step"].unique().sort().to_list() == [0, 1]


@pytest.mark.long
def test_checkpoints_as_the_trainer_writes_them(text, tmp_path):
    run = tmp_path / "trainer"
    small = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 257}
    for number in (5, 10):
        torch.manual_seed(number)
        model = hf.GPT2LMHeadModel(hf.GPT2Config(**small, bos_token_id=256, eos_token_id=256))
        model.save_pretrained(run / f"checkpoint-{number}")
        (run / f"checkpoint-{number}" / "optimizer.pt").write_bytes(b"a pickle that is not read")
    (run / "runs").mkdir()
    asked = ("--checkpoints", run, "--text", text, "--out", tmp_path / "out", *QUICK)
    code, words = command(*asked)
    assert code == 2
    assert "expected a tokenizer beside the model, got none in checkpoint-5 or" in words
    (run / "tokenizer.json").write_text(tokenizer_json())
    (run / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    code, words = command(*asked, "--resume")
    assert code == 0, words
    table = pl.read_parquet(tmp_path / "out" / "series.parquet")
    assert table["step"].unique().sort().to_list() == [5, 10]
    assert "gradientness" in table["quantity"]


def test_directories_without_steps_with_two_or_with_others(run, tmp_path):
    with pytest.raises(ValueError, match="expected a directory with steps, got no such directory"):
        find_steps(tmp_path / "none")
    with pytest.raises(ValueError, match="expected step-N or checkpoint-N directories, got none"):
        find_steps(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="expected a directory with steps, got the file"):
        find_steps(tmp_path / "file")
    with pytest.raises(ValueError, match=re.escape(f"Name one training: {run}.")):
        find_steps(run.parent.parent)
    mixed = tmp_path / "mixed"
    save_step(mixed, 1, language_model("standard"))
    (mixed / "checkpoint-1").mkdir()
    with pytest.raises(ValueError, match="expected one directory a step, got checkpoint-1 and step-000001"):
        find_steps(mixed)
    (mixed / "checkpoint-1").rename(mixed / "checkpoint-2")
    with pytest.raises(ValueError, match=r"expected config\.json in every step, got checkpoint-2 without one"):
        agreed_model(find_steps(mixed))
    (mixed / "checkpoint-2" / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="got checkpoint-2 with one that cannot be read"):
        agreed_model(find_steps(mixed))
    (mixed / "checkpoint-2").rename(tmp_path / "elsewhere")
    save_step(mixed, 3, language_model("convex"))
    with pytest.raises(ValueError, match="got step-000003 with another model than step-000001"):
        agreed_model(find_steps(mixed))


def test_a_step_that_cannot_be_read_is_named(run, text, tmp_path):
    broken = tmp_path / "run"
    shutil.copytree(run, broken)
    (broken / "step-000004" / "model.safetensors").write_bytes(b"half a file")
    code, words = command("--checkpoints", broken, "--text", text, "--out", tmp_path / "out", *QUICK)
    assert code == 2
    assert "step-000004" in words
    assert "Traceback" not in words
    assert (tmp_path / "out" / "series" / "step-000001" / "record.json").is_file()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--null", "random"), "--null: expected no --checkpoints beside it, got both"),
        (("--ablate", "gaussian"), "--ablate: expected no --checkpoints beside it"),
        (("--text", "-"), "--checkpoints: expected texts that can be read at every step, got standard input"),
        (("--max-tokens", "0"), "--max-tokens: expected a number of tokens with --checkpoints, got 0"),
        (("smollm2",), "MODEL: expected no --checkpoints beside it"),
        (("--resume", "--force"), "--resume: expected no --force beside it"),
    ],
)
def test_options_that_do_not_go_together(run, tmp_path, more, words):
    code, said = command("--checkpoints", run, "--out", tmp_path / "out", *more)
    assert code == 2
    assert words in said
    assert not (tmp_path / "out").exists()


def test_a_place_that_holds_something_else_stays_as_it_is(tmp_path):
    (tmp_path / "record.json").write_text("{}")
    settings = SeriesSettings("text", "model")
    with pytest.raises(ValueError, match="one that already holds a record"):
        claim_series(tmp_path, settings, resume=False, force=True)
    place = tmp_path / "new"
    claim_series(place, settings, resume=True, force=False)
    claim_series(place, settings, resume=True, force=False)
    with pytest.raises(ValueError, match="got another text"):
        claim_series(place, settings._replace(text="other"), resume=True, force=False)
    (place / "series" / "settings.json").write_text("{}")
    with pytest.raises(ValueError, match="expected what a series wrote, got something else"):
        claim_series(place, settings, resume=True, force=False)


def test_steps_are_sorted_by_number_and_their_axis_follows_their_spacing(tmp_path):
    for name in ("checkpoint-1000", "checkpoint-200", "checkpoint-5", "step-x", ".step-7", "runs"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-3").write_text("a file")
    assert find_steps(tmp_path) == tuple(CheckpointDirectory(n, tmp_path / f"checkpoint-{n}") for n in (5, 200, 1000))
    assert log_spaced((0, 1, 2, 4, 8, 17, 35, 72, 147, 300))
    assert not log_spaced(range(0, 3000, 250))
    assert not log_spaced((7,))
    assert Settings(ObservationSettings("minilm"), checkpoints=tmp_path).directory.parent.name == "observed"


def test_step_zero_is_the_null_and_one_step_is_a_series_too(observed):
    out, _ = observed
    records = {n: Record.load(out / "series" / f"step-{n:06d}") for n in (0, 1, 4)}
    steps = read_steps(records)
    data = series_data(steps)
    assert data["series"]["steps"] == [0, 1, 4]
    assert len(data["series"]["parts"]) == 2
    first = data["series"]["parts"][0]["heads"][0]["values"]["entropy"]["value"]
    for heads in (data["series"]["parts"][1]["heads"], data["heads"]):
        assert heads[0]["values"]["entropy"]["null_random"] == first
    later = series_data({n: steps[n] for n in (1, 4)})
    assert "null_random" not in later["heads"][0]["values"]["entropy"]
    alone = series_data({4: steps[4]})
    assert alone["series"] == {"steps": [4], "log": False, "parts": []}
    assert {row["step"] for row in series_rows({4: steps[4]})} == {4}


# ------------------------------------------------------------------ the page


def slide(page, index: int) -> None:
    page.evaluate(
        "index => { const s = document.getElementById('step'); s.value = index; s.dispatchEvent(new Event('input')); }",
        index,
    )


def drawn(page, name: str) -> str:
    return page.inner_html(f"[data-figure='{name}'] .canvas")


def test_the_slider_changes_what_the_page_shows(visit, observed):
    out, _ = observed
    page = visit(out / "report.html")
    assert page.inner_text("#slider output") == "Step 16"
    names = ("heads", "states-rms", "distribution", "positions", "spectra")
    before = {name: drawn(page, name) for name in names}
    record = Record.load(out / "series" / "step-000000")
    slide(page, 0)
    assert page.inner_text("#slider output") == "Step 0"
    assert all(drawn(page, name) != old for name, old in before.items())
    assert page.inner_text("#chosen h3") == "Layer 0, head 0, step 0"
    mean = float(record.tallies[f"{record.modules[0].name}/entropy"].mean[0])
    assert f"{mean:.4g}" in page.inner_text("#chosen")
    slide(page, 3)
    assert {name: drawn(page, name) for name in names} == before


@pytest.mark.long
def test_curves_follow_the_chosen_head_and_lead_to_a_step(visit, observed):
    page = visit(observed[0] / "report.html")
    wanted = ("entropy", "log_normalizer", "first_mass", "ascent_index", "gradientness", "sliced_w2")
    before = {name: drawn(page, f"step-{name}") for name in wanted}
    page.click("[data-head='1.1']")
    assert all(drawn(page, f"step-{name}") != old for name, old in before.items() if name != "sliced_w2")
    assert "layer 1, head 1" in page.inner_text("[data-figure='step-entropy']")
    page.click("[data-figure='step-entropy'] [data-step='4']")
    assert page.inner_text("#slider output") == "Step 4"
    assert page.inner_text("#chosen h3") == "Layer 1, head 1, step 4"
    page.click("#steps summary")
    page.click("[data-sheet='steps'] tbody tr >> nth=1")
    assert page.inner_text("#slider output") == "Step 1"
    page.focus("#step")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#slider output") == "Step 4"


@pytest.mark.long
def test_the_page_plays_the_steps_in_order(visit, observed):
    page = visit(observed[0] / "report.html")
    page.click("#play")
    assert page.inner_text("#slider output") == "Step 0"
    page.locator("#slider output", has_text="Step 4").wait_for()
    page.click("#play")
    assert page.inner_text("#play") == "Play"


def test_a_narrow_screen_and_a_series_of_one_step(visit, observed, tmp_path):
    record = Record.load(observed[0] / "series" / "step-000004")
    render_series(read_steps({4: record}), tmp_path / "one.html")
    page = visit(tmp_path / "one.html", width=400)
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    assert page.inner_text("#slider output") == "Step 4"
