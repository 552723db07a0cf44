"""The numbers of an audit against attention written out in float64, and the run that can be stopped."""

import math
from typing import Any

import pytest
import torch

from tests.cache.prefixes import decoder, hf, ids, read_by

pytest.importorskip("safetensors", reason="install cumulant[hf] for caches")

from cumulant.cache.audit import AuditRecord, AuditText, audit
from cumulant.cache.audit.continuation import logits_after, read_on, sampled_tokens
from cumulant.cache.audit.head_errors import HeadErrors, head_errors, held_tokens, lost_attention, read_full
from cumulant.cache.audit.summary import overhead, ratio
from cumulant.cache.audit.token_errors import full_predictions, token_errors
from cumulant.cache.compressor import Compressed, compress_prefix
from cumulant.cache.entries import HeadEntries
from cumulant.cache.prefix import on_cumulant, prefill
from cumulant.observatory.hooks.weights import head_outputs

T, N = 40, 24


def merged(prefix: Any) -> list[list[HeadEntries]]:
    """Heads of different lengths: some tokens as they were, and pairs of others merged, with mass."""
    out = []
    for layer in prefix.layers:
        heads = []
        for number, (keys, values) in enumerate(zip(layer.keys, layer.values, strict=True)):
            stay = torch.arange(0, 10 + 3 * number)
            pairs = torch.arange(20, 32).view(-1, 2)
            heads.append(
                HeadEntries(
                    torch.cat([keys[stay], keys[pairs].mean(1)]),
                    torch.cat([values[stay], values[pairs].mean(1)]),
                    torch.cat([torch.zeros(len(stay)), torch.full((6,), math.log(2.0))]),
                    torch.cat([stay, torch.full((6,), -1)]),
                )
            )
        out.append(heads)
    return out


def scored(query: torch.Tensor, keys: Any, values: Any, masses: Any = None) -> list[tuple[float, torch.Tensor]]:
    """⟨η, k⟩ + w and v of every key."""
    masses = [0.0] * len(keys) if masses is None else masses
    triples = zip(keys, values, masses, strict=False)
    return [(float(query @ k.double()) + float(w), v.double()) for k, v, w in triples]


