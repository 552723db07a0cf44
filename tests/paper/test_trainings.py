"""Reference trainings: equal parameter counts, what is drawn, checkpoints, resuming, tables, and the command."""

import dataclasses
import itertools
import json
import math
import statistics
from functools import cached_property
from pathlib import Path
from typing import Any

import polars
import pytest
import sklearn.datasets
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from cumulant.cli import application
from cumulant.extras import install
from cumulant.nn.block_types import BLOCK_TYPES, FORMAT, StandardBlock, make_block
from cumulant.nn.calls import on_attention
from cumulant.nn.language_model import LanguageConfig, LanguageModel
from cumulant.nn.stack import BlockStack, StackConfig, count_built, count_parameters, match_parameters
from cumulant.paper.trainings import train as loop
from cumulant.paper.trainings.checkpoints import checkpoint_steps, load_checkpoint
from cumulant.paper.trainings.digits import Digits, DigitsConfig, DigitsTask, load_digits, view
from cumulant.paper.trainings.language import END, LanguageTask, TextSplits, corpus, train_tokenizer, windows_of
from cumulant.paper.trainings.recall import RecallConfig, RecallTask, best_answer, draw_pairs
from cumulant.paper.trainings.search import SEED, best_rate, search
from cumulant.paper.trainings.study import prepare_directory, study
from cumulant.paper.trainings.tables import cells, curve_rows, headings, mean_std, remarks, run_rows, summarise
from cumulant.paper.trainings.task import PARTS, Recipe
from cumulant.paper.trainings.tasks import TASKS, find_task
from cumulant.paper.trainings.train import TrainingRun, rate_at, train

KINDS_LIST = list(BLOCK_TYPES)
TINY = {"dim": 8, "heads": 2, "layers": 1, "hidden": 16}


class TinyRecall(RecallTask):
    recipe = Recipe(steps=6, rate=1e-2, batch=4, warmup=2)
    rates = dict.fromkeys(BLOCK_TYPES, 1e-2)

    @property
    def standard(self):
        return RecallConfig(**TINY, features=4, values=5, pairs=3, asked=2)


class TinyLanguage(LanguageTask):
    recipe = Recipe(steps=3, rate=1e-2, batch=2)
    rates = dict.fromkeys(BLOCK_TYPES, 1e-2)

    @property
    def standard(self):
        return LanguageConfig(**TINY, vocabulary=300, context=16)

    @cached_property
    def corpus(self):
        texts = corpus()
        return TextSplits(texts.train[:3], *([t[:400] for t in part[:2]] for part in (texts.validation, texts.test)))


class TinyDigits(DigitsTask):
    recipe = Recipe(steps=2, rate=1e-2, batch=8)
    rates = dict.fromkeys(BLOCK_TYPES, 1e-2)

    @property
    def standard(self):
        return DigitsConfig(**TINY)

    @cached_property
    def train_digits(self):
        return Digits(*(part[:32] for part in load_digits("train")))

    @cached_property
    def held_out(self):
        return {name: Digits(*(part[:16] for part in load_digits(name))) for name in PARTS}


TINY_TASKS = [TinyRecall, TinyLanguage, TinyDigits]


@pytest.fixture
def tiny(monkeypatch):
    for task in TINY_TASKS:
        monkeypatch.setitem(TASKS, task.name, task)


def tensors(place: Path) -> dict:
    return load_file(place / "model.safetensors")


def same(a: Path, b: Path) -> bool:
    first, second = tensors(a), tensors(b)
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


# blocks and models


@pytest.mark.parametrize("name", TASKS)
def test_all_blocks_have_as_many_parameters_as_the_standard_one_to_one_percent(name):
    task = find_task(name)
    standard = count_built(task.standard, task.build)
    for block in BLOCK_TYPES:
        counted = count_built(task.configure(block), task.build)
        assert abs(counted / standard - 1) < 0.01, (block, counted, standard)


def test_matched_is_the_nearest_width():
    budget = 3333
    found = match_parameters(StackConfig(dim=8, heads=2), budget, BlockStack)
    off = [
        abs(count_built(dataclasses.replace(found, hidden=found.hidden + k), BlockStack) - budget) for k in (-1, 0, 1)
    ]
    assert off[1] == min(off)


