"""Hidden states of known law, read through a model that leaves them as they are.

A block of zero weights hands its input on, so that what is kept "in" and "out" of it is what was put in. Gaussian
states then have to look Gaussian, at every width, length and number of sequences, and wherever their means are; and
spectra, norms and norms' contractions have to be those of the law.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scipy.special import digamma, ndtri
from torch import Tensor

from cumulant.observatory.hooks.hidden_states import HiddenStateObserver, observe_hidden_states
from cumulant.observatory.record.rows import LayerRow, NullComparison
from cumulant.observatory.record.tables import layer_rows
from cumulant.observatory.report.verdicts import Answer, verdicts
from cumulant.observatory.statistics.sampling import priorities, uniform
from cumulant.observatory.statistics.states import WithinScatter
from tests.generated.properties import holds_for
from tests.generated.tensors import normal, seeds
from tests.observatory.tiny_models import hf

SHAPE = ("sliced_w2", "skewness", "kurtosis", "lle_error")


@dataclass(frozen=True)
class States:
    """Gaussian states of sequences.

    channels, lengths   their sizes
    spectrum            flat | power (1/√i) | steep (1/i) | spike (one direction with nearly everything)
    apart               how far means of sequences lie apart, in standard deviations of a token
    passes              into how many calls of the model the sequences are put
    looked              share of the sequences whose covariance is kept; 1: up to 2048 tokens of a pass, as by default
    """

    channels: int
    lengths: tuple[int, ...]
    spectrum: str = "flat"
    apart: float = 0.0
    passes: int = 1
    looked: float = 1.0
    seed: int = 0

    def variance(self) -> np.ndarray:
        i = np.arange(1, self.channels + 1)
        spike = np.where(i == 1, 100.0 * self.channels, 1.0)
        return {"flat": np.ones(self.channels), "power": i**-0.5, "steep": 1 / i, "spike": spike}[self.spectrum]

    def states(self) -> Tensor:
        """(sequences, longest, D); what is behind the end of a sequence is not a token."""
        b, length, d = len(self.lengths), max(self.lengths), self.channels
        root = torch.as_tensor(self.variance()).sqrt()
        mean = self.apart * normal(self.seed + 1, b, 1, d)
        turn = torch.linalg.qr(normal(self.seed + 2, d, d)).Q
        return (((normal(self.seed, b, length, d) + mean) * root) @ turn + 3).float()


def identity(channels: int, blocks: int = 2) -> torch.nn.Module:
    """A Llama whose blocks add nothing."""
    sizes = {"hidden_size": channels, "num_hidden_layers": blocks, "intermediate_size": 2, "vocab_size": 4}
    model = hf.LlamaModel(hf.LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1, head_dim=2)).eval()
    for name, parameter in model.named_parameters():
        parameter.data.fill_(1.0 if "norm" in name else 0.0)
    return model


def read(case: States, *, perturb: bool = False) -> HiddenStateObserver:
    """What is kept of the states of a case."""
    model, x = identity(case.channels), case.states()
    rows = torch.arange(x.shape[1]) < torch.tensor(case.lengths)[:, None]
    texts = torch.arange(len(x))
    some = uniform(case.seed, texts, torch.tensor(-1)) < case.looked
    with torch.no_grad(), observe_hidden_states(model, seed=case.seed, perturb=perturb) as layers:
        for part in texts.chunk(case.passes):
            chosen = {} if case.looked == 1 else {"sampled": some[part]}
            layers.expect(texts=texts[part], rows=rows[part], **chosen)
            model(inputs_embeds=x[part], use_cache=False)
    return layers


def ends(layers: HiddenStateObserver) -> list[LayerRow]:
    return [row for row in layer_rows(layers.state(), layers.names(), seed=1) if row.stage == "out"]


def asked(layers: HiddenStateObserver, share: float = 1.0) -> Answer:
    (answer,) = [
        a
        for a in verdicts([], layer_rows(layers.state(), layers.names(), seed=1), [], 1, share=share)
        if a.question.startswith("Does the law")
    ]
    return answer


def sequences(most: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Lengths with up to ``most`` tokens in all: windows of one length, or texts of any."""
    alike = st.sampled_from([2, 3, 16, 64, 256]).flatmap(
        lambda n: st.integers(max(2, 64 // n), max(2, most // n)).map(lambda k: (n,) * k)
    )
    mixed = st.lists(st.integers(1, most // 8), min_size=8, max_size=8).map(tuple)
    return alike | mixed.filter(lambda lengths: sum(lengths) > 64)


def gaussians(channels: list[int], most: int) -> st.SearchStrategy[States]:
    return st.builds(
        States,
        channels=st.sampled_from(channels),
        lengths=sequences(most),
        spectrum=st.sampled_from(["flat", "power", "steep", "spike"]),
        apart=st.sampled_from([0.0, 0.3, 1.0, 10.0]),
        passes=st.sampled_from([1, 2, 3]),
        looked=st.sampled_from([1.0, 0.5]),
        seed=seeds(),
    )


def looks_gaussian(case: States) -> None:
    """The band holds 99 % of Gaussian clouds; twice as wide it holds those of a long fuzz."""
    for row in ends(read(case))[-1:]:
        for name in SHAPE:
            if math.isnan(getattr(row, name).null):  # too few to be sampled
                assert row.sampled < 32 or row.gaussian_rank == 0, (name, row)
                continue
            # sequences of two tokens are symmetric: no skewness at all
            seen, null, low, high = (max(number, 1e-9) for number in getattr(row, name))
            assert null * (low / null) ** 2 <= seen <= null * (high / null) ** 2, (name, row)


@holds_for(gaussians([1, 2, 8, 24], 900), examples=6)
def test_gaussian_states_look_gaussian(case: States) -> None:
    looks_gaussian(case)


@pytest.mark.long
@holds_for(gaussians([64, 200, 384, 576, 1024], 4096), examples=12)
def test_wide_gaussian_states_look_gaussian(case: States) -> None:
    looks_gaussian(case)


@pytest.mark.parametrize(
    "case",
    [
        States(96, (128,) * 24, seed=1),  # 3,072 tokens in one pass, of which 2,048 are looked at
        States(576, (256,) * 8, looked=0.5, seed=5),
        States(8, (64,) * 12, apart=10.0, seed=3),
        States(96, (128,) * 24, looked=0.5, apart=1.0, passes=4, seed=4),
    ],
    ids=["a long pass", "as wide as SmolLM2", "means far apart", "half of the windows"],
)
def test_gaussian_states_are_within_the_band_of_gaussian_samples(case):
    (_, row) = ends(read(case))
    for name in SHAPE:
        seen = getattr(row, name)
        assert seen.null_low <= seen.value <= seen.null_high, name
    assert 0.85 < row.sliced_w2.value / row.sliced_w2.null < 1.15
    assert row.sliced_w2.value < math.sqrt(2)
    assert row.freedom == row.whitened - round(row.whitened / case.lengths[0])


def test_heavy_tails_inside_sequences_are_told():
    case = States(32, (64,) * 24, seed=5)
    x = case.states()
    scale = torch.where(normal(6, *x.shape[:2], 1) > 1, 3.0, 1.0).float()
    layers = watched(case, (x - 3) * scale)
    (_, row) = ends(layers)
    assert row.sliced_w2.value > 1.2 * row.sliced_w2.null_high
    assert row.kurtosis.value > row.kurtosis.null_high
    assert asked(layers).answer == "no"


def test_the_null_is_the_law_of_the_whole_procedure():
    """Gaussian tokens drawn, centred, whitened and sampled by NumPy, as often as the null has clouds."""
    lengths, d, rng = (5, 40, 40, 9, 30), 12, np.random.default_rng(0)
    case = States(d, lengths, seed=7)
    (_, row) = ends(read(case))
    names = np.repeat(np.arange(len(lengths)), lengths)
    order = np.argsort(priorities(7, torch.as_tensor(names), positions(lengths)).numpy())[:512]
    target = ndtri((np.arange(len(order)) + 0.5) / len(order))
    direction = rng.normal(size=(d, 64))
    direction /= np.linalg.norm(direction, axis=0)
    found = []
    for _ in range(300):
        x = rng.normal(size=(len(names), d))
        x -= np.stack([x[names == s].mean(0) for s in range(len(lengths))])[names]
        white = x @ np.linalg.inv(np.linalg.cholesky(x.T @ x / len(x))).T
        b1 = ((white[order] @ white[order].T) ** 3).mean()
        b2 = ((white[order] ** 2).sum(1) ** 2).mean() / (d * (d + 2))
        slices = np.sort(white[order] @ direction, 0) - target[:, None]
        found.append((np.sqrt((slices**2).mean()), b1, b2))
    found = np.array(found)
    error = found.std(0) * np.sqrt(1 / 300 + 1 / 200)
    null = np.array([getattr(row, name).null for name in SHAPE[:3]])
    assert (abs(null - found.mean(0)) < 4.5 * error).all(), (null, found.mean(0), error)
    high = np.array([getattr(row, name).null_high for name in SHAPE[:3]])
    assert (abs(high / np.quantile(found, 0.995, 0) - 1) < 0.15).all()


def positions(lengths: tuple[int, ...]) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])


def watched(case: States, x: Tensor) -> HiddenStateObserver:
    """The same sizes with other states."""
    model = identity(case.channels)
    with torch.no_grad(), observe_hidden_states(model, seed=case.seed, perturb=False) as layers:
        model(inputs_embeds=x.float(), use_cache=False)
    return layers


# ---------------------------------------------------------------------- the verdict, and how much it needs


@dataclass(frozen=True)
class Budget:
    """A verdict asked of ``tokens`` in windows of ``length``, of which a share is looked at."""

    channels: int
    length: int
    tokens: int
    looked: float = 1.0
    seed: int = 0

    def states(self) -> States:
        whole, rest = divmod(self.tokens, self.length)
        lengths = (self.length,) * whole + ((rest,) if rest else ())
        return States(self.channels, lengths, "power", 1.0, 1, self.looked, self.seed)


def budgets() -> st.SearchStrategy[Budget]:
    """Around the threshold: some below, some above."""
    return st.builds(
        _around,
        channels=st.sampled_from([8, 48]),
        length=st.sampled_from([8, 32, 128]),
        part=st.sampled_from([0.5, 0.9, 1.1, 2.0]),
        looked=st.sampled_from([1.0, 0.5]),
        seed=seeds(),
    )


def _around(channels: int, length: int, part: float, looked: float, seed: int) -> Budget:
    needed = max(512, 2 * channels) * length / (length - 1) / looked
    return Budget(channels, length, int(part * needed) + length, looked, seed)


@pytest.mark.long
@holds_for(budgets(), examples=4)
def test_a_verdict_is_given_from_the_stated_number_of_tokens_on(case: Budget) -> None:
    layers = read(case.states())
    within = layers.statistics["layers.1/out/within"]
    assert isinstance(within, WithinScatter)
    answer = asked(layers, case.looked)
    enough = int(within.tokens - within.sequences) >= max(512, 2 * case.channels)
    assert (answer.answer != "open") == enough, answer
    if enough:  # one Gaussian cloud in a hundred lies outside of the band, and gets a no
        looks_gaussian(case.states())
        (_, row) = ends(layers)
        if row.sliced_w2.value <= row.sliced_w2.null_high:
            assert answer.answer == "yes", answer
        return
    needed = int(answer.words.split("read ")[-1].split(" tokens")[0].replace(",", ""))
    assert needed > case.tokens
    assert needed < 4 * (max(512, 2 * case.channels) + 16 * case.length) / case.looked  # and not without need
    again = read(replace(case, tokens=needed).states()).statistics["layers.1/out/within"]
    assert isinstance(again, WithinScatter)
    assert int(again.tokens - again.sequences) >= max(512, 2 * case.channels)


def test_a_model_of_many_gaussian_blocks_is_gaussian():
    """One of 30 blocks lies outside a band of 99 % now and then; the verdict allows for their number."""
    (_, row) = ends(read(States(8, (64,) * 12, seed=3)))
    edge, outside = (
        row._replace(sliced_w2=row.sliced_w2._replace(value=value))
        for value in (1.01 * row.sliced_w2.null_high, 2 * row.sliced_w2.null)
    )
    answer, far = (verdicts([], [row] * 29 + [odd], [], 1)[0] for odd in (edge, outside))
    assert (answer.answer, far.answer) == ("yes", "no")
    assert verdicts([], [row, edge], [], 1)[0].answer == "yes"
    wide = row._replace(channels=2048, sliced_w2=NullComparison())
    (verdict,) = verdicts([], [wide, wide], [], 1)
    assert verdict.answer == "open"
    assert "2,048" in verdict.words
    assert "read" not in verdict.words


# ---------------------------------------------------------------------- spectra and norms


@dataclass(frozen=True)
class Spectrum:
    """Independent states of a known spectrum, so many for each channel."""

    channels: int
    spectrum: str
    times: int
    seed: int = 0

    def states(self) -> States:
        tokens = self.times * self.channels
        return States(self.channels, (64,) * (tokens // 64 + 1), self.spectrum, seed=self.seed)


def spectra() -> st.SearchStrategy[Spectrum]:
    return st.builds(
        Spectrum,
        channels=st.sampled_from([64, 128, 256]),
        spectrum=st.sampled_from(["flat", "power"]),
        times=st.sampled_from([2, 3, 5]),
        seed=seeds(),
    )


@holds_for(spectra(), examples=4)
def test_the_effective_rank_is_that_of_the_law(case: Spectrum) -> None:
    """On the average of some clouds: one of 128 tokens is a few percent off by chance."""
    variance = case.states().variance()
    share = variance / variance.sum()
    rank, ratio = np.exp(-(share * np.log(share)).sum()), 1 / (share**2).sum()
    found = []
    for seed in range(case.seed, case.seed + 8):
        layers = read(replace(case, seed=seed).states())
        covariances = {key: tensor for key, tensor in layers.state().items() if ":spread." in key}
        row = layer_rows(covariances, layers.names())[0]
        found.append((row.effective_rank, row.participation_ratio))
    mean = np.mean(found, 0)
    assert mean[0] == pytest.approx(rank, rel=0.06)
    assert mean[1] == pytest.approx(ratio, rel=0.1)


def test_growth_and_contraction_are_those_of_gaussian_states():
    """A block that adds nothing has growth 1; RMSNorm of N(0, σ²I) divides by |x|/√D and takes out one direction."""
    case, sigma, d = States(24, (32,) * 40, seed=8), 2.5, 24
    model = identity(d)
    with torch.no_grad(), observe_hidden_states(model, seed=0) as layers:
        layers.expect(perturbed=torch.ones(40, dtype=torch.bool))
        model(inputs_embeds=sigma * (case.states() - 3), use_cache=False)
    rows = {(r.block, r.stage): r for r in layer_rows(layers.state(), layers.names())}
    assert abs(rows["layers.0", "out"].growth.value) < 1e-4
    assert rows["layers.0", "out"].perturbed == 40 * 32
    log_rms = math.log(sigma) + (digamma(d / 2) + math.log(2 / d)) / 2
    log_sine = (digamma((d - 1) / 2) - digamma(d / 2)) / 2
    norm = rows["layers.0", "norm input_layernorm"]
    assert norm.contraction.value == pytest.approx(log_sine - log_rms, abs=5 * norm.contraction.se)
    assert norm.contraction.se < 0.01