def written_out(layer: Any, entries: Any, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> list:
    """Of every head and query: ΔG, missed attention, o and ô, by sums over lists of numbers in float64."""
    rows = []
    for head in range(len(queries)):
        group = head // layer.groups
        own = entries[group]
        held = {int(p) for p in own.positions if p >= 0}
        for t, query in enumerate(queries[head].double()):
            local = scored(query, keys[group, : t + 1], values[group])
            before = scored(query, layer.keys[group], layer.values[group])
            kept = scored(query, own.keys, own.values, own.log_mass)
            z, z_kept = (sum(math.exp(s) for s, _ in pairs) for pairs in (before + local, kept + local))
            o, o_kept = (
                sum(math.exp(s) / total * v for s, v in pairs)
                for pairs, total in ((before + local, z), (kept + local, z_kept))
            )
            missed = sum(math.exp(s) / z for j, (s, _) in enumerate(before) if j not in held)
            rows.append((math.log(z_kept / z), missed, o, o_kept))
    return rows


@pytest.fixture(scope="module")
def read() -> Any:
    model = decoder()
    tokens = ids(T + N)
    with on_cumulant(model):
        prefix = prefill(model, tokens[:T])
        full = read_on(prefix, tokens[T:])
        yield model, tokens, prefix, full


# ---------------------------------------------------------------------- heads


def test_head_errors_are_those_of_sums_written_out_in_float64(read: Any):
    model, _, prefix, full = read
    for layer, asked, entries in zip(prefix.layers, full.layers, merged(prefix), strict=True):
        outputs = head_outputs(model, layer.name)
        found = head_errors(layer, entries, read_full(layer, asked), outputs, asked.stream)
        rows = written_out(layer, entries, asked.queries, asked.keys, asked.values)
        gap, missed = (torch.tensor([row[i] for row in rows], dtype=torch.float64).view(4, N) for i in (0, 1))
        o, o_kept = (torch.stack([row[i] for row in rows]).view(4, N, 8) for i in (2, 3))
        wrong = torch.einsum("hqe,hde->hqd", o_kept - o, outputs)
        expected = {
            "queries": torch.full((4,), float(N), dtype=torch.float64),
            "gap": gap.sum(1),
            "size": gap.abs().sum(1),
            "missed": missed.sum(1),
            "error": (o_kept - o).square().sum((1, 2)),
            "output": o.square().sum((1, 2)),
            "written": wrong.square().sum((1, 2)),
            "joint": wrong.sum(0).square().sum().expand(4),
        }
        for name, value in expected.items():
            torch.testing.assert_close(getattr(found, name), value, atol=1e-6, rtol=1e-6, msg=name)


def test_full_outputs_are_those_that_the_model_itself_computes(read: Any):
    """What goes into W_O in the pass of the model, and, in the first layer, in that with the compressed cache."""
    model, tokens, prefix, full = read
    seen: list[torch.Tensor] = []
    projection = model.model.layers[0].self_attn.o_proj
    handle = projection.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    try:
        model(input_ids=tokens[None, T:], past_key_values=prefix.copy_cache())
        entries = merged(prefix)
        cache = Compressed(entries, 1, 1, 0.0).cache(prefix)
        logits_after(prefix, cache, tokens[T:])
    finally:
        handle.remove()
    layer, asked = prefix.layers[0], full.layers[0]
    reading = read_full(layer, asked)
    whole, small = (x.view(N, 4, 8).transpose(0, 1).double() for x in seen)
    torch.testing.assert_close(reading.output, whole, atol=1e-5, rtol=1e-5)
    found = head_errors(layer, entries[0], reading, None)
    torch.testing.assert_close(found.error, (small - whole).square().sum((1, 2)), atol=1e-5, rtol=1e-4)


def test_of_eviction_the_gap_is_the_logarithm_of_what_is_not_missed(read: Any):
    _, tokens, prefix, _ = read
    full = read_on(prefix, tokens[T : T + 1])  # one query, so that sums are its numbers
    small = compress_prefix(prefix, "snapkv", 0.3)
    for layer, asked, entries in zip(prefix.layers, full.layers, small.layers, strict=True):
        found = head_errors(layer, entries, read_full(layer, asked))
        torch.testing.assert_close(found.gap, torch.log1p(-found.missed), atol=1e-12, rtol=0)
        assert (found.gap < 0).all()


def test_a_whole_cache_has_no_errors(read: Any):
    _, tokens, prefix, full = read
    whole = compress_prefix(prefix, "stream", 1.0)
    for layer, asked, entries in zip(prefix.layers, full.layers, whole.layers, strict=True):
        found = head_errors(layer, entries, read_full(layer, asked))
        for name in ("gap", "size", "missed", "error", "written", "joint"):
            assert getattr(found, name).abs().amax() < 1e-12, name
    logits, _ = logits_after(prefix, whole.cache(prefix), tokens[T:])
    assert token_errors(full_predictions(full.logits, tokens[T:]), logits).kl.abs().amax() < 1e-6


def test_errors_of_heads_that_cancel_are_seen_only_apart(read: Any):
    """Two heads that write opposite errors: each is damaged, the layer is not."""
    _, _, prefix, full = read
    layer, asked = prefix.layers[0], full.layers[0]
    reading = read_full(layer, asked)
    opposite = torch.cat([torch.eye(8), -torch.eye(8), torch.zeros(2 * 8, 8)]).view(4, 8, 8).double()
    alike = layer._replace(queries=layer.queries[:1].expand(4, -1, -1), keys=layer.keys[:1].expand(2, -1, -1))
    alike = alike._replace(values=layer.values[:1].expand(2, -1, -1))
    asked = asked._replace(
        queries=asked.queries[:1].expand(4, -1, -1),
        keys=asked.keys[:1].expand(2, -1, -1),
        values=asked.values[:1].expand(2, -1, -1),
    )
    found = head_errors(alike, [merged(prefix)[0][0]] * 2, read_full(alike, asked), opposite)
    assert found.written[:2].amin() > 1e-4
    assert found.joint.amax() < 1e-20
    assert reading.output.shape == (4, N, 8)


def test_sinks_of_a_model_take_their_part_of_attention():
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    model = decoder("GptOss", layer_types=["full_attention", "full_attention"], **experts)
    tokens = ids(T + 4)
    with on_cumulant(model):
        prefix = prefill(model, tokens[:T])
        full = read_on(prefix, tokens[T:])
        small = compress_prefix(prefix, "h2o", 0.5)
    layer, asked = prefix.layers[0], full.layers[0]
    assert layer.sinks is not None
    reading = read_full(layer, asked)
    scores = asked.queries.double() @ layer.keys.double().repeat_interleave(2, 0).mT
    new = asked.queries.double() @ asked.keys.double().repeat_interleave(2, 0).mT
    new = new.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), -torch.inf)
    sinks = layer.sinks.double()[:, None, None].expand(-1, 4, 1)
    torch.testing.assert_close(reading.log_normalizer, torch.cat([scores, new, sinks], -1).logsumexp(-1))
    found = head_errors(layer, small.layers[0], reading)
    assert (found.missed > 0).all()