def test_counting_uses_up_no_random_number():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    find_task("recall").configure("convex")
    assert torch.equal(torch.rand(1), expected)


def test_parameters_of_a_standard_block_by_hand():
    d, h = 8, 12
    assert count_parameters(StandardBlock(d, 2, h)) == (4 * d * d + 4 * d) + (2 * d * h + h + d) + 4 * d


@pytest.mark.parametrize("block", BLOCK_TYPES)
def test_language_model_does_not_see_the_future(block):
    torch.manual_seed(0)
    config = LanguageConfig(**{**TINY, "block": block}, vocabulary=20, context=8)
    model, ids = LanguageModel(config).double().eval(), torch.randint(20, (2, 8))
    other = ids.clone()
    other[:, 5:] = torch.randint(20, (2, 3))
    with torch.no_grad():
        gap = (model(ids) - model(other)).abs()
    assert gap[:, :5].max() < (2e-2 if block == "equilibrium" else 1e-12)  # to the tolerance of its solver
    assert gap[:, 5:].max() > 1e-3


@pytest.mark.parametrize("block", BLOCK_TYPES)
def test_padding_changes_no_token(block):
    torch.manual_seed(0)
    model = LanguageModel(LanguageConfig(**{**TINY, "block": block}, vocabulary=20, context=8)).double().eval()
    ids = torch.randint(20, (1, 5))
    padded = torch.randint(20, (1, 3))
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])
    with torch.no_grad():
        alone, together = model(ids), model(torch.cat([ids, padded], 1), mask)
    torch.testing.assert_close(together[:, :5], alone, atol=2e-2 if block == "equilibrium" else 1e-12, rtol=0)


def test_loss_of_the_language_model_is_that_of_its_logits():
    torch.manual_seed(0)
    model = LanguageModel(LanguageConfig(**TINY, vocabulary=20, context=8)).double()
    ids, targets = torch.randint(20, (2, 8)), torch.randint(20, (2, 8))
    targets[0, 3] = -100
    expected = nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model.loss(ids, targets), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("block", BLOCK_TYPES)
def test_every_block_tells_what_it_attends_to(block):
    heard = []
    with on_attention(heard.append):
        make_block(block, 8, 2, 16, causal=True)(torch.randn(3, 5, 8))
    assert len(heard) == 1
    assert heard[0].eta.shape[:3] == (3, 2, 5)


def test_bad_sizes_and_names():
    with pytest.raises(ValueError, match=r"StackConfig.dim: expected a multiple of heads, got 10 with 4 heads"):
        StackConfig(dim=10)
    with pytest.raises(ValueError, match=r"StackConfig.layers: expected a positive number, got 0"):
        StackConfig(layers=0)
    with pytest.raises(ValueError, match=r"block: expected one of standard, energy, convex, equilibrium, got 'gated'"):
        StackConfig(block="gated")
    with pytest.raises(ValueError, match=r"train: expected one of language, contrastive, recall, got 'chess'"):
        find_task("chess")
    with pytest.raises(
        ValueError, match=r"match_parameters.standard: expected at most 100 parameters, got .*narrowest"
    ):
        match_parameters(StackConfig(), 100, BlockStack)
    model = LanguageModel(LanguageConfig(**TINY, vocabulary=20, context=8))
    with pytest.raises(ValueError, match=r"LanguageModel.input_ids: expected shape \(batch, n ≤ 8\), got \(1, 9\)"):
        model(torch.zeros(1, 9, dtype=torch.long))


# tasks


def test_held_out_topics_share_no_paragraph_with_the_others():
    parts = [{p.strip() for t in texts for p in t.split("\n\n")} - {""} for texts in corpus()]
    for first, second in itertools.combinations(parts, 2):
        assert first
        assert second
        assert not first & second


def test_tokenizer_tells_any_text_back():
    tokenizer = train_tokenizer(["to be or not to be"] * 3, 300)
    text = "Ωμέγα\n\ttabs, 語 and \x00"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() <= 300
    assert train_tokenizer(["to be or not to be"] * 3, 300).to_str() == tokenizer.to_str()


