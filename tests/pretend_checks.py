"""Whole paths on the device of `pretend_device`, beside the same on the CPU: `python -m tests.pretend_checks NAME`.

In a process of its own and in an empty directory. Prints how far the two are apart, and fails where that is far.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from typer.testing import CliRunner

from cumulant import moments
from cumulant.cli import application
from tests.pretend_device import NAME, register

DEVICES = (NAME, "cpu")


def run(*words: str) -> str:
    """A command, which is to succeed."""
    done = CliRunner().invoke(application(), list(words))
    if done.exit_code:
        raise done.exception if done.exception is not None else RuntimeError(done.output)
    return done.output


def material() -> None:
    """A little language model with its tokenizer, and a text."""
    from tests.observatory.tiny_models import language_model, letter_tokenizer

    language_model().save_pretrained("tiny")
    letter_tokenizer().save_pretrained("tiny")
    letters = "abcdefghijklmnopqrstuvwxyz"
    Path("text.txt").write_text(" ".join(letters[(7 * i + i * i) % 26] for i in range(3000)))


def check_moments() -> float:
    """Every statistic and its gradients, in blocks and by the reference."""
    seed = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 4, 90, 16, generator=seed, dtype=torch.float64) for _ in range(3)]
    mask = torch.rand(2, 4, 90, 90, generator=seed) > 0.3

    def answers(device: str, backend: str) -> list[torch.Tensor]:
        there = [t.to(device).requires_grad_() for t in tensors]
        m = moments(*there, mask=mask.to(device), causal=True, sink=0.3, statistics="all", backend=backend)
        found = [m.log_normalizer, *m.statistics.values()]
        slopes = torch.autograd.grad(sum(t.sum() for t in found), there)  # pyright: ignore[reportArgumentType]
        return [t.detach().cpu() for t in (*found, *slopes)]

    right = answers("cpu", "dense")
    found = [answers(NAME, backend) for backend in ("streaming", "dense", "auto")]
    return max(float((a - b).abs().max()) for one in found for a, b in zip(one, right, strict=True))


def check_train() -> float:
    """`cumulant train`, all blocks, resumed after two steps."""
    import json

    losses = {}
    for device in DEVICES:
        words = ("train", "recall", "--steps", "2", "--out", device, "--device", device)
        run(*words)
        run(*words, "--resume")
        record = json.loads(Path(device, "results.json").read_text())
        losses[device] = {entry["block"]: entry["metrics"]["nats"] for entry in record["runs"]}
    assert len(losses["cpu"]) == 4
    return max(abs(losses[NAME][block] - losses["cpu"][block]) for block in losses["cpu"])


def check_observe() -> float:
    """`cumulant observe` with the removal of heads; without nulls, as parameters of the Python backend cannot be
    replaced in place."""
    import polars as pl

    material()
    tables = {}
    for device in DEVICES:
        sizes = ("--max-tokens", "1024", "--max-length", "64", "--causes", "256", "--null", "none")
        run("observe", "./tiny", "--text", "text.txt", "--out", device, "--device", device, *sizes)
        tables[device] = pl.read_parquet(Path(device, "heads.parquet"))
    ours, right = tables[NAME], tables["cpu"]
    assert ours.shape == right.shape
    numbers = [name for name in right.columns if right[name].dtype.is_float()]
    assert len(right) * len(numbers) > 100
    gaps = [((ours[name] - right[name]).abs() / (1 + right[name].abs())).max() for name in numbers]
    return max(float(gap) for gap in gaps if gap is not None)  # pyright: ignore[reportArgumentType]


def check_audit() -> float:
    """`cumulant audit`: the errors of the default methods at the default budgets."""
    import polars as pl

    material()
    tables = {}
    for device in DEVICES:
        run("audit", "./tiny", "--text", "text.txt", "--out", device, "--device", device)
        tables[device] = pl.read_parquet(sorted(Path(device).glob("*.parquet"))[0])
    ours, right = tables[NAME], tables["cpu"]
    assert ours.shape == right.shape
    numbers = [name for name in right.columns if right[name].dtype.is_float() and "second" not in name]
    gaps = [((ours[name] - right[name]).abs() / (1 + right[name].abs())).max() for name in numbers]
    return max(float(gap) for gap in gaps if gap is not None)  # pyright: ignore[reportArgumentType]


def check_compress() -> float:
    """`cumulant compress`, and `cumulant generate` from the file of either device on the other."""
    material()
    said = set()
    for device, other in (DEVICES, DEVICES[::-1]):
        file = f"{device}.safetensors"
        run("compress", "./tiny", "--text", "text.txt", "--out", file, "--tokens", "200", "--device", device)
        for where in (device, other):
            words = ("generate", "./tiny", "--prompt", "a b c", "--cache", file, "--tokens", "5", "--device", where)
            said.add((device, run(*words)))
    return float(len(said) - 2)  # one text for each file


CHECKS: dict[str, Callable[[], float]] = {
    "moments": check_moments,
    "train": check_train,
    "observe": check_observe,
    "audit": check_audit,
    "compress": check_compress,
}
CLOSE = {"moments": 1e-9, "train": 1e-4, "observe": 1e-3, "audit": 1e-3, "compress": 0.0}

if __name__ == "__main__":
    register()  # not on import: it is for good, and pytest imports every file
    name = sys.argv[1]
    gap = CHECKS[name]()
    sys.stdout.write(f"{name}: {gap:.1e} apart\n")
    raise SystemExit(0 if gap <= CLOSE[name] else 1)