def test_attention_that_is_lost_is_that_of_tokens_that_are_not_held(read: Any):
    _, _, prefix, full = read
    layer, asked, entries = prefix.layers[0], full.layers[0], merged(prefix)[0]
    held = held_tokens(layer, entries)
    assert [row.nonzero()[:, 0].tolist() for row in held] == [list(range(10)), list(range(13))]
    reading = read_full(layer, asked)
    lost = lost_attention(layer, entries, reading.attention)
    assert lost[:10].sum() == 0
    expected = head_errors(layer, entries, reading).missed.sum()
    assert float(lost.sum()) == pytest.approx(float(expected), rel=1e-10)


def test_sampled_queries_are_among_all(read: Any):
    _, tokens, prefix, full = read
    some = read_on(prefix, tokens[T:], 5)
    at = sampled_tokens(N, 5)
    assert at.tolist() == [4, 9, 14, 19]
    torch.testing.assert_close(some.layers[1].queries, full.layers[1].queries[:, at])


# ---------------------------------------------------------------------- predictions


def test_token_errors_are_those_of_torch():
    generator = torch.Generator().manual_seed(0)
    full, small = (torch.randn(70, 30, generator=generator) for _ in range(2))
    following = torch.randint(30, (70,), generator=generator)
    found = token_errors(full_predictions(full, following), small)
    p, q = full.double().log_softmax(-1), small.double().log_softmax(-1)
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(found.kl, kl, atol=1e-6, rtol=0)  # probabilities are held in single precision
    nll = torch.nn.functional.cross_entropy(small.double(), following, reduction="none")
    torch.testing.assert_close(found.nll, nll, atol=1e-12, rtol=0)
    assert found.agrees.tolist() == (full.argmax(-1) == small.argmax(-1)).double().tolist()


# ---------------------------------------------------------------------- the run


def tiny() -> Any:
    return read_by(decoder(vocab_size=128, max_position_embeddings=4096))


TEXTS = [AuditText(f"text {i}", "text", f"The {i}th of many texts, each unlike the others. " * 60) for i in range(3)]
OPTIONS: dict[str, Any] = {"prefix": 900, "continuation": 40, "documents": 3}


def same(a: HeadErrors, b: HeadErrors) -> bool:
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def test_an_audit_that_is_stopped_goes_on(tmp_path: Any):
    class StoppedError(Exception):
        pass

    steps: list[tuple[int, int, str]] = []

    def stop(done: int, total: int, words: str) -> None:
        steps.append((done, total, words))
        if words.startswith("text 1: read"):
            raise StoppedError

    chosen = {"compressor": ["stream", "h2o"], "keep": [0.5, 0.25]}
    with pytest.raises(StoppedError):
        audit(tiny(), TEXTS, **chosen, **OPTIONS, directory=tmp_path / "a", progress=stop)
    assert [done for done, _, _ in steps] == list(range(1, 11))  # 1 + 2 · 2 · 2 a window
    assert {total for _, total, _ in steps} == {27}
    words: list[str] = []
    found = audit(
        tiny(), TEXTS, **chosen, **OPTIONS, directory=tmp_path / "a", progress=lambda d, n, w: words.append(w)
    )
    assert words[0] == "text 0: was measured before"
    assert len(words) == 19
    whole = audit(tiny(), TEXTS, **chosen, **OPTIONS)
    read = AuditRecord.load(tmp_path / "a")
    for method in whole.methods:
        for one, two, three in zip(*(r.results(method) for r in (whole, found, read)), strict=True):
            assert same(one.heads, two.heads)
            assert same(one.heads, three.heads)
            assert torch.equal(one.tokens.kl, three.tokens.kl)
            assert one.answers == three.answers
            assert one.worst == three.worst
    assert read.settings == found.settings
    assert str(read) == str(found)
    with pytest.raises(ValueError, match=r"expected the same audit, got one with keeps \(0\.5,\) in place of"):
        audit(tiny(), TEXTS, ["stream", "h2o"], keep=[0.5], **OPTIONS, directory=tmp_path / "a")
    with pytest.raises(ValueError, match="expected the window of text 1, got another, of text 0"):
        audit(tiny(), TEXTS[1:] + TEXTS[:1], **chosen, **OPTIONS, directory=tmp_path / "a")


