"""Does a bound on attention logits keep trainings alive that die without it? What does it cost where nothing is wrong?

The language model of `cumulant train language` in small, at settings that go wrong and one that does not, with several
remedies and seeds. A run is a line of a JSONL file, replaced in one step; runs that are there are not repeated.

What counts as dead, written down before the runs of the table: a run is dead when its loss is not finite, or when at
the end it is less than 0.1 nats per token better on held-out text than the frequencies of tokens are (those of the
training text, with one added to each count; a run at the right rate is 1.5 nats better). Every other run is alive,
however much worse than at the right rate.

The threshold and the weight of the z-loss come from seed 100, judged on the validation part ("development"). All other
rows have seeds from 0 on, judged on the test part.

    python examples/clipped_training.py                            # half an hour of one core; examples/clipped.jsonl
    python examples/clipped_training.py --page docs/clipping.md    # write the tables of the runs that are there
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from statistics import mean, median, stdev
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cumulant.files import insert, markdown_row, write
from cumulant.kernels import moments
from cumulant.nn import MultiheadAttention, z_loss
from cumulant.nn.block_types import StandardBlock
from cumulant.nn.largest_logit import is_recording, record_largest_logit, start_recording
from cumulant.paper.trainings.language import LanguageTask
from cumulant.paper.trainings.task import Recipe
from cumulant.paper.trainings.train import rate_at
from cumulant.training import LanguageModel, Monitor, MonitorWarning, QKClip

DEAD = 0.1  # nats per token better than frequencies that a run must be to be alive
DEVELOPMENT = "development"
MARK = "clipped"  # of the tables in the page


class Setting(NamedTuple):
    """What is trained and how fast.

    attention_rate  the rate of the matrices of attention over that of everything else
    """

    dim: int
    layers: int
    rate: float
    warmup: int = 0
    attention_rate: float = 1.0
    steps: int = 200
    context: int = 64
    batch: int = 16


class NormedAttention(nn.Module):
    """Attention with QK-norm on the parameters of a layer: queries and keys of norm √d, times a gain per channel."""

    def __init__(self, layer: MultiheadAttention):
        super().__init__()
        self.in_proj_weight, self.in_proj_bias = layer.in_proj_weight, layer.in_proj_bias
        self.out_proj, self.num_heads, self.head_dim = layer.out_proj, layer.num_heads, layer.head_dim
        self.query_gain = nn.Parameter(torch.ones(layer.num_heads, 1, layer.head_dim))
        self.key_gain = nn.Parameter(torch.ones(layer.num_heads, 1, layer.head_dim))

    def forward(self, x: Tensor, *_: Tensor | None, is_causal: bool, **options: object) -> tuple[Tensor, None]:
        """x (batch, n, dim)"""
        assert self.in_proj_weight is not None
        projected = nn.functional.linear(x, self.in_proj_weight, self.in_proj_bias)
        split = projected.unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        query, key = (nn.functional.rms_norm(part, (self.head_dim,)) for part in split[:2])
        eta = query * self.query_gain * self.head_dim**-0.5
        m = moments(eta, key * self.key_gain, split[2], statistics=("max_score", "mean"), causal=is_causal)
        if is_recording(self):
            record_largest_logit(self, m.max_score)
        return self.out_proj(m.mean.transpose(1, 2).flatten(-2)), None


class DescribedAttention(nn.Module):
    """Attention that keeps the log-normalizers (batch, heads, n) of its last call, for a z-loss."""

    def __init__(self, layer: MultiheadAttention):
        super().__init__()
        self.layer, self.log_normalizer = layer, torch.zeros(())

    def forward(self, x: Tensor, *_: Tensor | None, is_causal: bool, **options: object) -> tuple[Tensor, None]:
        """x (batch, n, dim)"""
        output, heads = self.layer.attend(x, x, x, is_causal=is_causal)
        self.log_normalizer = heads.log_normalizer
        return output, None


@dataclasses.dataclass(frozen=True)
class Remedy:
    """What is done about it: a clip, another attention layer, a term of the loss, a lower rate."""

    clip: float | None = None
    momentum: str = "keep"
    layer: Callable[[MultiheadAttention], nn.Module] | None = None
    z_weight: float = 0.0
    slower: float = 1.0


REMEDIES = {
    "nothing": Remedy(),
    **{f"QKClip({bound})": Remedy(clip=float(bound)) for bound in (1, 3, 10, 30, 100)},
    "QKClip(10), momentum scaled": Remedy(clip=10.0, momentum="scale"),
    "QK-norm": Remedy(layer=NormedAttention),
    **{f"z-loss {weight:g}": Remedy(layer=DescribedAttention, z_weight=weight) for weight in (1e-4, 1e-3, 1e-2)},
    "a third of the rate": Remedy(slower=3.0),
    "a tenth of the rate": Remedy(slower=10.0),
}


@cache
def language() -> LanguageTask:
    return LanguageTask()


def frequency_nats(part: str) -> float:
    """Nats per token of ``part`` under the frequencies of tokens in the training text, with one added to each count."""
    task = language()
    counts = torch.bincount(task.stream, minlength=task.standard.vocabulary).double() + 1
    return float(-(counts / counts.sum()).log()[task.held_out[part][1:]].mean())


def build(setting: Setting, remedy: Remedy, seed: int) -> LanguageModel:
    """The model of a seed; those of all remedies begin with the same weights."""
    sizes = {"dim": setting.dim, "hidden": 4 * setting.dim, "layers": setting.layers, "context": setting.context}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = language().build(dataclasses.replace(language().standard, **sizes))
    for block in [module for module in model.modules() if isinstance(module, StandardBlock)]:
        if remedy.layer is not None:
            block.register_module("attention", remedy.layer(block.attention))
    return model


def optimizer_of(model: LanguageModel, setting: Setting) -> torch.optim.Optimizer:
    """AdamW as in `cumulant train`, with a rate of their own for weights of attention."""
    blocks = [module for module in model.modules() if isinstance(module, StandardBlock)]
    attention = {id(p) for block in blocks for p in block.attention.parameters()}
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for p in model.parameters():
        groups.setdefault((id(p) in attention and p.ndim == 2, p.ndim == 2), []).append(p)
    made = [
        {"params": some, "weight_decay": 0.05 if decays else 0.0, "times": setting.attention_rate if fast else 1.0}
        for (fast, decays), some in groups.items()
    ]
    return torch.optim.AdamW(made, lr=setting.rate, betas=(0.9, 0.95), fused=True)


def run(setting: Setting, remedy: Remedy, seed: int, part: str) -> dict:
    """One training: nats on ``part`` at the end, the largest logit of any step, updates with a finite loss, seconds."""
    model, task = build(setting, remedy, seed), language()
    optimizer = optimizer_of(model, setting)
    recipe = Recipe(setting.steps, setting.rate / remedy.slower, setting.batch, setting.warmup)
    monitor, layers = None, [m for m in model.modules() if isinstance(m, MultiheadAttention | NormedAttention)]
    if remedy.clip is None:
        maxima = [start_recording(layer, layer.num_heads) for layer in layers]
    else:
        clip = QKClip(remedy.clip, momentum=remedy.momentum)  # pyright: ignore[reportArgumentType]
        monitor = Monitor(model, every=setting.steps + 1, clip=clip)
        assert monitor.clipper is not None
        maxima = [layer.largest for layer in monitor.clipper.layers]
    largest, losses, start = -math.inf, [], time.process_time()
    for step in range(setting.steps):
        generator = torch.Generator().manual_seed((seed << 32) + step)
        optimizer.zero_grad(set_to_none=True)
        loss = task.loss(model, setting.batch, generator)
        if not math.isfinite(float(loss.detach())):
            break
        losses.append(float(loss.detach()))
        (loss + penalty(model, remedy.z_weight)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(recipe, step) * group["times"]
        optimizer.step()
        largest = max(largest, *(float(m.max()) for m in maxima))
        if monitor is not None:
            monitor.step(optimizer=optimizer)
    seconds = time.process_time() - start
    nats = task.evaluate(model.eval(), part)["nats"] if len(losses) == setting.steps else math.nan
    return {
        "nats": round(nats, 4) if math.isfinite(nats) else None,
        "frequencies": round(frequency_nats(part), 4),
        "last loss": round(mean(losses[-10:]), 4) if losses else None,
        "largest logit": round(largest, 2),
        "steps": len(losses),
        "seconds": round(seconds, 2),
    }


def penalty(model: LanguageModel, weight: float) -> Tensor | float:
    """The z-loss of attention, the mean over layers; 0 without a weight."""
    if not weight:
        return 0.0
    layers = [module for module in model.modules() if isinstance(module, DescribedAttention)]
    return sum(z_loss(layer.log_normalizer, weight) for layer in layers) / len(layers)


RIGHT = Setting(dim=64, layers=4, rate=1e-2)
THIRTY = RIGHT._replace(attention_rate=30.0)
SMALL, WIDE = RIGHT._replace(layers=2), RIGHT._replace(layers=2, dim=128)
WARM = SMALL._replace(warmup=50)
CHOSEN, Z_CHOSEN = "QKClip(10)", "z-loss 0.001"
TRIED = tuple(name for name in REMEDIES if name.startswith(("QKClip", "z-loss")))
BOTH = ("nothing", CHOSEN)
SOME = (*BOTH, "QK-norm")
OTHERS = (Z_CHOSEN, "a third of the rate", "a tenth of the rate")


class Experiment(NamedTuple):
    """Trainings of one setting: with which remedies, from which seeds, judged on which part of the text."""

    setting: Setting
    remedies: dict[str, range]
    part: str = "test"


def seeds(remedies: Iterable[str], count: int, first: int = 0) -> dict[str, range]:
    return dict.fromkeys(remedies, range(first, first + count))


EXPERIMENTS = {
    DEVELOPMENT: Experiment(THIRTY, seeds(("nothing", *TRIED), 1, first=100), "validation"),
    "attention at 30 times the rate": Experiment(THIRTY, seeds(SOME, 10) | seeds(OTHERS, 3)),
    "the right rate": Experiment(RIGHT, seeds(BOTH, 5) | seeds(("QK-norm", Z_CHOSEN), 3)),
    "the right rate, warm-up, 2 layers": Experiment(WARM, seeds(BOTH, 3)),
    "all at 10 times the rate, warm-up, 2 layers": Experiment(WARM._replace(rate=0.1), seeds(BOTH, 3)),
    "all at 20 times the rate, warm-up, 2 layers": Experiment(WARM._replace(rate=0.2), seeds(SOME, 10)),
    "all at 25 times the rate, warm-up, 2 layers": Experiment(
        WARM._replace(rate=0.25), seeds(SOME, 10) | seeds(OTHERS, 3)
    ),
    **{
        f"attention at {times} times the rate, {size}": Experiment(
            setting._replace(attention_rate=float(times)), seeds(SOME, 3)
        )
        for size, setting in (("2 layers", SMALL), ("2 layers, width 128", WIDE))
        for times in (10, 30)
    },
    "all at 4 times the rate": Experiment(RIGHT._replace(rate=4e-2), seeds(SOME, 3)),
    "all at 4 times the rate, warm-up": Experiment(RIGHT._replace(rate=4e-2, warmup=50), seeds(SOME, 3)),
}

HEADER = ("setting", "remedy", "dead", "nats at the end", "last training loss", "largest logit", "CPU seconds")


def rows_of(path: Path) -> list[dict]:
    """The runs that are there."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def is_dead(row: dict) -> bool:
    """By the definition above."""
    return row["nats"] is None or row["nats"] > row["frequencies"] - DEAD


