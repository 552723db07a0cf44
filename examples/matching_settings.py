"""Settings of Attention Matching, as many as were looked at for `backtest`, on the documents that those were chosen on.

    python examples/matching_settings.py              # about an hour of one core
    python examples/matching_settings.py --table      # the table from the runs beside this file

Every setting reads the first two documents of the audit's texts, prose and code; the four with the least KL also
read the next six. What is least over all eight is `Matching`'s default, and what compressed_caches.py compares with.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from compressed_caches import KEEPS, pieces, runs_of

from cumulant.cache import on_cumulant
from cumulant.cache.baselines import Matching
from cumulant.cache.fitted.mass import LOWEST
from cumulant.cache.fitted.nonnegative import HIGHEST
from cumulant.observatory import load

RUNS = Path(__file__).with_suffix(".jsonl")
SETTINGS = {
    "as published": {},
    "omp": {"keys": "omp"},
    "norepeat": {"repeat": False},
    "uniform": {"budgets": "uniform"},
    "1024 queries": {"queries": 1024},
    "ridge 0.001": {"ridge": 1e-3},
    "ridge 0.01": {"ridge": 1e-2},
    "ridge 0.1": {"ridge": 1e-1},
    "wide bounds": {"bounds": (LOWEST, HIGHEST)},
    "512 own": {"own": 512},
    "1536 own": {"own": 1536},
    "16 recent": {"recent": 16},
    "32 recent": {"recent": 32},
    "64 recent": {"recent": 64},
    "1536 own, 32 recent": {"own": 1536, "recent": 32},
    "1536 own, ridge 0.01": {"own": 1536, "ridge": 1e-2},
    "1536 own, 32 recent, ridge 0.01": {"own": 1536, "recent": 32, "ridge": 1e-2},
}
FIRST = 2  # documents that every setting reads
FINALISTS = 4
DOCUMENTS = 8
PREFIX, HORIZON = 1024, 512


def measure() -> None:
    """Run what is missing: all settings on the first documents, then the best of them on the others."""
    loaded = load("smollm2")
    with on_cumulant(loaded.model), torch.no_grad():
        documents = list(pieces(loaded.tokenizer, PREFIX, HORIZON, 0, DOCUMENTS, 1))
        for number, piece in enumerate(documents):
            names = list(SETTINGS) if number < FIRST else best(saved(), FINALISTS)
            done = {run["method"] for run in saved() if run["document"] == number}
            missing = {name: Matching(**SETTINGS[name]) for name in names if name not in done}
            made = runs_of(piece._replace(number=1), loaded, missing, PREFIX)  # 1: nothing is asked
            for name in missing:
                lines = [json.dumps(next(made)) for _ in KEEPS]
                with RUNS.open("a", encoding="utf-8") as file:
                    file.writelines(f"{line}\n" for line in lines)
                print(f"document {number}, {name}", flush=True)


def saved() -> list[dict]:
    """Runs that are beside this file."""
    return [json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines()] if RUNS.exists() else []


def geometric(runs: list[dict], name: str, keep: float | None = None) -> float:
    """Geometric mean of a setting's KL, of one budget or of all."""
    logs = [math.log(r["kl"]) for r in runs if r["method"] == name and keep in (None, r["keep"])]
    return math.exp(sum(logs) / len(logs))


def best(runs: list[dict], number: int) -> list[str]:
    """The settings with the least KL on the first documents."""
    first = [run for run in runs if run["document"] < FIRST]
    return sorted(SETTINGS, key=lambda name: geometric(first, name))[:number]


def table(runs: list[dict]) -> str:
    """Markdown: KL of every setting on the first two documents, and of the finalists on all eight."""
    columns = [f"KL at {keep:g}" for keep in KEEPS]
    rows = [
        f"| setting | {' | '.join(columns)} | all, two documents | all, eight |",
        "|---" * (len(columns) + 3) + "|",
    ]
    first = [run for run in runs if run["document"] < FIRST]
    for name in best(runs, len(SETTINGS)):
        own = [geometric(first, name, keep) for keep in (*KEEPS, None)]
        read = {run["document"] for run in runs if run["method"] == name}
        last = f"{geometric(runs, name):.4f}" if len(read) == DOCUMENTS else "–"
        rows.append(f"| {name} | {' | '.join(f'{x:.4f}' for x in own)} | {last} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Settings of Attention Matching on the documents of development.")
    parser.add_argument("--table", action="store_true", help="print the table of the runs that are there")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not options.table:
        measure()
    print(table(saved()))


if __name__ == "__main__":
    main()