def test_rows_of_the_table(tmp_path: Any):
    found = audit(tiny(), TEXTS, ["stream", "snapkv"], keep=[1.0, 0.25], **OPTIONS)
    rows = {row.method: row for row in found.rows()}
    whole, small = rows[found.methods[0]], rows[found.methods[1]]
    assert whole.keep == 1
    assert abs(whole.kl.value) < 1e-6
    assert whole.agreement.value == 1
    assert small.keep <= 0.25
    assert small.kl.value > 0
    assert small.kl.low <= small.kl.value <= small.kl.high
    assert [*small.kl_at] == [32, 40]
    assert 0 < small.missed.value < 1
    assert sum(row.lowest for row in rows.values() if row.method.keep == 0.25) == 3
    by_hand = [r.tokens.kl.mean().item() for r in found.results(small.method)]
    assert small.kl.value == pytest.approx(sum(by_hand) / 3)
    heads = found.heads(small.method)
    assert [head.rank for head in heads] == list(range(1, 9))
    assert sorted((head.layer, head.head) for head in heads) == [(a, b) for a in range(2) for b in range(4)]
    assert heads[0].damage == max(head.damage for head in heads)
    assert overhead(found) > 0
    full = [w.answers["code"][1] for w in found.windows]
    assert full == [8, 8, 8]


def test_the_sentence_of_one_method_says_what_and_where():
    found = audit(tiny(), TEXTS[:1], "h2o", keep=0.25, prefix=300, continuation=20, retrieval=False)
    sentence = str(found)
    assert sentence.startswith("h2o holds 25.0% of the bytes of the cache of tiny: after 300 tokens of 1 document, ")
    head = found.heads(found.methods[0])[0]
    assert f"layer {head.layer}, head {head.head}" in sentence
    assert "finds" not in sentence


def test_intervals_are_of_ratios_over_draws_of_documents():
    found = ratio([1.0, 3.0, 8.0], [1.0, 1.0, 2.0])
    assert found.value == 3
    assert found.low < 3 < found.high
    assert math.isnan(ratio([1.0], [2.0]).low)
    assert math.isnan(ratio([0.0, 0.0], [0.0, 0.0]).value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"keep": 0}, r"audit\.keep: expected a share above 0 and at most 1, got 0"),
        ({"keep": [0.5, 1.2]}, r"audit\.keep: expected a share above 0 and at most 1, got 1\.2"),
        ({"compressor": "magic"}, "compressor: expected backtest or one of adakv, d2o-like, expected"),
        ({"compressor": []}, r"audit\.compressor: expected at least one compressor, got none"),
        ({"compressor": ["h2o", "h2o"]}, r"audit\.compressor: expected different names"),
        ({"prefix": 4000, "continuation": 200}, r"expected at most 4096 tokens, got 4000 \+ 200"),
        ({"prefix": 3900}, r"audit\.texts: expected a text of at least 3941 tokens"),
        ({"prefix": 1}, r"audit\.prefix: expected at least 2, got 1"),
        ({"prefix": 200, "retrieval": True}, r"retrieval\.prefix: expected at least \d+ tokens, got 200"),
        ({"model": "whatever"}, "load.name: expected"),
    ],
)
def test_bad_input_is_refused_in_words(changes: dict[str, Any], sentence: str):
    given = {"model": tiny(), "texts": TEXTS, "compressor": "stream", "keep": 0.5, "documents": 1, "continuation": 40}
    given |= {"prefix": 300, "retrieval": False} | changes
    with pytest.raises(ValueError, match=sentence):
        audit(**given)


def test_models_without_a_cache_are_refused():
    config = hf.BertConfig(vocab_size=128, hidden_size=24, num_hidden_layers=1, num_attention_heads=3)
    with pytest.raises(ValueError, match="expected a decoder with a language-model head, got BertModel"):
        audit(read_by(hf.BertModel(config)), TEXTS)
    latent = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    small = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "head_dim": None}
    with pytest.raises(ValueError, match=r"with latent attention \(MLA\)"):
        audit(read_by(decoder("DeepseekV3", vocab_size=128, **latent, **small)), TEXTS)
    with pytest.raises(TypeError, match=r"audit\.model: expected a model of transformers or its name, got int"):
        audit(3, TEXTS)
    with pytest.raises(ValueError, match=r"audit\.tokenizer: expected a tokenizer, got None"):
        audit(decoder(), TEXTS)


def test_a_directory_with_other_files_is_left_alone(tmp_path: Any):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="expected an empty directory or an audit, got other files"):
        audit(tiny(), TEXTS, **OPTIONS, directory=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