@pytest.mark.parametrize(("length", "context"), [(2, 3), (7, 3), (8, 3), (4, 1)])
def test_windows_ask_for_every_token_once(length, context):
    inputs, targets = windows_of(torch.arange(length), context)
    asked = targets != -100
    assert targets[asked].tolist() == list(range(1, length))
    assert torch.equal(inputs[asked], targets[asked] - 1)


def test_nats_and_bits_of_a_model_that_knows_nothing():
    """Equal embeddings: every token is as likely as any other."""
    task = TinyLanguage()
    model = task.build(task.standard)
    nn.init.zeros_(model.embedding.weight)
    for part in PARTS:
        found = task.evaluate(model, part)
        size = sum(len(t.encode()) for t in getattr(task.corpus, part))
        assert found["nats"] == pytest.approx(math.log(300), rel=1e-6)
        assert found["bits"] == pytest.approx(math.log2(300) * (len(task.held_out[part]) - 1) / size, rel=1e-6)


def test_cues_are_corrupted_keys_and_answers_their_values():
    config = RecallConfig(features=6, values=500, pairs=4, asked=3, noise=1e-4)
    keys, values, cues, answers = draw_pairs(config, 50, torch.Generator().manual_seed(0))
    assert torch.allclose(keys.norm(dim=-1), torch.ones(50, 4), atol=1e-6)
    nearest = torch.cdist(cues, keys).argmin(-1)
    assert torch.equal(values.gather(1, nearest), answers)
    loud = draw_pairs(dataclasses.replace(config, noise=2.0), 4000, torch.Generator().manual_seed(1))
    near = loud.cues.square().sum(-1).mean()  # |k|² + σ² d
    assert near.item() == pytest.approx(1 + 4 * 6, rel=0.03)


def test_rates_are_tried_on_validation_and_the_best_that_counts_is_found():
    found = search(TinyRecall(), "convex", (1e-3, 1e-2), steps=4)
    expected = {
        r: train(TinyRecall(), "convex", seed=SEED, recipe=TinyRecall.recipe._replace(steps=4, rate=r)) for r in found
    }
    assert list(found) == [1e-3, 1e-2]
    assert all(found[r].metrics != expected[r].metrics for r in found)  # those are of the test part
    judged = {rate: found[1e-3]._replace(metrics={"excess": nats}) for rate, nats in ((1, 0.5), (2, 0.2), (3, 0.3))}
    assert best_rate(TinyRecall(), judged) == 2
    judged[2] = judged[2]._replace(curve=({"step": 4, "converged": 0.9},))
    assert best_rate(TinyRecall(), judged) == 3
    judged[3] = judged[3]._replace(diverged=2)
    assert best_rate(TinyRecall(), judged) == 1
    assert best_rate(TinyRecall(), {}) is None
    with pytest.raises(ValueError, match=r"train.part: expected one of validation, test, got 'train'"):
        train(TinyRecall(), part="train")


def test_the_best_answer_is_the_posterior():
    """By Bayes' rule with normal densities, written out."""
    config = RecallConfig(features=3, values=4, pairs=6, asked=2, noise=0.7)
    shown = draw_pairs(config, 20, torch.Generator().manual_seed(0))
    shown = shown._replace(keys=nn.functional.normalize(shown.keys.double(), dim=-1), cues=shown.cues.double())
    density = torch.distributions.Normal(shown.keys[:, None], 0.7).log_prob(shown.cues[:, :, None]).sum(-1).exp()
    posterior = density / density.sum(-1, keepdim=True)
    expected = torch.stack([(posterior * (shown.values == v)[:, None]).sum(-1) for v in range(4)], -1)
    assert (best_answer(config, shown) - expected).abs().max() < 1e-12


@pytest.mark.long
@pytest.mark.parametrize("block", KINDS_LIST)
def test_no_model_is_better_than_the_best_answer(block):
    task = RecallTask()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = task.evaluate(task.build(task.configure(block)))
    assert found["excess"] > 0
    assert found["nats"] > found["excess"]