def train_missing(path: Path, only: str | None) -> None:
    """Train what is not in the file; remedies take turns at each seed, so that other programs disturb all of them."""
    rows = rows_of(path)
    done = {(row["experiment"], row["remedy"], row["seed"]) for row in rows}
    for name, experiment in EXPERIMENTS.items():
        trials = [(seed, remedy) for remedy, some in experiment.remedies.items() for seed in some]
        for seed, remedy in sorted(trials, key=lambda trial: trial[0]):
            if (name, remedy, seed) in done or only not in (None, name):
                continue
            found = run(experiment.setting, REMEDIES[remedy], seed, experiment.part)
            row = {"experiment": name, "remedy": remedy, "seed": seed, "part": experiment.part}
            rows.append(row | experiment.setting._asdict() | found)
            write(path, "".join(json.dumps(row) + "\n" for row in rows))
            print(f"{name}, {remedy}, seed {seed}: {found}", flush=True)


def tables(rows: list[dict]) -> str:
    """Every setting with every remedy; and below, what the threshold was chosen by."""
    final = [line for name in EXPERIMENTS if name != DEVELOPMENT for line in lines_of(name, rows)]
    head = [markdown_row(HEADER), markdown_row(["---"] * len(HEADER))]
    return "\n".join([*head, *final, "", *head, *lines_of(DEVELOPMENT, rows)])


