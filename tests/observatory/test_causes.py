"""What a model loses without heads: against plain hooks on its projections, rules of verdicts, and known circuits."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional

from cumulant.observatory.models.load import Loaded
from cumulant.observatory.report.causes import (
    CONFIRMED,
    EXPECTATIONS,
    MEASURES,
    NOT_CONFIRMED,
    RULES,
    causes_part,
    judgements,
    random_heads_confirmed,
    read_causes,
)
from cumulant.observatory.runs.causes import HeadEffects, head_effects, random_heads
from cumulant.observatory.runs.interventions import ReplacingPasses, removed_output
from cumulant.observatory.runs.repeated import repeated_tokens
from cumulant.observatory.statistics.clusters import clustered_mean
from cumulant.observatory.statistics.head_types import HEAD_TYPES
from cumulant.observatory.text.windows import Batch, batches
from tests.observatory.effects import TEN, rows_of
from tests.observatory.induction_model import LENGTH, VOCABULARY, trained_model
from tests.observatory.tiny_models import hooks_of, language_model, letter_tokenizer, make

TEXTS = [f"{i} head of {i * i} is an average of values, and of {i + 3} more"[: 15 + 4 * i] for i in range(9)]
SIZES = {"max_tokens": 150, "max_length": 20, "batch_size": 4}


def loaded(model, tokenizer=None) -> Loaded:
    return Loaded(model, tokenizer or letter_tokenizer(), "tiny", "", "")


def read() -> list[Batch]:
    found = list(batches(TEXTS, letter_tokenizer(), **SIZES, spread=True))
    assert any(bool((batch.attention_mask == 0).any()) for batch in found), "some padding"
    return found


def effect(found: HeadEffects, layer: int, head: int, replacement: str = "removed", measure: str | None = None):
    rows = [r for r in found.rows if (r.layer, r.head, r.replacement) == (layer, head, replacement) and not r.random]
    return next(r for r in rows if measure in (None, r.measure))


# ---------------------------------------------------------------------- against plain hooks


def test_removing_a_head_is_zero_in_the_input_of_the_projection():
    """Of a decoder with two queries to a key: change of the loss, and of that on the second copy."""
    model, (layer, head, width) = language_model(), (1, 2, 6)
    found = head_effects(loaded(model), TEXTS, [(layer, head)], controls=0, **SIZES)

    def cut(module, args):
        x = args[0].clone()
        x[..., head * width : (head + 1) * width] = 0
        return (x,)

    def text_loss() -> tuple[float, int]:
        total, count = 0.0, 0
        for batch in read():
            labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
            scored = int((labels[:, 1:] != -100).sum())
            total += float(model(**batch.inputs(), labels=labels).loss) * scored
            count += scored
        return total / count, count

    length = 12
    ids = repeated_tokens(50, length=length, sequences=8, excluded=tuple(letter_tokenizer().all_special_ids))

    def repeated_loss() -> float:
        logits = model(ids).logits[:, length:-1]
        return float(functional.cross_entropy(logits.flatten(0, 1), ids[:, length + 1 :].flatten()))

    before, count = text_loss()
    repeated_before = repeated_loss()
    handle = model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(cut)
    without, repeated_without = text_loss()[0], repeated_loss()
    handle.remove()
    row = effect(found, layer, head, measure="loss")
    assert row.effect == pytest.approx(without - before, abs=1e-5)
    assert row.count == count
    assert found.baseline["loss"] == pytest.approx(before, rel=1e-6)
    assert found.baseline["repeated_loss"] == pytest.approx(repeated_before, rel=1e-6)
    change = effect(found, layer, head, measure="repeated_loss").effect
    assert change == pytest.approx(repeated_without - repeated_before, abs=1e-5)
    assert row.low < row.effect < row.high
    assert not hooks_of(model)
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("replacement", ["removed", "uniform"])
def test_heads_of_a_padded_encoder(replacement):
    """0, or the mean of the values of all tokens but padding, in the input of the projection."""
    model, (layer, head, width) = make("bert"), (0, 1, 8)
    found = head_effects(loaded(model), TEXTS, [(layer, head)], controls=0, **SIZES)
    attention = model.encoder.layer[layer].attention
    values, away = [], []
    for batch in read():
        mask = batch.attention_mask[..., None]

        def cut(module, args, mask=mask):
            x = args[0].clone()
            part = slice(head * width, (head + 1) * width)
            x[..., part] = 0
            if replacement == "uniform":
                value = values[-1][..., part]
                x[..., part] = ((value * mask).sum(1) / mask.sum(1))[:, None]
            return (x, *args[1:])

        def pooled(batch=batch, mask=mask):
            return (model(**batch.inputs()).last_hidden_state * mask).sum(1)

        plain = pooled()
        handles = [
            attention.self.value.register_forward_hook(lambda m, args, out: values.append(out)),
            attention.output.dense.register_forward_pre_hook(cut),
        ]
        away += (1 - torch.cosine_similarity(plain.double(), pooled().double())).tolist()
        for handle in handles:
            handle.remove()
    row = effect(found, layer, head, replacement)
    assert row.measure == "embedding"
    assert row.effect == pytest.approx(sum(away) / len(away), abs=1e-6)
    assert row.count == len(away)
    assert found.baseline == {}


def test_making_a_head_of_a_decoder_uniform_is_the_running_mean_of_its_values():
    model, (layer, head, width) = language_model(), (0, 3, 6)
    found = head_effects(loaded(model), TEXTS, [(layer, head)], controls=0, **SIZES)
    attention, values = model.model.layers[layer].self_attn, []

    def cut(module, args):
        x, value = args[0].clone(), values[-1][..., (head // 2) * width : (head // 2 + 1) * width]
        count = torch.arange(1, x.shape[1] + 1)[:, None]
        x[..., head * width : (head + 1) * width] = value.cumsum(1) / count
        return (x,)

    def loss() -> float:
        total, count = 0.0, 0
        for batch in read():
            labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
            scored = int((labels[:, 1:] != -100).sum())
            total, count = total + float(model(**batch.inputs(), labels=labels).loss) * scored, count + scored
        return total / count

    before = loss()
    attention.v_proj.register_forward_hook(lambda m, args, out: values.append(out))
    attention.o_proj.register_forward_pre_hook(cut)
    assert effect(found, layer, head, "uniform", "loss").effect == pytest.approx(loss() - before, abs=1e-5)


def test_logits_that_are_left_out_change_nothing(monkeypatch):
    model = language_model()
    some = head_effects(loaded(model), TEXTS, [(1, 0)], **SIZES)
    whole = ReplacingPasses.__init__

    def keeping_all(self, *given, **named):
        whole(self, *given, **named)
        assert self.keeps
        self.keeps = False

    monkeypatch.setattr(ReplacingPasses, "__init__", keeping_all)
    every = head_effects(loaded(model), TEXTS, [(1, 0)], **SIZES)
    assert [r.effect for r in some.rows] == pytest.approx([r.effect for r in every.rows], abs=1e-6)


def test_the_same_seed_gives_the_same_numbers_and_random_heads_are_marked():
    seen: list[tuple[int, int]] = []
    model = loaded(language_model())
    found = head_effects(model, TEXTS, [(0, 1), (1, 2)], progress=lambda *x: seen.append(x), **SIZES)
    assert found == head_effects(model, TEXTS, [(0, 1), (1, 2)], **SIZES)
    heads = dict.fromkeys((r.layer, r.head, r.random) for r in found.rows)
    assert [random for *_, random in heads] == [False, False, True, True]
    assert [layer for layer, *_ in heads] == [0, 1, 0, 1]
    assert {r.replacement for r in found.rows} == {"removed", "uniform", "gaussian"}
    assert seen[-1][0] == seen[-1][1] == len(seen)
    assert found.tokens == 150


def test_windows_are_of_as_many_texts_as_possible():
    long = ["abcdefghij" * 9, "klmnopqrst" * 9, "uvwxyz" * 2]
    chosen = next(batches(long, letter_tokenizer(), max_length=10, batch_size=16, max_tokens=40, spread=True))
    assert sorted(chosen.text_number.tolist()) == [0, 0, 1, 2]
    assert sorted(chosen.offset.tolist()) == [0, 0, 0, 10]
    in_order = next(batches(long, letter_tokenizer(), max_length=10, batch_size=16, max_tokens=40))
    assert in_order.text_number.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("heads", [[], [(0, 0)], [(0, 0), (0, 1), (2, 3), (2, 0)]])
@pytest.mark.parametrize("number", [0, 3, 50])
def test_random_heads_are_others_of_the_same_layers(heads, number):
    counts = [2, 3, 5]
    drawn = random_heads(heads, counts, number, seed=number)
    assert len(drawn) == len(set(drawn)) == min(number, 10 - len(heads))
    assert not set(drawn) & set(heads)
    assert all(0 <= layer < 3 and 0 <= head < counts[layer] for layer, head in drawn)
    wanted = [layer for layer, _ in heads][: len(drawn)]
    for layer in {*wanted}:
        left = counts[layer] - sum(other == layer for other, _ in heads)
        assert sum(other == layer for other, _ in drawn) >= min(left, wanted.count(layer))


# ---------------------------------------------------------------------- intervals


def test_intervals_are_those_of_student_over_clusters():
    stats = pytest.importorskip("scipy.stats")
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(7, generator=draw, dtype=torch.float64)
    found = clustered_mean(5 * values, torch.full((7,), 5))
    expected = stats.ttest_1samp(values.numpy(), 0).confidence_interval(0.95)
    assert [found.low, found.high] == pytest.approx([expected.low, expected.high], rel=1e-10)
    pairs = clustered_mean(values.repeat(2), torch.ones(14), torch.arange(7).repeat(2))
    assert [pairs.value, pairs.low, pairs.high] == pytest.approx([found.value, found.low, found.high], rel=1e-10)
    assert (pairs.clusters, pairs.count) == (7, 14)
    alone = clustered_mean(torch.tensor([3.0]), torch.tensor([2]))
    assert alone.value == 1.5
    assert alone.low != alone.low


def test_intervals_cover_means_of_clusters_of_different_size():
    """Clusters of 1 to 20 tokens with a common part: about 95 % of the intervals hold the mean."""
    draw, inside = torch.Generator().manual_seed(1), 0
    for _ in range(400):
        size = torch.randint(1, 21, (12,), generator=draw)
        common = torch.randn(12, generator=draw, dtype=torch.float64)
        noise = torch.randn(12, generator=draw, dtype=torch.float64) * size.sqrt()
        found = clustered_mean(size * (0.3 + common) + noise, size)
        inside += found.low < 0.3 < found.high
    assert 0.90 < inside / 400 < 0.98


# ---------------------------------------------------------------------- verdicts


FALLS = [-x for x in TEN]
REPEATED = "repeated tokens changes by +1.9 nats (+1.6 to +2.2); 9 of 10 random heads: at most +0.09, one +0.1"
RESTING = "the loss changes by −0.02 nats (−0.03 to −0.01); the median random head: +0.055"
COMPOSED = "later heads changes by −0.65 (−0.69 to −0.61); 9 of 10 random heads: not below −0.09, one −0.1: confirmed"


@pytest.mark.parametrize(
    ("kind", "measure", "mean", "half", "random", "confirmed", "words"),
    [
        ("induction", "repeated_loss", 1.9, 0.3, TEN, True, f"{REPEATED}: confirmed."),
        ("self", "loss", 0.12, 0.04, TEN, False, "not confirmed, the interval reaches below that."),
        ("self", "loss", 0.05, 0.02, TEN, False, "not confirmed, random heads do as much."),
        ("self", "embedding", 0.12, 0.02, TEN, True, "the embedding moves by 0.12 (0.1 to 0.14)"),
        ("previous-token", "induction_score", -0.65, 0.04, FALLS, True, COMPOSED),
        (
            "previous-token",
            "induction_score",
            0.65,
            0.04,
            FALLS,
            False,
            "the induction score of later heads changes by +0.65",
        ),
        ("previous-token", "loss", 0.2, 0.04, TEN, True, "Without it the loss changes by +0.2 nats"),
        ("sink", "loss", -0.02, 0.01, TEN, True, f"{RESTING}: confirmed."),
        ("sink", "loss", 0.04, 0.03, TEN, False, "the interval reaches above that"),
        ("delimiter", "loss", 0.2, 0.03, TEN, False, "half of the random heads do less harm"),
        ("broad", "loss", 0.01, 0.01, TEN, True, "If it looks at all keys alike, the loss changes by +0.01"),
        ("self", "loss", 0.12, None, TEN, False, "one window has no interval"),
        ("self", "loss", 0.12, 0.01, TEN[:2], False, "with 2 other heads to compare it with"),
        ("self", "loss", 0.12, 0.01, [], False, "there is no number to compare"),
    ],
)
def test_verdicts_follow_their_rule(kind, measure, mean, half, random, confirmed, words):
    causes = rows_of(kind, measure, "uniform" if kind == "broad" else "removed", mean, half, random)
    (judged,) = judgements(causes)
    assert judged.verdict == (CONFIRMED if confirmed else NOT_CONFIRMED)
    assert words in judged.words
    part = causes_part(causes)
    assert part is not None
    assert part["heads"][0]["words"] == judged.words
    assert part["confirmed"] == confirmed
    assert [head["random"] for head in part["heads"]] == [False, *[True] * len(random)]


@pytest.mark.parametrize(("kind", "confirmed"), [("self", 1), ("sink", 5), ("broad", 0)])
def test_random_heads_are_judged_against_each_other(kind, confirmed):
    """Ten effects without errors: one is above nine in ten of the others, five are below their middle."""
    causes = rows_of("self", "loss", "removed", 0.5, 0.1, TEN)
    assert random_heads_confirmed(causes, kind) == (confirmed, 10 if kind != "broad" else 0)
    assert random_heads_confirmed(rows_of("self", "loss", "removed", 0.5, 0.1, []), kind) == (0, 0)


def test_every_expectation_is_of_a_type_and_measures_that_exist():
    assert {*EXPECTATIONS} <= {kind.name for kind in HEAD_TYPES}
    assert all({*expected.measures} <= {*MEASURES} for expected in EXPECTATIONS.values())
    assert any("90%" in rule for rule in RULES)


def test_a_broken_file_is_a_sentence(tmp_path):
    assert read_causes(tmp_path) is None
    whole = rows_of("self", "loss", "removed", 0.12, 0.01, TEN)
    (tmp_path / "causes.json").write_text(json.dumps(whole))
    assert read_causes(tmp_path) == whole
    row = whole["rows"][0]
    for broken in (
        *([], {}, whole | {"rows": [row | {"effect": "much"}]}, whole | {"notes": [1]}),
        *(whole | {"rows": [row | {"measure": "x"}]}, whole | {"rows": [row | {"layer": 1.5}]}, whole | {"reason": 3}),
    ):
        (tmp_path / "causes.json").write_text(json.dumps(broken))
        with pytest.raises(ValueError, match="expected what --causes wrote"):
            read_causes(tmp_path)


# ---------------------------------------------------------------------- what is refused or left out


def test_bad_input_is_a_sentence():
    with pytest.raises(ValueError, match=r"causes\.model: expected an encoder or a decoder, got T5Model"):
        head_effects(loaded(make("t5")), TEXTS, [(0, 0)])
    with pytest.raises(ValueError, match="a model with its tokenizer"):
        head_effects(Loaded(make("bert"), None, "tiny", "", ""), TEXTS, [(0, 0)])
    with pytest.raises(ValueError, match=r"causes\.heads: expected \(layer, head\) of 2 layers with 4 heads"):
        head_effects(loaded(language_model()), TEXTS, [(0, 4)], **SIZES)
    with pytest.raises(ValueError, match="windows of at least two tokens"):
        head_effects(loaded(language_model()), ["a"], [(0, 0)])
    with pytest.raises(ValueError, match="a text of at least one token"):
        head_effects(loaded(language_model()), [""], [(0, 0)])


def test_capped_scores_leave_the_gaussian_out_and_say_so():
    found = head_effects(loaded(make("gemma2_capped")), TEXTS, [(0, 0)], **SIZES)
    assert {r.replacement for r in found.rows} == {"removed", "uniform"}
    assert found.notes == ("scores of this model are capped, so that no Gaussian stands for its heads",)


def test_one_window_has_no_interval():
    found = head_effects(loaded(make("bert")), ["abcdefgh"], [(0, 0)])
    row = effect(found, 0, 0)
    assert row.clusters == 1
    assert row.effect > 0
    assert row.low != row.low


# ---------------------------------------------------------------------- a known circuit


@pytest.mark.long
def test_induction_needs_the_induction_head_and_the_previous_token_head_before_it():
    """Composition: the second layer looks for what the first has moved along; other heads do nothing for it."""
    model, _ = trained_model()
    every = [(layer, head) for layer in range(2) for head in range(4)]
    found = head_effects(loaded(model), ["abcdefgh" * 4] * 9, every, controls=0, max_tokens=768)
    means = {}
    for layer, head in every:
        rows = [r for r in found.rows if (r.layer, r.head, r.replacement) == (layer, head, "removed")]
        means[layer, head] = {r.measure: r for r in rows}
    scores = induction_scores(model)
    previous = previous_masses(model)
    best = max(range(4), key=lambda h: scores[h])
    worst = min(range(4), key=lambda h: scores[h])
    feeding = [h for h in range(4) if previous[h] > 0.3]
    assert 0 < len(feeding) < 4
    assert means[1, best]["repeated_loss"].low > 0.5
    assert abs(means[1, worst]["repeated_loss"].effect) < 0.1
    for head in range(4):
        fall = means[0, head]["induction_score"]
        assert fall.high < -0.1 if head in feeding else abs(fall.effect) < 0.03
        assert (means[0, head]["repeated_loss"].low > 1.0) == (head in feeding)
    assert repeated_loss(model, [h for h in range(4) if scores[h] > 0.4]) > 10 * repeated_loss(model, [])


def repeated_loss(model, removed: list[int]) -> float:
    """On the second copy, with heads of the second layer removed at once."""
    ids = repeated_tokens(VOCABULARY, length=LENGTH, sequences=16, seed=1)
    number = torch.arange(16)
    batch = Batch(ids, torch.ones_like(ids), number, number, number, ("",) * 16, ids.numel())
    passes = ReplacingPasses(loaded(model), "test")
    heads = {"model.layers.1.self_attn": removed} if removed else {}
    logits = passes.altered(batch, heads, removed_output, {}, first=LENGTH + 1)
    total, count = passes.window_scores(batch, logits, logits, LENGTH + 1).sum(0).tolist()
    return total / count


def eager_weights(model) -> tuple[torch.Tensor, ...]:
    ids = repeated_tokens(VOCABULARY, length=LENGTH, sequences=16, seed=1)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    model.set_attn_implementation(before)
    return weights


def induction_scores(model) -> list[float]:
    """Of the second layer."""
    table = eager_weights(model)[1]
    return table.diagonal(offset=1 - LENGTH, dim1=-2, dim2=-1)[..., 1:].mean((0, 2)).tolist()


def previous_masses(model) -> list[float]:
    """Of the first layer."""
    return eager_weights(model)[0].diagonal(offset=-1, dim1=-2, dim2=-1).mean((0, 2)).tolist()
