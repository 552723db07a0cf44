"""The logit lens and what is added to the stream, against plain computations on hidden states and weights; reasons
where a quantity is not defined."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from cumulant.nn.language_model import LanguageConfig, LanguageModel
from cumulant.observatory import attach
from cumulant.observatory.hooks import logit_lens, weights
from cumulant.observatory.hooks.contributions import CONTRIBUTION_TOKENS
from cumulant.observatory.record.record import Record
from cumulant.observatory.runs.repeated import with_probe
from cumulant.observatory.statistics.logit_lens import LENS
from cumulant.observatory.statistics.quantities import BASES, DEPTH
from cumulant.observatory.statistics.states import FIRST_TOKENS, unflatten
from cumulant.observatory.statistics.tally import Tally
from tests.compare import close
from tests.observatory.tiny_models import hf, hooks_of, inputs, make, model_config, randomise

AUTO = {"bert": hf.AutoModelForMaskedLM, "albert": hf.AutoModelForMaskedLM, "t5": hf.AutoModelForSeq2SeqLM}
AUTO |= {"whisper": hf.AutoModelForSpeechSeq2Seq}
DEPTH_NAMES = [q.name for q in DEPTH]


def language_model(kind: str, **changes: Any) -> Any:
    config = model_config(kind, 4, 2, 6, 2)
    for name, value in changes.items():
        setattr(config, name, value)
    return randomise(AUTO.get(kind, hf.AutoModelForCausalLM).from_config(config).eval(), 0).double()


def padded(kind: str) -> dict[str, Tensor]:
    """Sequences of 9, 5 and 9 tokens."""
    batch = inputs(kind, length=9)
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[1, 5:] = 0
    if kind == "whisper":
        return {**batch, "input_features": batch["input_features"].double()}
    return {**batch, "attention_mask": mask}


def observed(model: nn.Module, *batches: dict[str, Tensor], exact: bool = True) -> Record:
    with attach(model, "depth", exact_depth=exact) as recorder, torch.no_grad():
        for batch in batches:
            model(**batch)
    return recorder.record(weights=False)


def tally_of(record: Record, key: str) -> Tally:
    found = unflatten(record.hidden)[key]
    assert isinstance(found, Tally)
    return found


# ---------------------------------------------------------------------- logit lens


def gemma2_head(m: Any, h: Tensor) -> Tensor:
    cap = m.config.final_logit_softcapping
    return cap * torch.tanh(m.lm_head(m.model.norm(h)) / cap)


HEADS = {  # what each model does after its last block, written out
    "gpt2": lambda m, h: m.lm_head(m.transformer.ln_f(h)),
    "llama": lambda m, h: m.lm_head(m.model.norm(h)),
    "gemma2": gemma2_head,
    "granite": lambda m, h: m.lm_head(m.model.norm(h)) / m.config.logits_scaling,
    "cohere": lambda m, h: m.lm_head(m.model.norm(h)) * m.config.logit_scale,
    "opt": lambda m, h: m.lm_head(m.model.decoder.final_layer_norm(h)),
    "bert": lambda m, h: m.cls(h),
    "t5": lambda m, h: m.lm_head(m.decoder.final_layer_norm(h) * m.config.d_model**-0.5),
    "whisper": lambda m, h: m.proj_out(m.model.decoder.layer_norm(h)),
}
STACKS = {"gpt2": "transformer.h", "opt": "model.decoder.layers", "bert": "bert.encoder.layer", "t5": "decoder.block"}
STACKS |= {"whisper": "model.decoder.layers"}
SETTINGS = {"gemma2": {"final_logit_softcapping": 2.0}, "granite": {"logits_scaling": 3.0}}


def plain_lens(logits: Tensor, ids: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """name → (layers, …) means over tokens, from logits (layers, b, L, V)."""
    p = torch.softmax(logits, -1)
    last = p[-1].expand_as(p)
    values = {
        "lens_entropy": -(p * p.log()).sum(-1),
        "lens_kl": (last * (last / p).log()).sum(-1),
        "lens_agreement": (p.argmax(-1) == last.argmax(-1)).double(),
    }
    out = {name: value[:, rows].mean(1) for name, value in values.items()}
    both = rows[:, 1:] & rows[:, :-1]
    index = ids[:, 1:].expand(len(p), -1, -1)[..., None]
    out["lens_loss"] = -p[:, :, :-1].gather(-1, index)[..., 0].log()[:, both].mean(1)
    return out


@pytest.mark.parametrize("kind", HEADS)
def test_the_lens_is_the_head_of_the_model_on_its_hidden_states(kind):
    model, batch = language_model(kind, **SETTINGS.get(kind, {})), padded(kind)
    two_sided = kind in ("t5", "whisper")
    stack = STACKS.get(kind, "model.layers")
    blocks = list(model.get_submodule(stack))
    last: list[Tensor] = []
    handle = blocks[-1].register_forward_hook(
        lambda module, args, output: last.append(output if isinstance(output, Tensor) else output[0])
    )
    with torch.no_grad():
        out = model(**batch, output_hidden_states=True)
        handle.remove()
        hidden = out.decoder_hidden_states if two_sided else out.hidden_states
        states = torch.stack([*hidden[:-1], last[0]])  # what models call the last is behind the final norm
        logits = HEADS[kind](model, states)
    torch.testing.assert_close(logits[-1], out.logits, rtol=1e-9, atol=1e-9)
    ids = batch["decoder_input_ids" if two_sided else "input_ids"]
    rows = torch.ones_like(ids).bool() if two_sided else batch["attention_mask"].bool()
    record, expected = observed(model, batch), plain_lens(logits, ids, rows)
    cells = [f"{stack}.0/in", *(f"{stack}.{i}/out" for i in range(len(blocks)))]
    for name in [name for name in LENS if not (kind == "bert" and name == "lens_loss")]:
        found = [tally_of(record, f"{cell}/{name}") for cell in cells]
        assert {int(t.count) for t in found} == {int((rows[:, 1:]).sum() if name == "lens_loss" else rows.sum())}
        close(torch.cat([t.mean for t in found]), expected[name], 1e-9)
    words = {"bert": "does not predict the next one", "t5": "in encoder.block: "}
    words |= {"whisper": "in model.encoder.layers: "}
    assert words.get(kind, "") in record.meta.undefined.get("lens_loss", "")
    assert ("lens_loss" in record.meta.undefined) == (kind in words)


def test_the_lens_of_a_language_model_of_this_library():
    torch.manual_seed(0)
    model = LanguageModel(LanguageConfig(dim=16, heads=2, hidden=32, vocabulary=40, context=12)).eval().double()
    ids = torch.arange(24).reshape(2, 12)
    record = observed(model, {"input_ids": ids})
    with torch.no_grad():
        p = torch.softmax(model(ids), -1)
    last = [stage.block for stage in record.meta.stages][-1]
    close(tally_of(record, f"{last}/out/lens_entropy").mean, -(p * p.log()).sum(-1).mean()[None], 1e-9)
    assert not set(LENS) & record.meta.undefined.keys()


def test_logits_are_held_a_few_at_a_time(monkeypatch):
    model, batch = language_model("llama"), padded("llama")
    whole, sizes, tail = observed(model, batch), [], logit_lens.ModelTail.__call__
    monkeypatch.setattr(logit_lens, "MAX_LOGITS", 2 * 3 * 50)  # two tokens of three layers
    monkeypatch.setattr(logit_lens.ModelTail, "__call__", lambda self, x: sizes.append(len(x)) or tail(self, x))
    parts = observed(model, batch)
    assert max(sizes[1:]) == 6  # the first is the check against the logits of the pass
    for name in LENS:
        one, other = (tally_of(record, f"model.layers.0/out/{name}") for record in (whole, parts))
        assert one.count == other.count
        close(one.mean, other.mean, 1e-12)


# ---------------------------------------------------------------------- contributions

# attention module, output projection and norm behind it in a block; factor of the branches; whether blocks are parallel
ADDITIONS: dict[str, tuple[str, str, str | None]] = {
    "bert": ("attention.self", "attention.output.dense", None),
    "gpt2": ("attn", "attn.c_proj", None),
    "llama": ("self_attn", "self_attn.o_proj", None),
    "granite": ("self_attn", "self_attn.o_proj", None),
    "gemma2": ("self_attn", "self_attn.o_proj", "post_attention_layernorm"),
    "olmo2": ("self_attn", "self_attn.o_proj", "post_attention_layernorm"),
    "gpt_neox": ("attention", "attention.dense", None),
    "cohere": ("self_attn", "self_attn.o_proj", None),
}
CHANGED = {"granite": {"residual_multiplier": 0.3}}
STACKS |= {"gpt_neox": "gpt_neox.layers"}


@pytest.mark.parametrize("kind", ADDITIONS)
def test_contributions_are_those_of_the_vectors_written_out(kind):
    model, batch = language_model(kind, **CHANGED.get(kind, {})), padded(kind)
    attention, projection, norm = ADDITIONS[kind]
    name = f"{STACKS.get(kind, 'model.layers')}.1"
    block, seen = model.get_submodule(name), {}

    def keep(key: str):
        def hook(module, args, kwargs, output):
            first = args[0] if args else kwargs["hidden_states"]
            seen[key] = (first, output if isinstance(output, Tensor) else output[0])

        return hook

    watched = {"block": block, "output": block.get_submodule(projection)}
    watched |= {} if norm is None else {"norm": block.get_submodule(norm)}
    handles = [module.register_forward_hook(keep(key), with_kwargs=True) for key, module in watched.items()]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    rows = batch["attention_mask"].bool()
    (x, out), (o, made) = ((a[rows], b[rows]) for a, b in (seen["block"], seen["output"]))
    weight = watched["output"].weight.T if kind != "gpt2" else watched["output"].weight  # (heads · e, D)
    heads = torch.einsum("nhe,hed->hnd", o.unflatten(1, (4, -1)), weight.unflatten(0, (4, -1)))
    bias = watched["output"].bias if watched["output"].bias is not None else torch.zeros(())
    close(heads.sum(0) + bias, made, 1e-9)
    added = made
    if norm is not None:  # RMSNorm: a number of each token, and a gain
        gain = watched["norm"].weight + (1 if kind == "gemma2" else 0)
        before, added = (t[rows] for t in seen["norm"])
        heads = gain * heads / before.square().mean(-1, keepdim=True).sqrt()
        close(heads.sum(0), added, 1e-4)  # but for its epsilon, and it computes in single precision
    if kind == "granite":
        heads, added = 0.3 * heads, 0.3 * added
    update, cos = out - x, nn.functional.cosine_similarity
    record = observed(model, batch)
    size, cosine = (record.tallies[f"{name}.{attention}/{q}"] for q in DEPTH_NAMES)
    assert size.count.tolist() == cosine.count.tolist() == [int(rows.sum())] * 4
    tolerance = 1e-9 if norm is None else 1e-4
    close(size.mean, (heads.norm(dim=-1) / x.norm(dim=-1)).mean(1), tolerance)
    close(cosine.mean, cos(heads, update.expand_as(heads), -1).mean(1), tolerance)

    def sublayer(name_: str) -> list[Tensor]:
        return [tally_of(record, f"{name}/out/{name_}_{q}").mean for q in DEPTH_NAMES]

    close(sublayer("attention")[0], (added.norm(dim=-1) / x.norm(dim=-1)).mean()[None], 1e-9)
    close(sublayer("attention")[1], cos(added, update, -1).mean()[None], 1e-9)
    mlp, stream = update - added, x if kind in ("gpt_neox", "cohere") else x + added
    if kind == "bert":
        stream = block.attention.output.LayerNorm(x + added)
        mlp = block.output.dense(block.intermediate(stream))
    close(sublayer("mlp")[0], (mlp.norm(dim=-1) / stream.norm(dim=-1)).mean()[None], 1e-9)
    close(sublayer("mlp")[1], cos(mlp, update, -1).mean()[None], 1e-9)
    assert not set(DEPTH_NAMES) & record.meta.undefined.keys()


def test_cross_attention_adds_on_its_own():
    record = observed(language_model("t5"), padded("t5"))
    kinds = {key.rpartition("/")[2] for key in unflatten(record.hidden) if key.startswith("decoder.block.1/out/")}
    assert {f"{s}_contribution" for s in ("attention", "cross_attention", "mlp")} <= kinds
    assert record.tallies["decoder.block.1.layer.1.EncDecAttention/contribution"].count.tolist() == [3 * 7] * 4


# ---------------------------------------------------------------------- records


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_records_of_parts_merge_to_the_record_of_the_whole(kind):
    model, one, other = language_model(kind), padded(kind), inputs(kind, length=9, seed=1)
    whole = observed(model, one, other)
    both = observed(model, one).merge(observed(model, other))
    for key in whole.tallies:
        assert torch.equal(whole.tallies[key].count, both.tallies[key].count)
        assert torch.equal(whole.tallies[key].histogram, both.tallies[key].histogram)
        close(whole.tallies[key].mean, both.tallies[key].mean, 1e-12)
    merged = unflatten(both.hidden)
    depth = {k: t for k, t in unflatten(whole.hidden).items() if "lens" in k or "contribution" in k}
    assert len(depth) >= 20
    for key, found in depth.items():
        tally = merged[key]
        assert isinstance(tally, Tally)
        assert isinstance(found, Tally)
        assert torch.equal(tally.count, found.count)
        close(tally.mean, found.mean, 1e-12)


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "bert", "whisper", "gpt_neox"])
def test_the_model_does_not_notice(kind):
    model, batch = language_model(kind).float(), padded(kind)
    batch = {name: x.float() if x.is_floating_point() else x for name, x in batch.items()}
    hooks, before = hooks_of(model), {name: w.clone() for name, w in model.state_dict().items()}
    with torch.no_grad():
        alone = model(**batch).logits
        with attach(model, exact_depth=True):
            attached = model(**batch).logits
        after = model(**batch).logits
    assert torch.equal(alone, attached)
    assert torch.equal(alone, after)
    assert hooks_of(model) == hooks
    assert all(torch.equal(w, before[name]) for name, w in model.state_dict().items())


def test_the_sample_depends_on_texts_and_not_on_batches():
    model = language_model("llama")
    ids = torch.randint(3, 50, (6, 60), generator=torch.Generator().manual_seed(0))
    records = []
    for size in (6, 2):
        with attach(model, "depth") as recorder, torch.no_grad():
            for texts in torch.arange(6).split(size):
                recorder.batch(texts, torch.zeros_like(texts), covariance_share=1.0)
                model(input_ids=ids[texts])
        records.append(recorder.record(weights=False))
    key = "model.layers.1.self_attn/contribution"
    one, other = (record.tallies[key] for record in records)
    assert one.count.tolist() == other.count.tolist()
    assert FIRST_TOKENS <= int(one.count[0]) < 6 * 60 / 4
    close(one.mean, other.mean, 1e-12)
    lens = [tally_of(record, "model.layers.0/out/lens_kl") for record in records]
    assert FIRST_TOKENS <= int(lens[0].count) == int(lens[1].count) <= int(one.count[0])
    close(lens[0].mean, lens[1].mean, 1e-12)
    assert str(CONTRIBUTION_TOKENS) in BASES["added"].words
    assert str(logit_lens.LENS_TOKENS) in BASES["lens"].words
    assert all(f" {FIRST_TOKENS} of the first text" in BASES[basis].words for basis in ("lens", "added"))


# ---------------------------------------------------------------------- not defined here


def reasons(kind: str, model: nn.Module | None = None, **options: Any) -> dict[str, str]:
    model = make(kind) if model is None else model
    with attach(model, **options) as recorder, torch.no_grad():
        model(**inputs(kind))
    return recorder.record(weights=False).meta.undefined


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("bert", "lens_entropy", "BertModel has no language head"),
        ("llama", "next_mass", "causal"),
        ("llama", "delimiter_mass", "pass their ids as delimiters"),
        ("llama", "sink_mass", "no learned sink"),
        ("vit", "lens_kl", "ViTModel has no language head"),
        ("vit", "previous_mass", "parts of an image"),
        ("vit", "same_token_mass", "ids of its keys are not known"),
        ("t5", "previous_mass", "in 2 of 6 attention modules, such as decoder.block.0.layer.1.EncDecAttention"),
        ("gemma2_capped", "max_score", "capped"),
    ],
)
def test_what_is_not_defined_says_why(kind, name, words):
    assert words in reasons(kind)[name]


def test_models_whose_depth_cannot_be_seen_say_why():
    albert = language_model("albert").float()
    assert "several times" in reasons("albert", albert)["lens_entropy"]
    assert reasons("llama", quantities="depth", hidden_states=False) == dict.fromkeys(
        DEPTH_NAMES, "hidden states are not observed"
    )
    model = language_model("llama").float()
    with attach(model, "depth") as recorder, torch.no_grad():
        model(**inputs("llama"), logits_to_keep=1)
    assert "logits of all" in recorder.record(weights=False).meta.undefined["lens_kl"]
    embedded = language_model("llama").float()
    with attach(embedded, "depth") as recorder, torch.no_grad():
        embedded(inputs_embeds=torch.randn(2, 5, 24))
    assert recorder.record(weights=False).meta.undefined == {
        "lens_loss": "the ids of the tokens were not given to the model"
    }


def test_a_head_that_adds_something_else_is_refused():
    class Skewed(type(language_model("llama"))):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits + torch.linspace(0, 1, out.logits.shape[1])[None, :, None]  # by position
            return out

    model = language_model("llama").float()
    model.__class__ = Skewed
    assert "do not follow from what its last block returns" in reasons("llama", model)["lens_entropy"]


def test_heads_that_do_not_reach_the_stream_in_a_known_way_say_so(monkeypatch):
    model = make("llama")
    gate = model.layers[1].self_attn.register_forward_hook(lambda m, args, output: (output[0].tanh(), *output[1:]))
    found = reasons("llama", model)["contribution"]
    assert found.startswith("in 1 of 2 attention modules, such as layers.1.self_attn: between its output projection")
    gate.remove()
    assert "contribution" not in reasons("llama", model)
    monkeypatch.setattr(weights, "OUTPUT_PROJECTIONS", ("out",))
    assert reasons("llama", model)["contribution"] == (
        "LlamaAttention has no output projection by a known name, nor has its parent"
    )


@pytest.mark.parametrize(
    ("kind", "words"), [("bert", "sees the token that follows"), ("t5", "two sequences"), ("vit", "no token ids")]
)
def test_the_induction_test_says_why_it_was_not_made(kind, words):
    model = make(kind)
    with attach(model) as recorder, torch.no_grad():
        model(**inputs(kind))
    assert words in with_probe(recorder.record(weights=False), model).meta.undefined["repeated_induction"]