def test_views_move_an_image_by_one_pixel_at_most():
    image = torch.zeros(64, 8, 8)
    image[:, 4, 4] = 100.0
    found = view(image, torch.Generator().manual_seed(0)).flatten(1).argmax(1)
    places = {(int(p) // 8, int(p) % 8) for p in found}
    assert places == {(r, c) for r in (3, 4, 5) for c in (3, 4, 5)}


def test_digits_are_split_without_loss():
    parts = [load_digits(name) for name in ("train", *PARTS)]
    assert [len(part.labels) for part in parts] == [1077, 360, 360]
    assert float(parts[0].images.max()) == 1.0
    digits: Any = sklearn.datasets.load_digits()
    whole = digits.images.sum()
    assert float(sum(part.images.double().sum() for part in parts)) * 16 == whole


# one training


def test_rate_rises_and_falls():
    recipe = Recipe(steps=100, rate=2.0, batch=1, warmup=4)
    assert rate_at(recipe, 0) == pytest.approx(0.5, rel=1e-12)
    assert rate_at(recipe, 100) == pytest.approx(0.2, rel=1e-12)
    assert rate_at(recipe._replace(warmup=0), 0) == pytest.approx(2.0, rel=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 9, 10, 300, 1000])
def test_checkpoints_are_about_ten_from_the_first_to_the_last(steps):
    found = checkpoint_steps(steps)
    assert found[0] == 0
    assert found[-1] == steps
    assert len(found) == len(set(found)) <= 10
    assert len(found) >= min(steps + 1, 7)


@pytest.mark.long
def test_a_seed_gives_the_same_training_and_another_seed_another():
    first, again, other = (train(TinyRecall(), seed=seed).metrics for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_training_leaves_the_callers_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    train(TinyRecall())
    assert torch.equal(torch.rand(1), expected)


def test_watcher_is_told_every_update():
    told = []
    run = train(TinyRecall(), on_step=told.append)
    assert [step.step for step in told] == list(range(1, 7))
    assert all(math.isfinite(step.loss) for step in told)
    assert [row["step"] for row in run.curve] == list(checkpoint_steps(6))


class Stop(Exception):
    pass


def stop_at(step):
    def after(told):
        if told.step == step:
            raise Stop

    return after


@pytest.mark.long
@pytest.mark.parametrize("block", BLOCK_TYPES)
def test_resumed_training_is_the_same_to_the_bit(tmp_path, monkeypatch, block):
    monkeypatch.setattr(loop, "SAVED_EVERY", 2)
    task = TinyRecall()
    whole = train(task, block, directory=tmp_path / "whole")
    with pytest.raises(Stop):
        train(task, block, directory=tmp_path / "broken", on_step=stop_at(5))
    told = []
    resumed = train(task, block, directory=tmp_path / "broken", resume=True, on_step=told.append)
    assert told[0].step == 5  # the state of step 4 was the last
    assert resumed.metrics == whole.metrics
    assert resumed.curve == whole.curve
    for step in checkpoint_steps(6):
        name = f"step-{step:06d}"
        assert same(tmp_path / "whole" / name, tmp_path / "broken" / name)
    assert not (tmp_path / "broken" / "state.safetensors").exists()


def test_finished_training_is_read_not_repeated(tmp_path):
    first = train(TinyRecall(), directory=tmp_path)
    told = []
    assert train(TinyRecall(), directory=tmp_path, resume=True, on_step=told.append) == first
    assert told == []


def test_other_settings_are_refused_by_name(tmp_path):
    task = TinyRecall()
    train(task, directory=tmp_path)
    with pytest.raises(ValueError, match=r"--resume: expected steps 6, rate 0.01 as in .*, got steps 7, rate 0.5"):
        train(task, directory=tmp_path, resume=True, recipe=task.recipe._replace(steps=7, rate=0.5))
    with pytest.raises(ValueError, match=r"expected block standard, hidden 16 as in .*, got block convex, hidden"):
        train(task, "convex", directory=tmp_path, resume=True)
    with pytest.raises(ValueError, match=r"train.directory: expected a new directory, got .* Pass --resume to go on"):
        train(task, directory=tmp_path)
    with pytest.raises(ValueError, match=r"train.steps: expected a positive number, got 0"):
        train(task, recipe=task.recipe._replace(steps=0))


def test_damaged_files_are_refused_in_one_sentence(tmp_path, tiny):
    task = TinyRecall()
    with pytest.raises(Stop):
        train(task, directory=tmp_path, on_step=stop_at(3))
    save_file({"a": torch.zeros(1)}, tmp_path / "state.safetensors")
    with pytest.raises(ValueError, match=r"--resume: expected a state of this model in"):
        train(task, directory=tmp_path, resume=True)
    (tmp_path / "state.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"expected a whole safetensors file"):
        train(task, directory=tmp_path, resume=True)
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(ValueError, match=r"--resume: expected a result in"):
        train(task, directory=tmp_path, resume=True)
    (tmp_path / "settings.json").write_text("[")
    with pytest.raises(ValueError, match=r"--resume: expected the settings of a training in"):
        train(task, directory=tmp_path, resume=True)
    (tmp_path / "step-000001" / "model.safetensors").unlink()
    save_file({"a": torch.zeros(1)}, tmp_path / "step-000001" / "model.safetensors")
    with pytest.raises(ValueError, match=r"load_checkpoint: expected .*, got weights that do not fit config.json"):
        load_checkpoint(tmp_path / "step-000001")
    (tmp_path / "step-000001" / "config.json").write_text('{"task": "chess"}')
    with pytest.raises(ValueError, match=r"load_checkpoint: expected .*, got another config.json"):
        load_checkpoint(tmp_path / "step-000001")
    (tmp_path / "step-000002" / "config.json").write_text(
        (tmp_path / "step-000002" / "config.json").read_text().replace(f'"format": {FORMAT}', '"format": 1')
    )
    with pytest.raises(ValueError, match=rf"got format 1 instead of {FORMAT} in .*step-000002"):
        load_checkpoint(tmp_path / "step-000002")
    with pytest.raises(FileNotFoundError, match=r"load_checkpoint: expected .*, got no config.json in"):
        load_checkpoint(tmp_path / "nowhere")


def test_nothing_temporary_is_left_and_a_failed_write_leaves_the_old(tmp_path, monkeypatch):
    task = TinyRecall()
    with pytest.raises(Stop):
        train(task, directory=tmp_path, on_step=stop_at(3))
    state = (tmp_path / "state.safetensors").read_bytes()

    def full(*_args, **_kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match=r"disk full"):
        train(task, directory=tmp_path, resume=True)
    assert (tmp_path / "state.safetensors").read_bytes() == state
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_loss_that_is_no_number_ends_a_training_and_is_told(tmp_path):
    class Broken(TinyRecall):
        def loss(self, model, batch, generator):
            value = super().loss(model, batch, generator)
            return value * math.nan if generator.initial_seed() == 4 else value

    run = train(Broken(), directory=tmp_path)
    assert run.diverged == 4
    assert run.metrics == {}
    assert train(Broken(), directory=tmp_path, resume=True) == run
    (row,) = summarise(TinyRecall(), [run])
    assert row.diverged == 1
    assert cells(TinyRecall(), row)[2:4] == ["–", "–"]


@pytest.mark.parametrize("task", TINY_TASKS, ids=lambda t: t.name)
@pytest.mark.parametrize("block", BLOCK_TYPES)
def test_checkpoint_is_the_model_that_was_trained(tmp_path, tiny, task, block):
    found, models = task(), []
    run = train(found, block, seed=2, directory=tmp_path, on_step=lambda step: models.append(step.model))
    read = load_checkpoint(tmp_path / f"step-{found.recipe.steps:06d}")
    assert (read.task, read.config.block, read.step, read.seed) == (found.name, block, found.recipe.steps, 2)
    assert all(torch.equal(p, q) for p, q in zip(read.model.parameters(), models[-1].parameters(), strict=True))
    assert found.evaluate(read.model) == run.metrics
    assert (read.tokenizer is not None) == (found.name == "language")


def test_tokenizer_beside_a_checkpoint_is_one_that_transformers_reads(tmp_path):
    transformers = pytest.importorskip("transformers")
    task = TinyLanguage()
    train(task, directory=tmp_path)
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "step-000003")
    text = "The with statement\n"
    assert read(text)["input_ids"] == task.tokenizer.encode(text).ids
    assert read.pad_token == END


# several trainings


def made(block, seed, nats, diverged=None):
    metrics = {} if diverged is not None else {"nats": nats, "accuracy": 0.5}
    curve = ({"step": 0, "nats": nats + 1, "accuracy": 0.1}, {"step": 6, "nats": nats, "accuracy": 0.5})
    return TrainingRun("contrastive", block, seed, 1000, 6, metrics, curve, 2.0, diverged)


def test_summary_has_means_spreads_and_distances_seed_by_seed():
    runs = [made("standard", 0, 1.0), made("standard", 1, 2.0), made("convex", 0, 1.5), made("convex", 1, 2.25)]
    standard, convex = summarise(TinyDigits(), runs)
    assert standard.metrics["nats"].deviation == pytest.approx(statistics.stdev([1.0, 2.0]), rel=1e-12)
    assert standard.from_standard is None
    assert convex.from_standard.mean == pytest.approx(0.375, rel=1e-12)
    assert convex.from_standard.deviation == pytest.approx(statistics.stdev([0.5, 0.25]), rel=1e-12)
    row = cells(TinyDigits(), convex)
    assert row == ["convex", "1,000", "1.875 ± 0.530", "50.0% ± 0.0%", "+0.375 ± 0.177", "2 s"]
    assert len(row) == len(headings(TinyDigits()))
    assert [r["seed"] for r in run_rows(runs)] == [0, 1, 0, 1]
    assert len(curve_rows(runs)) == 8


def test_remarks_say_how_equal_sizes_are_and_what_was_found():
    runs = [made("standard", 0, 1.0), made("equilibrium", 0, 1.5), made("equilibrium", 1, 1.5)]
    runs[1] = runs[1]._replace(parameters=1010, curve=({"step": 6, "converged": 0.9},))
    runs[2] = runs[2]._replace(parameters=1010, curve=({"step": 6, "converged": 1.0},))
    assert remarks(summarise(TinyDigits(), runs)) == [
        "Sizes (numbers of parameters) are equal within 1.00%.",
        "equilibrium: 95.0% of the fixed points converged when it was measured.",
    ]
    assert remarks(summarise(TinyDigits(), runs[:1])) == []


def test_one_seed_has_no_spread_and_none_has_no_mean():
    assert mean_std([2.0]) == (2.0, None, 1)
    assert mean_std([]) is None
    (row,) = summarise(TinyDigits(), [made("energy", 0, 1.0)])
    assert row.from_standard is None


def test_study_trains_each_block_with_each_seed_and_notes_warnings(tmp_path, monkeypatch):
    import warnings

    class Warned(TinyRecall):
        def evaluate(self, model, part="test"):
            warnings.warn("no fixed point", RuntimeWarning, stacklevel=1)
            return super().evaluate(model, part)

    prepare_directory(tmp_path / "out", "recall")
    found = study(Warned(), tmp_path / "out", blocks=["standard", "standard", "convex"], seeds=range(2), steps=1)
    assert [(run.block, run.seed) for run in found.runs] == [
        *[("standard", 0), ("convex", 0)],
        *[("standard", 1), ("convex", 1)],
    ]
    assert found.notes[0] == "standard, seed 0: no fixed point"
    assert len(found.notes) == 4
    again = study(Warned(), tmp_path / "out", blocks=["standard", "convex"], seeds=range(2), steps=1, resume=True)
    assert again.notes == found.notes  # nothing is trained again, and nothing that was said is lost


def test_places_that_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--out: expected a directory, got the file"):
        prepare_directory(tmp_path / "file", "recall")
    with pytest.raises(ValueError, match=r"--out: expected a new directory, got .* which holds other files"):
        prepare_directory(tmp_path, "recall", force=True)
    prepare_directory(tmp_path / "out", "recall")
    with pytest.raises(ValueError, match=r"got .* which holds a training. Pass --resume to go on"):
        prepare_directory(tmp_path / "out", "recall")
    with pytest.raises(ValueError, match=r"--resume: expected a training of language in .*, got one of recall"):
        prepare_directory(tmp_path / "out", "language", resume=True)


def test_force_deletes_what_was_trained_and_nothing_else(tmp_path):
    prepare_directory(tmp_path, "recall")
    (tmp_path / "convex" / "seed-0").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    prepare_directory(tmp_path, "language", force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "train.json"]


# the command


def call(*arguments):
    return CliRunner().invoke(application(), ["train", *map(str, arguments)])


def test_command_tries_rates_and_writes_nothing(tmp_path, tiny, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = call("recall", "--search", "--block", "convex", "--steps", 2)
    assert found.exit_code == 0, found.output
    shown = " ".join(found.output.split())
    assert "nats above best on the validation part" in shown
    assert f"{TinyRecall.rates['convex']:g}" in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_command_trains_all_blocks_and_leaves_tables_and_a_figure(tmp_path, tiny):
    place = tmp_path / "out"
    found = call("recall", "--out", place, "--seeds", 2, "--steps", 2)
    assert found.exit_code == 0, found.output
    told = json.loads((place / "results.json").read_text())
    assert [row["block"] for row in told["summary"]] == list(BLOCK_TYPES)
    assert all(row["metrics"]["nats"]["seeds"] == 2 for row in told["summary"])
    assert polars.read_parquet(place / "results.parquet").height == 8
    assert polars.read_parquet(place / "curves.parquet").height == 24
    assert (place / "curves.svg").stat().st_size > 1000
    assert told["guarantees"]["convex"].startswith("behind a norm, given its context a token takes one ascent step")
    assert all("converged" in row for row in told["runs"][KINDS_LIST.index("equilibrium")]["curve"])
    assert "±" in found.output
    assert sorted(p.name for p in (place / "energy" / "seed-1").glob("step-*")) == [f"step-00000{k}" for k in (0, 1, 2)]
    again = call("recall", "--out", place, "--steps", 2)
    assert again.exit_code == 2
    assert "Pass --resume to go on with it, or --force" in again.output
    more = call("recall", "--out", place, "--seeds", 3, "--steps", 2, "--resume", "--block", "standard")
    assert more.exit_code == 0
    assert [run["seed"] for run in json.loads((place / "results.json").read_text())["runs"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["chess"], "train: expected one of language, contrastive, recall, got 'chess'"),
        (["recall", "--block", "gated"], "block: expected one of standard, energy, convex, equilibrium, got 'gated'"),
        (["recall", "--resume", "--force"], "--force: expected to be alone, got --resume beside it"),
    ],
)
def test_command_refuses_in_one_sentence(tmp_path, arguments, words):
    found = call(*arguments, "--out", tmp_path / "out")
    assert found.exit_code == 2
    assert words in " ".join(found.output.split())
    assert not (tmp_path / "out").exists()


def test_interruption_says_how_to_go_on(tmp_path, tiny, monkeypatch):
    def stopped(*_args, **_kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cumulant.paper.trainings.command.study", stopped)
        found = call("recall", "--out", tmp_path / "out")
    assert found.exit_code == 130
    assert "--resume goes on from here" in found.output
    assert call("recall", "--out", tmp_path / "out", "--steps", 1, "--block", "standard", "--resume").exit_code == 0


def test_command_asks_for_what_it_needs_in_the_end_at_the_start(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "polars" else object())
    found = call("recall", "--out", tmp_path / "out")
    assert found.exit_code == 2
    assert f"cumulant train needs polars: run {install('train')}." in " ".join(found.output.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("module", "act"),
    [
        ("tokenizers", lambda: train_tokenizer(["a"], 300)),
        ("sklearn.datasets", lambda: load_digits("test")),
        ("safetensors", lambda: load_checkpoint("nowhere")),
    ],
)
def test_missing_packages_are_named(monkeypatch, tmp_path, module, act):
    monkeypatch.setitem(__import__("sys").modules, module, None)
    if module == "safetensors":
        with pytest.raises(ModuleNotFoundError, match=r"pip install .*\[train\]"):
            train(TinyRecall(), directory=tmp_path)
    else:
        with pytest.raises(ModuleNotFoundError, match=r"pip install .*\[train\]"):
            act()