def lines_of(name: str, rows: list[dict]) -> list[str]:
    """An experiment: how many runs died, mean ± deviation over seeds, the median of the largest logits."""
    lines, title = [], name
    for remedy in EXPERIMENTS[name].remedies:
        some = [row for row in rows if (row["experiment"], row["remedy"]) == (name, remedy)]
        if some:
            dead = f"{sum(map(is_dead, some))} of {len(some)}"
            columns = [spread([row[key] for row in some], 2) for key in ("nats", "last loss")]
            logits = f"{median(row['largest logit'] for row in some):,.0f}"
            seconds = spread([row["seconds"] for row in some], 1)
            lines.append(markdown_row([title, remedy, dead, *columns, logits, seconds]))
            title = ""
    return lines


def spread(values: list[float | None], digits: int) -> str:
    """Mean ± deviation of the numbers that are there."""
    there = [value for value in values if value is not None]
    if not there:
        return "–"
    return f"{mean(there):.{digits}f}" + (f" ± {stdev(there):.{digits}f}" if len(there) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("examples/clipped.jsonl"), help="the file of the runs")
    parser.add_argument("--only", choices=list(EXPERIMENTS), help="one experiment")
    parser.add_argument("--page", type=Path, help="write the tables of what is there into it, and train nothing")
    given = parser.parse_args()
    if given.page is not None:
        write(given.page, insert(given.page.read_text(encoding="utf-8"), MARK, tables(rows_of(given.out))))
        return
    torch.set_num_threads(1)
    logging.getLogger("cumulant.monitor").setLevel(logging.ERROR)  # a line for every step, here
    warnings.simplefilter("ignore", MonitorWarning)
    train_missing(given.out, given.only)


if __name__ == "__main__":
    main()
